#include "cluster/resources.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <tuple>

#include "cluster/part.h"

namespace motley {

namespace {

constexpr size_t kNames = 4;  // of children that a level's name lists

// "a100/node": the names from below the root to a group; the root's own is empty.
std::string path_of(const Cluster& cluster, GroupId id) {
  std::string path;
  for (; cluster.groups[id.index].parent.valid(); id = cluster.groups[id.index].parent)
    path = cluster.groups[id.index].name + (path.empty() ? "" : "/" + path);
  return path;
}

// The links on the way to the root, which equal places have in common.
std::string place_of(const Cluster& cluster, GroupId id) {
  std::string place;
  for (; id.valid(); id = cluster.groups[id.index].parent) {
    const Group& g = cluster.groups[id.index];
    place += fmt::format("{}|{}|{}|{}|{}/", g.name, static_cast<int>(g.link.kind), g.link.bandwidth,
                         g.link.latency, g.uplink);
    for (const DirectLink& d : g.direct)
      place += fmt::format("{}-{}:{}*{},{}/", d.a, d.b, d.links, d.bandwidth, d.latency);
    for (const Nic& nic : g.nics)
      place += fmt::format("{}:{}/", nic.bandwidth, fmt::join(nic.near, ","));
  }
  return place;
}

// What measured collectives over a group take follows its slowest port and its latency.
void follow_links(const Cluster& before, Cluster* after, const Resource& resource, double factor) {
  for (size_t i = 0; i < after->groups.size(); ++i) {
    Group& group = after->groups[i];
    if (group.measured.empty()) continue;
    const GroupId id(static_cast<int64_t>(i));
    const double faster = slowest_port(*after, id) / slowest_port(before, id);
    const bool own =
        std::find(resource.groups.begin(), resource.groups.end(), id) != resource.groups.end();
    for (CollectiveRate& rate : group.measured) {
      if (std::isfinite(faster)) rate.bandwidth *= faster;
      if (own && resource.kind == ResourceKind::latency)
        rate.latency /= factor, rate.least /= factor;
    }
  }
}

void speed_up(Cluster* cluster, const std::vector<int>& devices, double factor, ResourceKind kind) {
  std::map<int, int> made;  // types to those in their place
  for (const int d : devices) {
    const int old = cluster->devices[d].type;
    auto it = made.find(old);
    if (it == made.end()) {
      DeviceType type = cluster->types[old];
      if (kind == ResourceKind::memory) {
        type.memory *= factor;
      } else {
        slow_down(&type, 1 / factor);
      }
      const int64_t of_type = std::count_if(cluster->devices.begin(), cluster->devices.end(),
                                            [&](const Device& x) { return x.type == old; });
      if (of_type == static_cast<int64_t>(devices.size())) {
        cluster->types[old] = std::move(type);
        return;
      }
      it = made.emplace(old, static_cast<int>(cluster->types.size())).first;
      type.name += "+";
      cluster->types.push_back(std::move(type));
    }
    cluster->devices[d].type = it->second;
  }
}

}  // namespace

void slow_down(DeviceType* type, double factor) {
  type->flops /= factor;
  type->half_flops /= factor;
  type->memory_bandwidth /= factor;
  type->overhead *= factor;
  for (OpRate& rate : type->ops) {
    rate.overhead *= factor;
    rate.launch *= factor;
    rate.flops /= factor;
    rate.memory_bandwidth /= factor;
    rate.uncached_bandwidth /= factor;
  }
}

std::vector<DeviceGroup> device_groups(const Cluster& cluster) {
  std::map<std::pair<int, std::string>, size_t> place;
  std::map<int64_t, std::string> known;  // places of groups
  std::vector<DeviceGroup> groups;
  std::vector<std::string> paths;
  std::map<std::string, int> places;  // of a type
  for (int d = 0; d < cluster.size(); ++d) {
    const Device& device = cluster.devices[d];
    auto [text, unknown] = known.try_emplace(device.parent.index);
    if (unknown) text->second = place_of(cluster, device.parent);
    const auto [it, fresh] = place.try_emplace({device.type, text->second}, groups.size());
    if (fresh) {
      groups.push_back({cluster.type_of(d).name, cluster.type_of(d).name, {}});
      paths.push_back(path_of(cluster, device.parent));
      ++places[groups.back().type];
    }
    groups[it->second].devices.push_back(d);
  }
  std::map<std::string, int> named;
  for (size_t g = 0; g < groups.size(); ++g) {
    if (places[groups[g].type] > 1 && !paths[g].empty()) groups[g].name += " in " + paths[g];
    if (const int n = ++named[groups[g].name]; n > 1) groups[g].name += fmt::format(" ({})", n);
  }
  return groups;
}

const char* to_string(ResourceKind kind) {
  switch (kind) {
    case ResourceKind::speed:
      return "speed";
    case ResourceKind::memory:
      return "memory";
    case ResourceKind::bandwidth:
      return "bandwidth";
    case ResourceKind::latency:
      return "latency";
  }
  return "?";
}

std::vector<Resource> resources_of(const Cluster& cluster) {
  std::vector<Resource> resources;
  const std::vector<DeviceGroup> groups = device_groups(cluster);
  for (const ResourceKind kind : {ResourceKind::speed, ResourceKind::memory})
    for (const DeviceGroup& group : groups)
      resources.push_back(
          {kind, fmt::format("{} of {}", to_string(kind), group.name), group.devices, {}});
  std::map<std::string, std::vector<GroupId>> levels;
  std::vector<std::string> order;
  for (size_t i = 0; i < cluster.groups.size(); ++i) {
    const Group& g = cluster.groups[i];
    if ((g.children.empty() ? static_cast<size_t>(g.device_count) : g.children.size()) < 2)
      continue;
    const GroupId id(static_cast<int64_t>(i));
    auto [it, fresh] = levels.try_emplace(place_of(cluster, id));
    if (fresh) order.push_back(it->first);
    it->second.push_back(id);
  }
  std::vector<std::string> names;
  std::map<std::string, int> named;
  for (const std::string& key : order) {
    const GroupId id = levels[key][0];
    const Group& g = cluster.groups[id.index];
    std::string name = "inside " + path_of(cluster, id);
    if (!g.parent.valid()) {
      std::vector<std::string> children;
      for (const GroupId child : g.children)
        if (const std::string& c = cluster.groups[child.index].name;
            std::find(children.begin(), children.end(), c) == children.end())
          children.push_back(c);
      if (children.size() > kNames) children.resize(kNames), children.emplace_back("...");
      name = children.empty() ? "between the devices"
                              : fmt::format("between {}", fmt::join(children, ", "));
    }
    if (const int n = ++named[name]; n > 1) name += fmt::format(" ({})", n);
    names.push_back(name);
  }
  for (const ResourceKind kind : {ResourceKind::bandwidth, ResourceKind::latency})
    for (size_t l = 0; l < order.size(); ++l)
      if (kind == ResourceKind::bandwidth ||
          cluster.groups[levels[order[l]][0].index].link.latency > 0)
        resources.push_back(
            {kind, fmt::format("{} {}", to_string(kind), names[l]), {}, levels[order[l]]});
  return resources;
}

Cluster with_more(const Cluster& cluster, const Resource& resource, double factor) {
  Cluster more = cluster;
  if (resource.groups.empty()) {
    speed_up(&more, resource.devices, factor, resource.kind);
    return more;
  }
  for (const GroupId id : resource.groups) {
    Group& group = more.groups[id.index];
    if (resource.kind == ResourceKind::latency) {
      group.link.latency /= factor;
      for (DirectLink& link : group.direct) link.latency /= factor;
      continue;
    }
    group.link.bandwidth *= factor;
    for (DirectLink& link : group.direct) link.bandwidth *= factor;
    for (const GroupId child : group.children) {
      more.groups[child.index].uplink *= factor;
      for (Nic& nic : more.groups[child.index].nics) nic.bandwidth *= factor;
    }
  }
  follow_links(cluster, &more, resource, factor);
  return more;
}

}  // namespace motley
