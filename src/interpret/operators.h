// Operators of our own, where those of ATen return tensors whose shapes depend on numbers, or need
// rows in an order that depends on all of them.
//
//   motley_torch::ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)
//     -> loss, log_alpha
//       aten::_ctc_loss.Tensor with log_alpha padded to the longest target that the shape of
//       `targets` allows, [samples, time, 2 * longest + 1]; aten::_ctc_loss_backward reads no more
//       of it than before.
//
//   motley_torch::rows_mm(x, w, ids) -> y
//     x[s k], w[e k n], ids[s]: y[s] = x[s] w[ids[s]]; zero where no matrix has that number
//   motley_torch::rows_outer(x, y, ids, experts) -> w
//     x[s m], y[s n], ids[s]: w[e] = the sum of x[s]^T y[s] over the rows with ids[s] = e
//
// Both sort the rows by id inside and make one product per matrix: of bf16, where libtorch has
// _grouped_mm, by that.
#pragma once

#include <cstdint>

#include "graph/graph.h"

namespace motley {

// Registers them with libtorch's dispatcher, and kernels of operators that have none on a device
// (attention.h); once.
void register_operators();

// The last size of log_alpha for targets of a shape, [samples, longest] or all in one run.
int64_t ctc_width(const Shape& targets);

}  // namespace motley
