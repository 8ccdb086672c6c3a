#include "cluster/part.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "cluster/channels.h"
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
    add(GroupId(0), GroupId(), {});
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

  // `above`: the groups passed over on the way from the parent, whose ports and direct links the
  // group gets.
  void add(GroupId id, GroupId parent, std::vector<GroupId> above) {
    const Group& g = from_.groups[id.index];
    auto [first, last] = below(id);
    std::vector<GroupId> children;  // those with devices; they are in the devices' order
    for (size_t d = first; d < last && !g.children.empty(); d = below(children.back()).second)
      children.push_back(g.children[child_with(from_, g, devices_[d])]);
    above.push_back(id);
    if (children.size() == 1) {
      add(children[0], parent, std::move(above));
      return;
    }
    GroupId mine(static_cast<int64_t>(to_.groups.size()));
    to_.groups.push_back({.name = g.name,
                          .parent = parent,
                          .link = g.link,
                          .measured = g.measured,
                          .first_device = static_cast<int>(first),
                          .device_count = static_cast<int>(last - first)});
    if (parent.valid()) to_.groups[parent.index].children.push_back(mine);
    for (GroupId passed : above) {
      take_media(passed, parent.valid(), &to_.groups[mine.index]);
      const Backend& backend = from_.groups[passed.index].backend;
      if (!backend.name.empty()) to_.groups[mine.index].backend = backend;
    }
    for (GroupId child : children) add(child, mine, {});
    if (children.empty())
      for (size_t i = first; i < last; ++i)
        to_.devices.push_back({type_[from_.devices[devices_[i]].type], mine});
    Group& made = to_.groups[mine.index];
    if (made.device_count == g.device_count || made.measured.empty()) return;
    const double faster = slowest_port(to_, mine) / slowest_port(from_, id);
    for (CollectiveRate& rate : made.measured)
      if (std::isfinite(faster)) rate.bandwidth *= faster;
  }

  // What a group has besides its link, of the devices that are left; the outermost port counts.
  void take_media(GroupId id, bool port, Group* made) const {
    const Group& g = from_.groups[id.index];
    const auto place = [&](int d) {  // in the group made, -1: left out
      const auto at = std::lower_bound(devices_.begin(), devices_.end(), g.first_device + d);
      if (at == devices_.end() || *at != g.first_device + d) return -1;
      return static_cast<int>(at - devices_.begin()) - made->first_device;
    };
    for (DirectLink link : g.direct) {
      link.a = place(link.a), link.b = place(link.b);
      if (link.a >= 0 && link.b >= 0) made->direct.push_back(link);
    }
    if (!port || made->uplink > 0) return;
    made->uplink = g.uplink;
    for (const Nic& nic : g.nics) {
      Nic left{nic.bandwidth, {}};
      for (int d : nic.near)
        if (const int at = place(d); at >= 0) left.near.push_back(at);
      if (left.near.empty())
        made->uplink -= nic.bandwidth;
      else
        made->nics.push_back(std::move(left));
    }
  }

  const Cluster& from_;
  const std::vector<int>& devices_;
  std::vector<int> type_;
  Cluster to_;
};

BytesPerSecond least_of(const std::vector<Port>& ports) {
  BytesPerSecond least = std::numeric_limits<double>::infinity();
  for (const Port& port : ports) least = std::min(least, port.bandwidth);
  return least;
}

// Without the group's direct links.
std::vector<Port> ports_of_tree(const Cluster& cluster, GroupId id) {
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

}  // namespace

std::vector<Port> ports_of(const Cluster& cluster, GroupId id) {
  std::vector<Port> ports;
  const Group& group = cluster.groups[id.index];
  if (!group.direct.empty() && group.device_count > 1) {
    const BytesPerSecond direct = direct_bandwidth(group.device_count, group.direct);
    for (int d = 0; d < group.device_count; ++d)
      ports.push_back({group.first_device + d, 1, direct});
    std::vector<Port> tree = ports_of_tree(cluster, id);
    return direct > least_of(tree) ? ports : tree;
  }
  return ports_of_tree(cluster, id);
}

std::vector<GroupId> machines_of(const Cluster& cluster) {
  std::vector<GroupId> machines;
  int end = 0;  // of the devices so far; parents come before their children
  for (size_t g = 0; g < cluster.groups.size(); ++g) {
    const Group& group = cluster.groups[g];
    if (group.device_count == 0 || group.first_device < end) continue;
    if (!group.children.empty() && group.direct.empty()) continue;
    machines.push_back(GroupId(static_cast<int64_t>(g)));
    end = group.first_device + group.device_count;
  }
  return machines;
}

