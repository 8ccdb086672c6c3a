#include "net/messages.h"

#include <algorithm>

namespace motley::net {

Seconds messages_time(const Topology& topology, const std::vector<PairMessage>& messages) {
  LinkLoad load(static_cast<int>(topology.links().size()));
  Seconds latency = 0;
  for (const PairMessage& m : messages) {
    if (m.from == m.to || m.bytes <= 0) continue;
    topology.add_path(m.from, m.to, m.bytes, &load);
    latency = std::max(latency, topology.latency(m.from, m.to));
  }
  Seconds busiest = 0;
  for (const LinkUse& use : load.take())
    busiest = std::max(busiest, use.flows / topology.links()[use.link].bandwidth);
  return busiest + latency;
}

}  // namespace motley::net
