// Random feasible programs, drawn from the theory rather than from optima: the soundness tests run
// them.
#pragma once

#include "core/rng.h"
#include "spmd/build.h"

namespace motley::spmd {

using namespace solver;

// Every node runs under an option drawn among those it can reach, more often than not one that
// takes its operands as they are; every parameter is stored in a placement drawn uniformly;
// collectives take the routes that random prices make cheapest, in a form drawn at random.
// REQUIRES: builder.price() was called.
Program random_program(const ProblemBuilder& builder, Rng* rng);

}  // namespace motley::spmd
