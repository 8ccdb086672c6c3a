// Sorts whose order nobody sees are left out.
//
// A mixture of experts, as people write it, sorts the rows of its tokens by expert, multiplies each
// run of rows by the matrix of its expert, and puts the rows back:
//
//   ids', p = sort(ids);  x' = x[p / k];  y' = _grouped_mm(x', w, cumsum(histc(ids')));  y = y'[inverse of p]
//
// In this form every row depends on all of the batch. What it computes does not:
//
//   x'' = each row of x, k times;  y = rows_mm(x'', w, ids)
//
// gives the same y row by row (interpret/operators.h), and its batch can be cut. The same holds for
// whatever else happens to the rows in between, as long as that is row by row or a sum over all of
// them: read off the labels of the operators (op.h). A sort with any other reader stays as it is.
//
// The result is equal to the input up to the order in which rows are added up.
#pragma once

#include <optional>

#include "graph/graph.h"

namespace motley {

// Nothing: there is nothing of the kind.
std::optional<Graph> unsorted(const Graph& graph);

}  // namespace motley
