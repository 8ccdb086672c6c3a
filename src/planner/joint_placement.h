// Which devices of a site are which ranks of which replicas.
#pragma once

#include <vector>

#include "plan/plan.h"
#include "planner/composition.h"

namespace motley::planner {

// Numbers the devices of a plan's composition anew: in every site (a set of devices) that stages of
// one size fill, the same in all replicas, along stages, replicas and ranks as P2 places their
// reductions jointly, weighted by the bytes of a step: gradients over replicas, what stages send
// inside, gradients over both at once. Returns whether any device moved. `sites` are disjoint.
bool place_jointly(const Cluster& cluster, const std::vector<std::vector<int>>& sites,
                   const Plan& plan, Composition* composition);

}  // namespace motley::planner
