// Devices that do the same at the same time, of which one stands for all (walk.h).
#pragma once

#include <set>
#include <vector>

#include "cost/cost.h"

namespace motley {

// [device] The first of its type with the same part of all these cuts that is free at the same time;
// with `each`, itself.
std::vector<int> like_of(const CostModel& model, const Fractions& fractions,
                         const std::set<Cut>& cuts, const std::vector<Seconds>& now, bool each);

// Those that stand for others.
std::vector<int> first_of(const std::vector<int>& like);

}  // namespace motley
