// Repeats of an order (order.h): stretches of steps that are equal blocks.
#pragma once

#include <vector>

#include "solver/order.h"

namespace motley::solver {

// Finds stretches of equal blocks in shape[from, to) and appends them, cut where the least is live.
// `width`: [step] how much is live after it.
void find_repeats(const std::vector<int>& shape, const std::vector<double>& width, int from, int to,
                  std::vector<Repeat>* repeats);

}  // namespace motley::solver
