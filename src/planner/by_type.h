// Arrangements in which each type of device has stages of its own, for frameworks whose degrees may
// differ from stage to stage: each type in as wide stages as powers of two allow, dividing rows or
// matrices, in every order of types, with blocks in proportion to speed.
//
// Cost: types! times the product of each type's widths; for up to four types.
#pragma once

#include <vector>

#include "grid/model.h"
#include "planner/targets.h"

namespace motley::planner {

// Those that the target can say, the most promising first: by FLOPs alone.
std::vector<Arrangement> arrangements_by_type(const Target& target, const Cluster& cluster,
                                              const grid::Model& model, int64_t batch);

}  // namespace motley::planner
