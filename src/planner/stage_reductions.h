// Reduction programs of the stages of a composition (compose.h).
#pragma once

#include <vector>

#include "plan/plan.h"
#include "planner/groups.h"

namespace motley::planner {

// [replica][stage] The group that a stage runs on.
using StageGroups = std::vector<std::vector<const DeviceGroups::Kind*>>;

// What all-reduces in stages, and those of gradients over replicas, do instead of the plain one.
void add_reductions(const StageGroups& kinds, Plan* plan);

}  // namespace motley::planner
