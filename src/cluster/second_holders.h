// Who keeps the second copy of what a device holds alone (--redundancy 1).
//
// Every device keeps that of one other, so that what it takes is spread evenly: a rotation of the
// devices, by the least distance at which most of them have their copy on another machine.
#pragma once

#include <vector>

#include "cluster/cluster.h"

namespace motley {

// [device] the device that keeps its copy; itself where there is no other.
std::vector<int> second_holders(const Cluster& cluster);
// [device] the device whose copy it keeps.
std::vector<int> first_holders(const Cluster& cluster);

}  // namespace motley
