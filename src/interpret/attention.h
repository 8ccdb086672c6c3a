// Attention on devices other than the CPU. Graphs name libtorch's operator for the CPU
// (graph/ops/attention.cc); here it gets a kernel for CUDA devices.
//
//   out[b h s d], sums[b h s] = attention(q[b h s d], k[b g t d], v[b g t d], p, causal, mask?, scale?)
//
// libtorch chooses between its own kernels as it does for scaled_dot_product_attention. Where none of
// them fits, as in double precision, attention is two products and a softmax, which hold all scores.
#pragma once

namespace motley {

// Registers with libtorch's dispatcher, once:
//   motley_torch::attention, motley_torch::attention_backward: by products, on any device
//   aten::_scaled_dot_product_flash_attention_for_cpu and _backward for CUDA, where libtorch has them
void register_attention();

}  // namespace motley