BytesPerSecond slowest_port(const Cluster& cluster, GroupId id) {
  return least_of(ports_of(cluster, id));
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
      for (Nic& nic : out.nics) nic.bandwidth /= by.crossing;
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
                                type.overhead, type.speed, type.reserved, type.interference})
      add(number);
    add(type.ops.size());
    for (const OpRate& op : type.ops) {
      text(op.op);
      for (const double number : {op.overhead, op.flops, op.memory_bandwidth, op.cached,
                                  op.uncached_bandwidth, op.launch})
        add(number);
    }
  }
  add(cluster.devices.size());
  for (const Device& device : cluster.devices) add(device.type), add(device.parent.index);
  add(cluster.groups.size());
  for (const Group& group : cluster.groups) {
    text(group.name);
    add(group.parent.index), add(group.link.kind), add(group.link.bandwidth);
    text(group.link.type);
    add(group.link.latency), add(group.uplink), add(group.first_device), add(group.device_count);
    add(group.direct.size());
    for (const DirectLink& link : group.direct)
      add(link.a), add(link.b), add(link.links), add(link.bandwidth), add(link.latency);
    add(group.nics.size());
    for (const Nic& nic : group.nics) {
      add(nic.bandwidth), add(nic.near.size());
      for (int d : nic.near) add(d);
    }
    add(group.measured.size());
    for (const CollectiveRate& rate : group.measured)
      add(rate.collective), add(rate.latency), add(rate.bandwidth), add(rate.least);
    const Backend& b = group.backend;
    text(b.name);
    for (const bool can : {b.messages, b.all_to_all, b.half_sums, b.half_scatters, b.hides})
      add(can);
  }
  return look;
}

Cluster with_slower(const Cluster& cluster, int device, double factor) {
  Cluster changed = cluster;
  DeviceType type = cluster.type_of(device);
  type.name += fmt::format("-slower-{}", device);
  for (double* rate : {&type.flops, &type.half_flops, &type.memory_bandwidth}) *rate /= factor;
  type.overhead *= factor;
  for (OpRate& op : type.ops) {
    for (double* rate : {&op.flops, &op.memory_bandwidth, &op.uncached_bandwidth}) *rate /= factor;
    op.overhead *= factor;
    op.launch *= factor;
  }
  const int old = cluster.devices[static_cast<size_t>(device)].type;
  const bool last = std::count_if(cluster.devices.begin(), cluster.devices.end(),
                                  [&](const Device& d) { return d.type == old; }) == 1;
  if (last) {
    changed.types[static_cast<size_t>(old)] = std::move(type);
  } else {
    changed.devices[static_cast<size_t>(device)].type = static_cast<int>(changed.types.size());
    changed.types.push_back(std::move(type));
  }
  return changed;
}

Cluster part_of(const Cluster& cluster, const std::vector<int>& devices) {
  MOTLEY_CHECK(!devices.empty() && std::is_sorted(devices.begin(), devices.end()));
  MOTLEY_CHECK(devices.front() >= 0 && devices.back() < cluster.size());
  return Part(cluster, devices).run();
}

Cluster scaled_down(const Cluster& cluster, int workers, double cores) {
  // The child of the root that a device is in; the device itself in a flat cluster.
  auto site = [&](int d) {
    int64_t below = -1 - d;
    for (GroupId g = cluster.devices[d].parent; cluster.groups[g.index].parent.valid();
         g = cluster.groups[g.index].parent)
      below = g.index;
    return below;
  };
  std::vector<int> chosen, by_type(cluster.types.size());
  std::map<int64_t, int> by_site;
  std::vector<bool> taken(cluster.size());
  while (static_cast<int>(chosen.size()) < std::min(workers, cluster.size())) {
    int best = -1;
    for (int d = 0; d < cluster.size(); ++d) {
      if (taken[d]) continue;
      auto rank = [&](int x) {
        return std::pair(by_site[site(x)], by_type[cluster.devices[x].type]);
      };
      if (best < 0 || rank(d) < rank(best)) best = d;
    }
    taken[best] = true;
    ++by_site[site(best)];
    ++by_type[cluster.devices[best].type];
    chosen.push_back(best);
  }
  std::sort(chosen.begin(), chosen.end());
  const DeviceType core = [] {
    for (const DeviceType& t : device_catalogue())
      if (t.name == "cpu-core") return t;
    return DeviceType{};
  }();
  Cluster whole = cluster;
  FlopsPerSecond total = 0;
  for (int d : chosen) total += cluster.type_of(d).flops;
  double slower = 0;  // by how much time is stretched
  for (size_t i = 0; i < whole.types.size(); ++i) {
    if (by_type[i] == 0) continue;
    DeviceType& t = whole.types[i];
    t.speed = std::clamp(cores * t.flops / total, 0.01, 1.0);
    slower = std::max(slower, t.flops / (core.flops * t.speed));
    t.flops = t.half_flops = core.flops * t.speed;
    t.memory_bandwidth = core.memory_bandwidth * t.speed;
    t.overhead = core.overhead / t.speed;
    t.ops.clear();
  }
  // The part of a group's devices that is left: ports shrink with the devices that share them.
  auto left = [&](const Group& g) {
    const auto first = std::lower_bound(chosen.begin(), chosen.end(), g.first_device);
    const auto last = std::lower_bound(first, chosen.end(), g.first_device + g.device_count);
    return static_cast<double>(last - first) / g.device_count;
  };
  for (Group& group : whole.groups) {
    double shared = 1;
    for (GroupId child : group.children)
      if (const double part = left(whole.groups[child.index]); part > 0)
        shared = std::min(shared, part);
    group.link.bandwidth *= shared / slower;
    group.uplink *= left(group) / slower;
    group.backend = {};  // emulated devices are CPUs
    for (DirectLink& link : group.direct) link.bandwidth /= slower;
    for (Nic& nic : group.nics) nic.bandwidth /= slower;
    group.measured.clear();
  }
  Cluster part = part_of(whole, chosen);
  part.name = fmt::format("{}-scaled-{}", cluster.name, part.size());
  return part;
}

}  // namespace motley
