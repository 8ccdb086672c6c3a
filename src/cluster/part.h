// Parts of a cluster: the ports of a group, and some devices with what of the tree joins them.
#pragma once

#include <string>
#include <vector>

#include "cluster/cluster.h"

namespace motley {

// A port of a switch, or what a device or group has of a shared medium.
struct Port {
  int first = 0, count = 0;      // devices below it
  BytesPerSecond bandwidth = 0;  // in one direction, while all members of the medium send
};
// The ports inside a group, at all levels: what a ring through its devices crosses. By the links'
// own numbers, not the measured ones.
std::vector<Port> ports_of(const Cluster& cluster, GroupId group);
// The least bandwidth of them; infinite where there are none.
BytesPerSecond slowest_port(const Cluster& cluster, GroupId group);

// The machines of a cluster, in the order of their devices: the outermost groups with direct links, and
// besides those the groups that hold devices directly.
std::vector<GroupId> machines_of(const Cluster& cluster);

// Groups without any of the devices are left out, and a group of a single group is that group, with
// its port on the outside. Types are those in use, in the cluster's order. A group that loses
// devices keeps its measured rates, the bandwidths in proportion to its slowest port.
// REQUIRES: devices ascending, at least one.
Cluster part_of(const Cluster& cluster, const std::vector<int>& devices);

// The cluster with a device that takes `factor` times as long for all that it computes.
// REQUIRES: factor > 0.
Cluster with_slower(const Cluster& cluster, int device, double factor);

// Equal for clusters that are the same but for their own names, and for them alone. For sets and maps: a
// tenth of the time of to_yaml().
std::string look_of(const Cluster& cluster);

// The cluster as each of several groups of devices sees it while all communicate at the same time:
// a port, bus or ring hop that k of them cross has 1/k of its bandwidth for each. Measured rates of
// groups with such a link are left out. REQUIRES: groups are ascending and disjoint.
Cluster shared_by(const Cluster& cluster, const std::vector<std::vector<int>>& groups);

}  // namespace motley
