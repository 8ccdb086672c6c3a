// Part of a cluster: some devices, with what of the tree joins them.
#pragma once

#include <vector>

#include "cluster/cluster.h"

namespace motley {

// Groups without any of the devices are left out, and a group of a single group is that group, with
// its port on the outside. Types are those in use, in the cluster's order; measured rates stay with
// groups that keep all their devices. REQUIRES: devices ascending, at least one.
Cluster part_of(const Cluster& cluster, const std::vector<int>& devices);

}  // namespace motley
