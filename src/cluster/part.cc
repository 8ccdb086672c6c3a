#include "cluster/part.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/error.h"

namespace motley {

namespace {

// The child of a group of groups that a device below it is below: its place among them.
size_t child_with(const Cluster& cluster, const Group& group, int device) {
  const auto behind = std::upper_bound(
      group.children.begin(), group.children.end(), device,
      [&](int d, GroupId child) { return d < cluster.groups[child.index].first_device; });
  return static_cast<size_t>(behind - group.children.begin()) - 1;
}

// How many groups of devices communicate over a group's port, inside it, and over its ring's hops.
struct Crossed {
  int crossing = 0, inside = 0;
  std::vector<int> hops;  // empty: none are
};

// Counts one group of devices, those of [first, last) being below `id`, which is one at least.
void cross(const Cluster& cluster, GroupId id, const std::vector<int>& devices, size_t first,
           size_t last, std::vector<Crossed>* all) {
  const Group& g = cluster.groups[id.index];
  Crossed& crossed = (*all)[id.index];
  const bool leaves = last - first < devices.size();
  std::vector<int> used;  // members with devices
  for (size_t d = first; d < last;) {
    if (g.children.empty()) {
      used.push_back(devices[d++] - g.first_device);
      continue;
    }
    used.push_back(static_cast<int>(child_with(cluster, g, devices[d])));
    const GroupId child = g.children[used.back()];
    const Group& below = cluster.groups[child.index];
    const auto end = std::lower_bound(devices.begin() + d, devices.begin() + last,
                                      below.first_device + below.device_count) -
                     devices.begin();
    cross(cluster, child, devices, d, end, all);
    d = end;
  }
  crossed.crossing += leaves;
  crossed.inside += leaves || used.size() > 1;
  if (used.size() < 2 || g.link.kind != LinkKind::ring) return;
  // From each to the next, on the shorter side of the ring.
  const int members = g.children.empty() ? g.device_count : static_cast<int>(g.children.size());
  std::vector<bool> hops(static_cast<size_t>(members));
  for (size_t i = 0; i < used.size(); ++i) {
    const int from = used[i], to = used[(i + 1) % used.size()];
    const int forward = (to - from + members) % members;
    const bool shorter = 2 * forward <= members;
    for (int h = 0; h < (shorter ? forward : members - forward); ++h)
      hops[((shorter ? from : to) + h) % members] = true;
  }
  crossed.hops.resize(static_cast<size_t>(members));
  for (int h = 0; h < members; ++h) crossed.hops[h] += hops[h];
}

class Part {
 public:
  Part(const Cluster& cluster, const std::vector<int>& devices)
      : from_(cluster), devices_(devices) {
    to_.name = cluster.name;
    type_.assign(cluster.types.size(), -1);
    for (int d : devices) type_[cluster.devices[d].type] = 0;
    for (size_t t = 0; t < cluster.types.size(); ++t)
      if (type_[t] == 0) {
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
    auto [first, last] = below(id);
    std::vector<GroupId> children;  // those with devices; they are in the devices' order
    for (size_t d = first; d < last && !g.children.empty(); d = below(children.back()).second)
      children.push_back(g.children[child_with(from_, g, devices_[d])]);
    if (uplink == 0) uplink = g.uplink;
    if (children.size() == 1) {
      add(children[0], parent, uplink);
      return;
    }
    GroupId mine(static_cast<int64_t>(to_.groups.size()));
    to_.groups.push_back({.name = g.name,
                          .parent = parent,
                          .link = g.link,
                          .uplink = parent.valid() ? uplink : 0,
                          .measured = g.measured,
                          .first_device = static_cast<int>(first),
                          .device_count = static_cast<int>(last - first)});
    if (parent.valid()) to_.groups[parent.index].children.push_back(mine);
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
  std::vector<Crossed> crossed(cluster.groups.size());
  for (const std::vector<int>& devices : groups)
    if (!devices.empty()) cross(cluster, GroupId(0), devices, 0, devices.size(), &crossed);
  Cluster shared = cluster;
  for (size_t id = 0; id < cluster.groups.size(); ++id) {
    const Group& g = cluster.groups[id];
    Group& out = shared.groups[id];
    const Crossed& by = crossed[id];
    const int inside = g.link.kind == LinkKind::bus ? by.inside
                       : g.link.kind == LinkKind::ring && !by.hops.empty()
                           ? *std::max_element(by.hops.begin(), by.hops.end())
                           : 1;
    if (inside > 1) out.link.bandwidth /= inside;
    if (by.crossing > 1 && g.parent.valid()) {
      const Link& above = cluster.groups[g.parent.index].link;
      if (g.uplink > 0 || above.kind == LinkKind::switched)
        out.uplink = (g.uplink > 0 ? g.uplink : above.bandwidth) / by.crossing;
    }
    if (inside > 1 || by.crossing > 1) out.measured.clear();
  }
  return shared;
}

std::string look_of(const Cluster& cluster) {
  std::string look;
  const auto add = [&](const auto& value) {
    look.append(reinterpret_cast<const char*>(&value), sizeof value);
  };
  const auto text = [&](const std::string& value) {
    add(value.size());
    look += value;
  };
  add(cluster.types.size());
  for (const DeviceType& type : cluster.types) {
    text(type.name);
    for (const double number : {type.flops, type.half_flops, type.memory, type.memory_bandwidth,
                                type.overhead, type.speed, type.reserved})
      add(number);
    add(type.ops.size());
    for (const OpRate& op : type.ops) {
      text(op.op);
      for (const double number :
           {op.overhead, op.flops, op.memory_bandwidth, op.cached, op.uncached_bandwidth})
        add(number);
    }
  }
  add(cluster.devices.size());
  for (const Device& device : cluster.devices) add(device.type), add(device.parent.index);
  add(cluster.groups.size());
  for (const Group& group : cluster.groups) {
    text(group.name);
    add(group.parent.index), add(group.link.kind), add(group.link.bandwidth);
    add(group.link.latency), add(group.uplink), add(group.first_device), add(group.device_count);
    add(group.measured.size());
    for (const CollectiveRate& rate : group.measured)
      add(rate.collective), add(rate.latency), add(rate.bandwidth);
  }
  return look;
}

Cluster part_of(const Cluster& cluster, const std::vector<int>& devices) {
  MOTLEY_CHECK(!devices.empty() && std::is_sorted(devices.begin(), devices.end()));
  MOTLEY_CHECK(devices.front() >= 0 && devices.back() < cluster.size());
  return Part(cluster, devices).run();
}

}  // namespace motley
