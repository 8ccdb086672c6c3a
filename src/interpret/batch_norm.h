// Batch normalisation on CUDA devices by cuDNN, as torch's own batch_norm() has it. Graphs name
// aten::native_batch_norm, whose kernels there read each channel by one block: for the first layers
// of a ResNet, which have few, several times as slow.
#pragma once

#include <ATen/core/stack.h>

namespace motley {

// Calls of aten::native_batch_norm and _backward with their arguments on a stack: puts the results in
// their place. False, with the stack as it was, where cuDNN does not take them: off CUDA, in
// evaluation, of other layouts or types.
bool batch_norm_by_cudnn(torch::jit::Stack* stack);
bool batch_norm_backward_by_cudnn(torch::jit::Stack* stack);

}  // namespace motley
