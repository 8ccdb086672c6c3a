// How much memory a plan's workers have allocated.
#pragma once

#include <vector>

#include "plan/plan.h"

namespace motley {

// Bytes of a worker in a step of training, on threads of this process: the most at once, and what
// is left behind it. The step before, which makes the optimizer's state, does not count.
struct HeldBytes {
  double most = 0, after = 0;
};
std::vector<HeldBytes> held_by_workers(const Plan& plan);

}  // namespace motley
