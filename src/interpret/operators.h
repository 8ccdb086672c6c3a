// Operators of our own, where those of ATen return tensors whose shapes depend on numbers.
//
//   motley_torch::ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)
//     -> loss, log_alpha
//       aten::_ctc_loss.Tensor with log_alpha padded to the longest target that the shape of
//       `targets` allows, [samples, time, 2 * longest + 1]; aten::_ctc_loss_backward reads no more
//       of it than before.
#pragma once

#include <cstdint>

#include "graph/graph.h"

namespace motley {

// Registers them with libtorch's dispatcher, once.
void register_operators();

// The last size of log_alpha for targets of a shape, [samples, longest] or all in one run.
int64_t ctc_width(const Shape& targets);

}  // namespace motley
