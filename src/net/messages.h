// Messages between pairs of devices that start together: what pipeline stages send each other.
#pragma once

#include <vector>

#include "net/topology.h"

namespace motley::net {

struct PairMessage {
  int from = 0, to = 0;
  Bytes bytes = 0;
};

// Seconds until all have arrived: the link that is busiest carries all that crosses it, and the
// longest way's latency comes on top. Messages of a device to itself and empty ones are free.
Seconds messages_time(const Topology& topology, const std::vector<PairMessage>& messages);

}  // namespace motley::net
