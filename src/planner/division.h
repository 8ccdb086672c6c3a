// In what shares replicas divide the state of parameters.
#pragma once

#include "plan/plan.h"

namespace motley::planner {

// Gives every stage whose replicas have devices of unlike memories the shares that leave most room.
// REQUIRES: the plan divides all stages, between two replicas or more.
void divide_by_room(const Cluster& cluster, Optimizer optimizer, PipelinePlan* pipeline);

}  // namespace motley::planner
