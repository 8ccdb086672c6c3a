// A mixture-of-experts feed-forward layer with capacities (GShard, Lepikhin et al. 2021, Algorithm
// 1).
//
// Every sequence of the batch is a group of its own: the `top` experts of a token, its slot among
// the `capacity` slots that each expert keeps for the group, and whether it is dropped depend on
// tokens of its group only. Routing is therefore the same however the batch is cut. Dispatch and
// combine are products with [group, token, expert, slot] tensors, in which the experts are a
// dimension like any other: cutting it, in whatever shares, places experts on devices.
#pragma once

#include <torch/nn/modules/linear.h>

namespace motley {

struct ExpertsOptions {
  int64_t hidden = 0;   // of a token
  int64_t ffn = 0;      // inside an expert
  int64_t experts = 0;  // any number, at least `top`
  int64_t top = 2;      // experts of a token
  bool gated = false;   // SwiGLU instead of GELU
};

class ExpertsImpl : public torch::nn::Module {
 public:
  explicit ExpertsImpl(const ExpertsOptions& options);
  // x: [group, token, hidden], and so is the result; dropped tokens are zero. Adds to
  // *balance the layer's balance loss, a scalar: 0.01 where tokens are spread evenly, more where
  // not.
  at::Tensor forward(const at::Tensor& x, at::Tensor* balance);

 private:
  // [group, token, expert, slot] weights of what each slot returns to each token.
  at::Tensor route(const at::Tensor& x, at::Tensor* balance);

  ExpertsOptions options_;
  torch::nn::Linear router_;
  at::Tensor gate_, up_, down_;  // [expert, hidden, ffn] twice, [expert, ffn, hidden]
};
TORCH_MODULE(Experts);

}  // namespace motley
