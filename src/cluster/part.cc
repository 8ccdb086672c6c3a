#include "cluster/part.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/error.h"

namespace motley {

namespace {

class Part {
 public:
  Part(const Cluster& cluster, const std::vector<int>& devices)
      : from_(cluster), devices_(devices) {
    to_.name = cluster.name;
    type_.assign(cluster.types.size(), -1);
    for (size_t t = 0; t < cluster.types.size(); ++t)
      for (int d : devices)
        if (cluster.devices[d].type == static_cast<int>(t) && type_[t] < 0) {
          type_[t] = static_cast<int>(to_.types.size());
          to_.types.push_back(cluster.types[t]);
        }
  }

  Cluster run() {
    add(GroupId(0), GroupId(), 0);
    return std::move(to_);
  }

 private:
  // The devices below a group, as a range of devices_.
  std::pair<size_t, size_t> below(GroupId id) const {
    const Group& g = from_.groups[id.index];
    auto first = std::lower_bound(devices_.begin(), devices_.end(), g.first_device);
    auto last = std::lower_bound(first, devices_.end(), g.first_device + g.device_count);
    return {first - devices_.begin(), last - devices_.begin()};
  }

  // `uplink`: of the groups passed over on the way from the parent, 0 if none has one.
  void add(GroupId id, GroupId parent, BytesPerSecond uplink) {
    const Group& g = from_.groups[id.index];
    std::vector<GroupId> children;
    for (GroupId child : g.children)
      if (auto [first, last] = below(child); first < last) children.push_back(child);
    if (uplink == 0) uplink = g.uplink;
    if (children.size() == 1) {
      add(children[0], parent, uplink);
      return;
    }
    GroupId mine(static_cast<int64_t>(to_.groups.size()));
    to_.groups.push_back(g);
    if (parent.valid()) to_.groups[parent.index].children.push_back(mine);
    auto [first, last] = below(id);
    {
      Group& copy = to_.groups[mine.index];
      copy.parent = parent;
      copy.uplink = parent.valid() ? uplink : 0;
      copy.children.clear();
      copy.first_device = static_cast<int>(first);
      copy.device_count = static_cast<int>(last - first);
    }
    for (GroupId child : children) add(child, mine, 0);
    if (children.empty())
      for (size_t i = first; i < last; ++i)
        to_.devices.push_back({type_[from_.devices[devices_[i]].type], mine});
    Group& made = to_.groups[mine.index];
    if (made.device_count == g.device_count || made.measured.empty()) return;
    const double faster = slowest_port(to_, mine) / slowest_port(from_, id);
    for (CollectiveRate& rate : made.measured)
      if (std::isfinite(faster)) rate.bandwidth *= faster;
  }

  const Cluster& from_;
  const std::vector<int>& devices_;
  std::vector<int> type_;
  Cluster to_;
};

}  // namespace

std::vector<Port> ports_of(const Cluster& cluster, GroupId id) {
  std::vector<Port> ports;
  const Group& group = cluster.groups[id.index];
  const int members =
      group.children.empty() ? group.device_count : static_cast<int>(group.children.size());
  // A bus carries the traffic of every member in both directions.
  const double part = group.link.kind == LinkKind::bus ? 1 / (2. * members) : 1;
  for (int d = 0; d < group.device_count && group.children.empty() && members > 1; ++d)
    ports.push_back({group.first_device + d, 1, part * group.link.bandwidth});
  for (GroupId below : group.children) {
    const Group& child = cluster.groups[below.index];
    const BytesPerSecond bandwidth = child.uplink > 0 ? child.uplink : group.link.bandwidth;
    if (members > 1) ports.push_back({child.first_device, child.device_count, part * bandwidth});
    for (const Port& port : ports_of(cluster, below)) ports.push_back(port);
  }
  return ports;
}

BytesPerSecond slowest_port(const Cluster& cluster, GroupId id) {
  BytesPerSecond least = std::numeric_limits<double>::infinity();
  for (const Port& port : ports_of(cluster, id)) least = std::min(least, port.bandwidth);
  return least;
}

Cluster shared_by(const Cluster& cluster, const std::vector<std::vector<int>>& groups) {
  Cluster shared = cluster;
  for (size_t id = 0; id < cluster.groups.size(); ++id) {
    const Group& g = cluster.groups[id];
    Group& out = shared.groups[id];
    // The children below which a group of devices has any, as ranges of devices.
    std::vector<int> child_of(static_cast<size_t>(g.device_count));
    int children = 0;
    for (GroupId child : g.children) {
      const Group& c = cluster.groups[child.index];
      std::fill_n(child_of.begin() + (c.first_device - g.first_device), c.device_count, children++);
    }
    if (g.children.empty())
      for (int& c : child_of) c = children++;
    int crossing = 0, on_bus = 0;
    std::vector<int> on_hop(static_cast<size_t>(children), 0);
    for (const std::vector<int>& devices : groups) {
      const auto first = std::lower_bound(devices.begin(), devices.end(), g.first_device),
                 last = std::lower_bound(first, devices.end(), g.first_device + g.device_count);
      if (first == last) continue;
      const bool leaves = last - first < static_cast<int64_t>(devices.size());
      std::vector<int> used;
      for (auto d = first; d != last; ++d) {
        const int child = child_of[*d - g.first_device];
        if (used.empty() || used.back() != child) used.push_back(child);
      }
      crossing += leaves;
      on_bus += leaves || used.size() > 1;
      if (used.size() < 2) continue;
      // From each to the next, on the shorter side of the ring.
      std::vector<bool> hops(static_cast<size_t>(children));
      for (size_t i = 0; i < used.size(); ++i) {
        const int from = used[i], to = used[(i + 1) % used.size()];
        const int forward = (to - from + children) % children;
        const bool shorter = 2 * forward <= children;
        for (int h = 0; h < (shorter ? forward : children - forward); ++h)
          hops[((shorter ? from : to) + h) % children] = true;
      }
      for (int h = 0; h < children; ++h) on_hop[h] += hops[h];
    }
    const int inside = g.link.kind == LinkKind::bus ? on_bus
                       : g.link.kind == LinkKind::ring
                           ? *std::max_element(on_hop.begin(), on_hop.end())
                           : 1;
    if (inside > 1) out.link.bandwidth /= inside;
    if (crossing > 1 && g.parent.valid()) {
      const Link& above = cluster.groups[g.parent.index].link;
      if (g.uplink > 0 || above.kind == LinkKind::switched)
        out.uplink = (g.uplink > 0 ? g.uplink : above.bandwidth) / crossing;
    }
    if (inside > 1 || crossing > 1) out.measured.clear();
  }
  return shared;
}

Cluster part_of(const Cluster& cluster, const std::vector<int>& devices) {
  MOTLEY_CHECK(!devices.empty() && std::is_sorted(devices.begin(), devices.end()));
  MOTLEY_CHECK(devices.front() >= 0 && devices.back() < cluster.size());
  return Part(cluster, devices).run();
}

}  // namespace motley
