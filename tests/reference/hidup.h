// HiDup's own search, and all programs in all divisions, on small synthesis problems.
//
// HiDup (its authors' code of 2022): nodes in a fixed order; a state is what forms live values are
// there in, two at most each. From every state a depth-first walk appends nodes under each option,
// with the collectives they need of values that were there when the stage began, at most ten nodes
// a stage. A stage without collectives is the first, or follows one of ten nodes. Every state keeps
// a Pareto set of (time, debt): a stage takes max(debt, comm) + max(compute, comm), and its
// computation is the debt of the second part; the last debt is paid at the end.
#pragma once

#include "spmd/parts_search.h"

namespace motley::spmd {

// Seconds of the best program by HiDup's search, two parts, one device type, no interference.
Seconds hidup(const solver::Problem& problem, int most_nodes = 10);

// The fastest of all programs, by every division of every combination of options.
Seconds best_of_all_in_parts(const solver::Problem& problem, const PartsSearch& search);

}  // namespace motley::spmd
