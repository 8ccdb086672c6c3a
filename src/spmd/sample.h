// Random feasible programs, drawn from the theory rather than from optima: the soundness tests run
// them.
#pragma once

#include "core/rng.h"
#include "spmd/build.h"

namespace motley::spmd {

// Every node runs under an option drawn uniformly, every parameter is stored in a placement drawn
// uniformly, and the collectives between them take routes that random prices make cheapest. Options
// that cannot be reached are drawn again. REQUIRES: builder.price() was called.
Program random_program(const Builder& builder, Rng* rng);

}  // namespace motley::spmd
