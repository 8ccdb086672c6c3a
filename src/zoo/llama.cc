// Llama 2 (Touvron et al. 2023): rotary positions, RMS normalisation before each half of a block,
// SwiGLU, `kv_heads` heads of keys and values shared by groups of query heads, no biases, output
// weights of their own. moe is the same with SwiGLU experts in every block, `top` of them for a
// token (Mixtral, Jiang et al. 2024, with capacities).
#include <ATen/Functions.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <cmath>
#include <limits>

#include "zoo/transformer.h"

namespace motley {
namespace {

// What all blocks share: rotation angles [seq, head] and the causal mask [seq, seq].
struct Positions {
  at::Tensor cos, sin, mask;
};

Positions make_positions(int64_t seq, int64_t head, const at::TensorOptions& options) {
  const double none = -std::numeric_limits<double>::infinity();
  const at::Tensor frequency = (at::arange(head / 2, options) * (-2 * std::log(1e4) / head)).exp();
  const at::Tensor angle = at::arange(seq, options).unsqueeze(1) * frequency;
  const at::Tensor both = at::cat({angle, angle}, 1);
  return {both.cos(), both.sin(), at::full({seq, seq}, none, options).triu(1)};
}

// x: [batch, heads, seq, head]; turns the pairs (i, i + head/2).
at::Tensor rotate(const at::Tensor& x, const Positions& positions) {
  const std::vector<at::Tensor> halves = x.chunk(2, -1);
  return x * positions.cos + at::cat({-halves[1], halves[0]}, -1) * positions.sin;
}

class RmsNormImpl : public torch::nn::Module {
 public:
  explicit RmsNormImpl(int64_t size) : weight_(register_parameter("weight", torch::ones({size}))) {}
  at::Tensor forward(const at::Tensor& x) {
    return x * (x.pow(2).mean(-1, /*keepdim=*/true) + 1e-5).rsqrt() * weight_;
  }

 private:
  at::Tensor weight_;
};
TORCH_MODULE(RmsNorm);

torch::nn::Linear linear(int64_t in, int64_t out) {
  return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false));
}

class LlamaBlockImpl : public torch::nn::Module {
 public:
  explicit LlamaBlockImpl(const ModelSpec& spec)
      : heads_(spec["heads"]),
        kv_heads_(spec["kv_heads"]),
        head_(spec["hidden"] / spec["heads"]),
        dropout_(spec.dropout()),
        norm1_(register_module("norm1", RmsNorm(spec["hidden"]))),
        norm2_(register_module("norm2", RmsNorm(spec["hidden"]))),
        query_(register_module("query", linear(spec["hidden"], heads_ * head_))),
        key_(register_module("key", linear(spec["hidden"], kv_heads_ * head_))),
        value_(register_module("value", linear(spec["hidden"], kv_heads_ * head_))),
        projection_(register_module("projection", linear(heads_ * head_, spec["hidden"]))) {
    const int64_t hidden = spec["hidden"], ffn = spec["ffn"];
    if (spec.has("experts")) {
      experts_ = register_module("experts", Experts(ExpertsOptions{hidden, ffn, spec["experts"],
                                                                   spec["top"], /*gated=*/true}));
      return;
    }
    gate_ = register_module("gate", linear(hidden, ffn));
    up_ = register_module("up", linear(hidden, ffn));
    down_ = register_module("down", linear(ffn, hidden));
  }

  // With experts, adds their balance loss to *balance.
  at::Tensor forward(const at::Tensor& x, const Positions& positions, at::Tensor* balance) {
    const at::Tensor y = x + attention(norm1_(x), positions);
    return y + at::dropout(feed_forward(norm2_(y), balance), dropout_, is_training());
  }

 private:
  at::Tensor feed_forward(const at::Tensor& x, at::Tensor* balance) {
    if (!experts_.is_empty()) return experts_(x, balance);
    return down_(at::silu(gate_(x)) * up_(x));
  }

  at::Tensor attention(const at::Tensor& x, const Positions& positions) {
    const int64_t batch = x.size(0), seq = x.size(1);
    auto split = [&](const at::Tensor& t, int64_t heads) {
      return t.view({batch, seq, heads, head_}).transpose(1, 2);
    };
    auto share = [&](const at::Tensor& t) {  // each head for its group of queries
      if (kv_heads_ == heads_) return t;
      return t.unsqueeze(2)
          .expand({batch, kv_heads_, heads_ / kv_heads_, seq, head_})
          .reshape({batch, heads_, seq, head_});
    };
    const at::Tensor q = rotate(split(query_(x), heads_), positions);
    const at::Tensor k = share(rotate(split(key_(x), kv_heads_), positions));
    const at::Tensor v = share(split(value_(x), kv_heads_));
    const at::Tensor scores = at::matmul(q, k.transpose(2, 3)) / std::sqrt(head_);
    const at::Tensor weights = (scores + positions.mask).softmax(-1);
    const at::Tensor y = at::matmul(at::dropout(weights, dropout_, is_training()), v);
    return projection_(y.transpose(1, 2).reshape({batch, seq, heads_ * head_}));
  }

  int64_t heads_, kv_heads_, head_;
  double dropout_;
  RmsNorm norm1_, norm2_;
  torch::nn::Linear query_, key_, value_, projection_, gate_{nullptr}, up_{nullptr}, down_{nullptr};
  Experts experts_{nullptr};
};
TORCH_MODULE(LlamaBlock);

class Llama : public TrainModule {
 public:
  explicit Llama(const ModelSpec& spec)
      : seq_(spec["seq"]), vocab_(spec["vocab"]), head_(spec["hidden"] / spec["heads"]) {
    if (head_ % 2 != 0)
      throw user_error("zoo", "{}: hidden / heads is {}; rotary positions need an even number",
                       spec.name(), head_);
    tokens_ = register_parameter("tokens", embedding_table(vocab_, spec["hidden"]));
    for (int64_t i = 0; i < spec["layers"]; i++)
      blocks_.push_back(register_module(fmt::format("block{}", i), LlamaBlock(spec)));
    norm_ = register_module("norm", RmsNorm(spec["hidden"]));
    output_ = register_module("output", linear(spec["hidden"], vocab_));
  }

  std::vector<InputSpec> inputs(int64_t batch) const override {
    const TensorSpec ids{DType::i64, {batch, seq_}};
    return {{"tokens", ids, vocab_}, {"targets", ids, vocab_}};
  }

  at::Tensor loss(const std::vector<at::Tensor>& inputs) override {
    const Positions positions = make_positions(seq_, head_, tokens_.options().requires_grad(false));
    at::Tensor x = at::embedding(tokens_, inputs[0]);
    at::Tensor balance;
    for (LlamaBlock& block : blocks_) x = block(x, positions, &balance);
    const at::Tensor logits = output_(norm_(x));
    const at::Tensor loss = at::cross_entropy_loss(logits.view({-1, vocab_}), inputs[1].view({-1}));
    return balance.defined() ? loss + balance : loss;
  }

 private:
  int64_t seq_, vocab_, head_;
  at::Tensor tokens_;
  std::vector<LlamaBlock> blocks_;
  RmsNorm norm_{nullptr};
  torch::nn::Linear output_{nullptr};
};

}  // namespace

std::shared_ptr<TrainModule> build_llama(const ModelSpec& spec) {
  return std::make_shared<Llama>(spec);
}

std::shared_ptr<TrainModule> build_moe(const ModelSpec& spec) {
  return std::make_shared<Llama>(spec);
}

}  // namespace motley
