#include "zoo/experts.h"

#include <ATen/Functions.h>
#include <torch/types.h>

#include <cmath>

#include "core/error.h"

namespace motley {
namespace {

// Slots of an expert per group, in multiples of an even distribution.
constexpr double kCapacityFactor = 1.25;

// Weight of the balance loss.
constexpr double kBalance = 0.01;

at::Tensor weights(int64_t experts, int64_t in, int64_t out) {
  torch::NoGradGuard no_grad;
  const double bound = 1 / std::sqrt(static_cast<double>(in));
  return torch::empty({experts, in, out}).uniform_(-bound, bound);
}

}  // namespace

ExpertsImpl::ExpertsImpl(const ExpertsOptions& options)
    : options_(options),
      router_(register_module(
          "router", torch::nn::Linear(
                        torch::nn::LinearOptions(options.hidden, options.experts).bias(false)))) {
  const auto [hidden, ffn, experts, top, gated] = options;
  if (top > experts)
    throw user_error("zoo", "a token goes to top = {} of experts = {}; give at least as many", top,
                     experts);
  if (gated) gate_ = register_parameter("gate", weights(experts, hidden, ffn));
  up_ = register_parameter("up", weights(experts, hidden, ffn));
  down_ = register_parameter("down", weights(experts, ffn, hidden));
}

at::Tensor ExpertsImpl::route(const at::Tensor& x, at::Tensor* balance) {
  const int64_t tokens = x.size(1), experts = options_.experts, top = options_.top;
  const auto capacity = static_cast<int64_t>(std::ceil(
      kCapacityFactor * static_cast<double>(top * tokens) / static_cast<double>(experts)));
  // Probabilities and positions need more than 16 bits.
  const at::ScalarType type = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor gates = router_(x).to(type).softmax(-1);  // [group, token, expert]
  const at::Tensor chosen = std::get<1>(at::topk(gates.detach(), top, -1));
  const at::Tensor expert = at::arange(experts, chosen.options());
  const at::Tensor slot = at::arange(capacity, gates.options().requires_grad(false));
  at::Tensor taken;  // [group, 1, expert]: slots given to better choices
  std::vector<at::Tensor> weight, place;
  for (int64_t j = 0; j < top; j++) {
    const at::Tensor mine = chosen.select(-1, j).unsqueeze(-1).eq(expert).to(type);
    if (j == 0) {
      const double scale =
          kBalance * static_cast<double>(experts) / static_cast<double>(tokens * tokens);
      const at::Tensor loss = (gates.sum(1) * mine.sum(1) * scale).sum(-1).mean();
      *balance = balance->defined() ? *balance + loss : loss;
    }
    at::Tensor position = at::cumsum(mine, 1) - mine;
    if (taken.defined()) position = position + taken;
    if (j + 1 < top) taken = taken.defined() ? taken + mine.sum(1, true) : mine.sum(1, true);
    const at::Tensor kept = mine * position.lt(static_cast<double>(capacity));
    const at::Tensor at = (position * kept).sum(-1, true).eq(slot).to(type);
    weight.push_back((gates * mine).sum(-1, true));
    place.push_back(kept.unsqueeze(-1) * at.unsqueeze(2));
  }
  // Several choices share their weight among them; a single one keeps its probability.
  if (top > 1) {
    at::Tensor total = weight[0];
    for (int64_t j = 1; j < top; j++) total = total + weight[j];
    for (at::Tensor& w : weight) w = w / total;
  }
  at::Tensor combine;
  for (int64_t j = 0; j < top; j++) {
    const at::Tensor term = weight[j].unsqueeze(-1) * place[j];
    combine = combine.defined() ? combine + term : term;
  }
  return combine;
}

at::Tensor ExpertsImpl::forward(const at::Tensor& x, at::Tensor* balance) {
  const int64_t groups = x.size(0), tokens = x.size(1), hidden = options_.hidden,
                experts = options_.experts;
  at::Tensor combine = route(x, balance);
  const int64_t slots = combine.size(3);
  combine = combine.view({groups, tokens, experts * slots});
  const at::Tensor dispatch = combine.gt(0).to(x.scalar_type());
  const at::Tensor in = at::bmm(dispatch.transpose(1, 2), x)
                            .view({groups, experts, slots, hidden})
                            .transpose(0, 1)
                            .reshape({experts, groups * slots, hidden});
  const at::Tensor up = at::bmm(in, up_);
  const at::Tensor middle = options_.gated ? at::silu(at::bmm(in, gate_)) * up : at::gelu(up);
  const at::Tensor out = at::bmm(middle, down_)
                             .view({experts, groups, slots, hidden})
                             .transpose(0, 1)
                             .reshape({groups, experts * slots, hidden});
  return at::bmm(combine.to(x.scalar_type()), out);
}

}  // namespace motley
