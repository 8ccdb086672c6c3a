// What a step puts on the network: the bytes that cross every link.
//
// Collectives are counted as rings around their devices in order (an all-to-all: from each to each),
// or by the reduction program that takes them; uneven pieces as they are. Pipelines' messages are
// those of exchange.h. Two devices that all-reduce S bytes send S/2 + S/2 each:
//
//   2 devices on a switch, all_reduce of 64 MB       "device 0 up" 64 MB, "device 0 down" 64 MB, ...
//
// Cost: a pass over the programs of all stages, and a path for each hop of the rings.
#pragma once

#include <vector>

#include "core/deadline.h"
#include "net/topology.h"
#include "plan/plan.h"

namespace motley {

// [link of the topology] REQUIRES: the topology is of the plan's cluster.
std::vector<Bytes> link_bytes(const Plan& plan, const net::Topology& topology,
                              const Deadline& deadline = {});

}  // namespace motley
