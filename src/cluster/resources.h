// What a cluster is made of, as one speaks of it: groups of equal devices in equal places, and
// levels of equal links. "10% more of one of them" is another cluster.
//
//   hapt-64: two device groups, "A100-40GB" and "V100-32GB", and five levels, of which the first is
//   "between a100, v100" and the second "inside a100"
#pragma once

#include <string>
#include <vector>

#include "cluster/cluster.h"

namespace motley {

// Devices of one type in groups that have the same names, links and places.
struct DeviceGroup {
  std::string name;  // the type; where it is in several places: "A100-40GB in rack0/node"
  std::string type;
  std::vector<int> devices;  // ascending
};
std::vector<DeviceGroup> device_groups(const Cluster& cluster);

// A device type that computes, also as measured, and launches so many times slower.
void slow_down(DeviceType* type, double factor);

enum class ResourceKind { speed, memory, bandwidth, latency };
const char* to_string(ResourceKind kind);

// The speed or the memory of a device group, or the bandwidth or the latency of a level of links:
// groups of one depth that have the same names and links, and join at least two children.
struct Resource {
  ResourceKind kind = ResourceKind::speed;
  std::string name;             // "speed of A100-40GB", "bandwidth inside a100/node"
  std::vector<int> devices;     // speed, memory
  std::vector<GroupId> groups;  // bandwidth, latency
};
std::vector<Resource> resources_of(const Cluster& cluster);

// The same cluster with `factor` times as much of a resource: speed scales arithmetic, memory
// bandwidth and launches, also of measured operators; of latency "more" is a part in `factor`.
// Measured collectives that cross a level follow its links. REQUIRES: factor > 0.
Cluster with_more(const Cluster& cluster, const Resource& resource, double factor);

}  // namespace motley
