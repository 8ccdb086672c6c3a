// Which devices of a site are which ranks of which replicas.
#pragma once

#include <vector>

#include "core/deadline.h"
#include "plan/plan.h"
#include "planner/composition.h"

namespace motley::planner {

// The part of what time is left that engines give to it.
constexpr double kPlacing = 0.3;

// Numbers the devices of a plan's composition anew: in every site (a set of devices) that stages of
// one size fill, the same in all replicas, along stages, replicas and ranks as P2 places their
// reductions jointly, weighted by the bytes of a step: gradients over replicas, what stages send
// inside, gradients over both at once. Returns whether any device moved. `sites` are disjoint. Once the
// deadline is over, the sites that are left stay as they are.
bool place_jointly(const Cluster& cluster, const std::vector<std::vector<int>>& sites,
                   const Plan& plan, Composition* composition, const Deadline& deadline = {});

}  // namespace motley::planner
