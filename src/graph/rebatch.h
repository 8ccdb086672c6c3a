// A captured step at another batch, read off two captures.
//
// Two captures of one model that differ in the batch alone have the same nodes; what differs are
// numbers: sizes of dimensions and size arguments, which grow with the batch in a straight line,
// and real constants, which are proportional to it or to its inverse (the 1/n of a mean). Two
// points fix each of them. No capture of a third batch is needed, and none can differ: what is not
// of this kind is refused.
#pragma once

#include <cstdint>
#include <string>

#include "graph/graph.h"

namespace motley {

// The graph at `samples`, from captures at na and nb. Throws UserError that starts with `where` and
// says which node differs in another way, or which size would not be whole.
// REQUIRES: na != nb, all positive.
Graph at_batch(const Graph& a, int64_t na, const Graph& b, int64_t nb, int64_t samples,
               const std::string& where);

}  // namespace motley
