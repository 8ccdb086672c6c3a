// Rewrites of a captured graph that make more programs possible and change nothing else.
//
//   mean(x), mean.dim(x)        -> sum * 1/n                 a cut dimension then gives a partial
//   sum mse_loss(mean) and backward -> the sum over elements, * 1/n nll_loss(mean) and backward ->
//   the sum over targets / count, count = how many targets are not ignored, or the sum of their
//                                  classes' weights: computed from the targets alone, so that
//                                  uneven pieces with ignored targets stay exact
//   ones_like, zeros_like, full_like, empty_like, empty -> full      no dependence on the operand
//   x[arange(n), i] -> gather                                        aligned.h
//   sort, grouped products, and back -> rows_mm                      unsorted.h
//
// The result is equal to the input up to rounding.
#pragma once

#include "graph/graph.h"

namespace motley {

Graph canonicalize(const Graph& graph);

}  // namespace motley
