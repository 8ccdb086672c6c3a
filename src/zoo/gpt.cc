// GPT-2 (Radford et al. 2019): learned positions, pre-norm blocks, output weights tied to the token
// embedding; the loss is the cross-entropy of `targets`, the tokens that come next.
#include <ATen/Functions.h>
#include <torch/types.h>

#include <limits>

#include "zoo/transformer.h"

namespace motley {
namespace {

class Gpt : public TrainModule {
 public:
  explicit Gpt(const ModelSpec& spec)
      : seq_(spec["seq"]),
        vocab_(spec["vocab"]),
        dropout_(spec.dropout()),
        tokens_(register_parameter("tokens", embedding_table(vocab_, spec["hidden"]))),
        positions_(register_parameter("positions", embedding_table(seq_, spec["hidden"]))) {
    for (int64_t i = 0; i < spec["layers"]; i++)
      blocks_.push_back(register_module(
          fmt::format("block{}", i), Block(BlockOptions{spec["hidden"], spec["heads"], dropout_})));
    norm_ = register_module("norm",
                            torch::nn::LayerNorm(torch::nn::LayerNormOptions({spec["hidden"]})));
  }

  std::vector<InputSpec> inputs(int64_t batch) const override {
    const TensorSpec ids{DType::i64, {batch, seq_}};
    return {{"tokens", ids, vocab_}, {"targets", ids, vocab_}};
  }

  at::Tensor loss(const std::vector<at::Tensor>& inputs) override {
    const double none = -std::numeric_limits<double>::infinity();
    const at::Tensor mask = torch::full({seq_, seq_}, none, positions_.options()).triu(1);
    at::Tensor x = at::embedding(tokens_, inputs[0]) + positions_;
    x = at::dropout(x, dropout_, is_training());
    for (Block& block : blocks_) x = block(x, mask);
    const at::Tensor logits = at::linear(norm_(x), tokens_);
    return at::cross_entropy_loss(logits.view({-1, vocab_}), inputs[1].view({-1}));
  }

 private:
  int64_t seq_, vocab_;
  double dropout_;
  at::Tensor tokens_, positions_;
  std::vector<Block> blocks_;
  torch::nn::LayerNorm norm_{nullptr};
};

}  // namespace

std::shared_ptr<TrainModule> build_gpt(const ModelSpec& spec) {
  return std::make_shared<Gpt>(spec);
}

}  // namespace motley
