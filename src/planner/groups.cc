#include "planner/groups.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "cluster/part.h"
#include "net/messages.h"
#include "reduce/cluster.h"

namespace motley::planner {

DeviceGroups::Kind::Kind(int n, Cluster c, OverReplicas r, bool planned)
    : number(n),
      cluster(std::move(c)),
      reductions(planned ? reduce::reductions_of_all(cluster) : std::vector<ReductionProgram>()),
      replicas(std::move(r)),
      model(cluster, reductions, replicas) {}

const DeviceGroups::Kind& DeviceGroups::kind_of(Cluster part, OverReplicas replicas) {
  std::string text = look_of(part);
  if (!replicas.piece.empty())
    text += fmt::format("{} {} {}", replicas.fixed, replicas.seconds_per_byte,
                        fmt::join(replicas.piece, " "));
  std::unique_ptr<Kind>& known = kinds_[text];
  if (!known)
    known = std::make_unique<Kind>(static_cast<int>(kinds_.size()), std::move(part),
                                   std::move(replicas), planned_);
  return *known;
}

const DeviceGroups::Kind& DeviceGroups::of(const std::vector<int>& devices) {
  const std::lock_guard lock(mutex_);
  return alone(devices);
}

const DeviceGroups::Kind& DeviceGroups::alone(const std::vector<int>& devices) {
  const Kind*& kind = by_devices_[devices];
  if (kind == nullptr) kind = &kind_of(part_of(cluster_, devices), {});
  return *kind;
}

const DeviceGroups::Kind& DeviceGroups::of(const net::Groups& groups, size_t k,
                                           const ReductionProgram* joint) {
  const std::lock_guard lock(mutex_);
  if (groups.size() == 1) return alone(groups[0]);
  auto [together, fresh] = together_.try_emplace(groups);
  if (fresh) together->second = {static_cast<int>(together_.size()), shared_by(cluster_, groups)};
  const Kind*& kind = by_groups_[{together->second.number, k, joint != nullptr}];
  if (kind != nullptr) return *kind;
  Cluster part = part_of(together->second.shared, groups[k]);
  OverReplicas replicas;
  const bool alike = std::all_of(groups.begin(), groups.end(), [&](const std::vector<int>& g) {
    return g.size() == groups[0].size();
  });
  if (joint != nullptr && alike) {
    replicas.fixed = joint->fixed;
    replicas.seconds_per_byte = joint->seconds_per_byte;
    replicas.piece.assign(part.types.size(), 0);
    // Pieces travel on rings through the replicas, those of all ranks at the same time.
    const auto count = static_cast<double>(groups.size());
    const net::Topology topology(cluster_);
    for (size_t t = 0; t < part.types.size(); ++t) {
      std::vector<net::PairMessage> ring;
      for (size_t i = 0; i < groups[0].size(); ++i) {
        if (part.devices[i].type != static_cast<int>(t)) continue;
        for (size_t r = 0; r < groups.size(); ++r)
          ring.push_back(
              {groups[r][i], groups[(r + 1) % groups.size()][i], 2 * (count - 1) / count * 1e6});
      }
      auto twice = ring;
      for (net::PairMessage& m : twice) m.bytes *= 2;
      replicas.piece[t] =
          (net::messages_time(topology, twice) - net::messages_time(topology, ring)) / 1e6;
    }
  }
  return *(kind = &kind_of(std::move(part), std::move(replicas)));
}
int count_nodes(const Cluster& cluster) {
  return static_cast<int>(std::count_if(cluster.groups.begin(), cluster.groups.end(),
                                        [](const Group& g) { return g.children.empty(); }));
}

Seconds handover(const Cluster& cluster, const std::vector<int>& from, const std::vector<int>& to,
                 Bytes bytes, bool whole) {
  std::vector<net::PairMessage> messages;
  const double receivers = static_cast<double>(to.size());
  for (size_t r = 0; r < to.size(); ++r)
    messages.push_back(
        {from[r * from.size() / to.size()], to[r], whole ? bytes : bytes / receivers});
  return net::messages_time(net::Topology(cluster), messages);
}
}  // namespace motley::planner
