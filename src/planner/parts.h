// Parts of a cluster on which a plan that divides all equally may be faster than on the whole.
#pragma once

#include <string>
#include <vector>

#include "cluster/cluster.h"

namespace motley::planner {

// All devices, those at least as fast as some type, and those of each group of the root, ascending;
// of parts that look alike the first. The largest first.
std::vector<std::vector<int>> parts_worth_trying(const Cluster& cluster);

// " on 4 x A100-40GB, 2 x T4": of the devices that work; empty if all do, or all are of one type.
std::string types_in_words(const Cluster& cluster, const std::vector<int>& working);

}  // namespace motley::planner
