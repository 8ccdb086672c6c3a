#include "zoo/transformer.h"

#include <ATen/Functions.h>
#include <torch/types.h>

#include <cmath>

namespace motley {
namespace {

torch::nn::LayerNorm layer_norm(int64_t size) {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({size}));
}

}  // namespace

BlockImpl::BlockImpl(const BlockOptions& options)
    : options_(options),
      norm1_(register_module("norm1", layer_norm(options.hidden))),
      norm2_(register_module("norm2", layer_norm(options.hidden))),
      qkv_(register_module("qkv", torch::nn::Linear(options.hidden, 3 * options.hidden))),
      projection_(
          register_module("projection", torch::nn::Linear(options.hidden, options.hidden))) {
  const int64_t hidden = options.hidden;
  if (options.experts > 0) {
    experts_ = register_module(
        "experts", Experts(ExpertsOptions{hidden, 4 * hidden, options.experts, options.top}));
    return;
  }
  up_ = register_module("up", torch::nn::Linear(hidden, 4 * hidden));
  down_ = register_module("down", torch::nn::Linear(4 * hidden, hidden));
}

at::Tensor BlockImpl::forward(const at::Tensor& x, const at::Tensor& mask, at::Tensor* balance) {
  if (options_.pre_norm) {
    const at::Tensor y = x + attention(norm1_(x), mask);
    return y + feed_forward(norm2_(y), balance);
  }
  const at::Tensor y = norm1_(x + attention(x, mask));
  return norm2_(y + feed_forward(y, balance));
}

at::Tensor BlockImpl::attention(const at::Tensor& x, const at::Tensor& mask) {
  const int64_t batch = x.size(0), seq = x.size(1), head = options_.hidden / options_.heads;
  std::vector<at::Tensor> qkv = qkv_(x).chunk(3, -1);
  for (at::Tensor& t : qkv) t = t.view({batch, seq, options_.heads, head}).transpose(1, 2);
  at::Tensor scores = at::matmul(qkv[0], qkv[1].transpose(2, 3)) / std::sqrt(head);
  if (mask.defined()) scores = scores + mask;
  const at::Tensor weights = at::dropout(scores.softmax(-1), options_.dropout, is_training());
  const at::Tensor y = at::matmul(weights, qkv[2]).transpose(1, 2);
  return at::dropout(projection_(y.reshape({batch, seq, options_.hidden})), options_.dropout,
                     is_training());
}

at::Tensor BlockImpl::feed_forward(const at::Tensor& x, at::Tensor* balance) {
  const at::Tensor y = experts_.is_empty() ? down_(at::gelu(up_(x))) : experts_(x, balance);
  return at::dropout(y, options_.dropout, is_training());
}

at::Tensor embedding_table(int64_t rows, int64_t columns) {
  torch::NoGradGuard no_grad;
  return torch::empty({rows, columns}).normal_(0, 0.02);
}

}  // namespace motley
