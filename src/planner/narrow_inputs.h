// A pass over a plan of one program.
#pragma once

#include "plan/plan.h"

namespace motley::planner {

// Stores inputs in the pieces that the program cuts them into, so that a worker need not load the
// rest. Where every use of a whole input, or of a view of one, is one slice, the piece is made in
// its place; slices and views are free, so the plan's price is the same.
void narrow_inputs(Plan* plan);

}  // namespace motley::planner
