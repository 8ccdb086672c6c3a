// x[arange(n), i], the i-th part of each sample, as people write it:
//
//   last = hidden[torch.arange(n), lengths - 1]       index.Tensor(x[n m ..], [0 1 2 .., i[n ..]])
//
// reads any sample for each of them, as far as the operator tells. As gather(x, 1, i) it reads its
// own, and the batch can be cut. Its gradient, index_put with accumulate, becomes scatter_add.
// Indices from the end (-1) are made those from the beginning first.
#pragma once

#include <optional>

#include "graph/graph.h"

namespace motley {

// Nothing: there is nothing of the kind.
std::optional<Graph> aligned(const Graph& graph);

}  // namespace motley
