// What a program holds in memory, and from when to when.
#pragma once

#include <vector>

#include "cost/cost.h"

namespace motley {

// lifetimes() of what takes memory of its own: of aliases of one tensor the first, which lives
// until the last of them dies.
std::vector<Held> storages(const Theory& theory, const Program& program,
                           const Fractions& fractions);

}  // namespace motley
