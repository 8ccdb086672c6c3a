// A solution that takes a cheapest option of every node, where these meet: no value is converted
// between them. None is better. So it is on one device, where all that is cut costs more. It takes
// no order and no bounds, and time linear in the problem.
//
// Of options that cost the same, the first one that takes its inputs as they are made.
#pragma once

#include <optional>

#include "solver/problem.h"

namespace motley::solver {

// Nothing where they do not meet; `states` and `seconds` are 0.
std::optional<Solution> cheapest(const Problem& problem, const Weights& weights);

}  // namespace motley::solver
