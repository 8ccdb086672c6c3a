// Part of a cluster: some devices, with what of the tree joins them.
#pragma once

#include <vector>

#include "cluster/cluster.h"

namespace motley {

// Groups without any of the devices are left out, and a group of a single group is that group, with
// its port on the outside. Types are those in use, in the cluster's order; measured rates stay with
// groups that keep all their devices. REQUIRES: devices ascending, at least one.
Cluster part_of(const Cluster& cluster, const std::vector<int>& devices);

// The cluster as each of several groups of devices sees it while all communicate at the same time:
// a port, bus or ring hop that k of them cross has 1/k of its bandwidth for each. Measured rates of
// groups with such a link are left out. REQUIRES: groups are ascending and disjoint.
Cluster shared_by(const Cluster& cluster, const std::vector<std::vector<int>>& groups);

}  // namespace motley
