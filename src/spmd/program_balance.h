// Load balancing of a program whose costs are known (cost/cost.h): the linear program of balance.h.
#pragma once

#include "cost/cost.h"
#include "solver/balance.h"

namespace motley::spmd {

// The LP of section 5.1 for a program; `tied`: with the same ratios in all segments. `memory_limit`
// false: devices have room for anything.
solver::BalanceProblem balance_problem(const ProgramCost& cost, const CostModel& model,
                                       int segments, bool tied, bool memory_limit);

// How much of the step each type decides under the present shares: the weights that make the price
// of this program its cost.
solver::Weights deciding_weights(const ProgramCost& cost);

}  // namespace motley::spmd
