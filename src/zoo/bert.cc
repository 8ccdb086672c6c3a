// BERT (Devlin et al. 2019): token and learned position embeddings, post-norm encoder,
// masked-language head with output weights tied to the token embedding; the loss is the
// cross-entropy on all tokens. bert-moe is BERT whose every `every`-th block has experts in place
// of the feed-forward layer (GShard, Lepikhin et al. 2021), with their balance loss added.
#include <ATen/Functions.h>
#include <torch/types.h>

#include "zoo/transformer.h"

namespace motley {
namespace {

class Bert : public TrainModule {
 public:
  explicit Bert(const ModelSpec& spec)
      : seq_(spec["seq"]),
        vocab_(spec["vocab"]),
        dropout_(spec.dropout()),
        tokens_(register_parameter("tokens", embedding_table(vocab_, spec["hidden"]))),
        positions_(register_parameter("positions", embedding_table(seq_, spec["hidden"]))),
        bias_(register_parameter("bias", torch::zeros({vocab_}))) {
    const torch::nn::LayerNormOptions norm({spec["hidden"]});
    norm_ = register_module("norm", torch::nn::LayerNorm(norm));
    for (int64_t i = 0; i < spec["layers"]; i++) {
      BlockOptions block{spec["hidden"], spec["heads"], dropout_, /*pre_norm=*/false};
      if (spec.has("experts") && (i + 1) % spec["every"] == 0) {
        block.experts = spec["experts"];
        block.top = spec["top"];
      }
      blocks_.push_back(register_module(fmt::format("block{}", i), Block(block)));
    }
    head_ = register_module("head", torch::nn::Linear(spec["hidden"], spec["hidden"]));
    head_norm_ = register_module("head_norm", torch::nn::LayerNorm(norm));
  }

  std::vector<InputSpec> inputs(int64_t batch) const override {
    const TensorSpec ids{DType::i64, {batch, seq_}};
    return {{"tokens", ids, vocab_}, {"targets", ids, vocab_}};
  }

  at::Tensor loss(const std::vector<at::Tensor>& inputs) override {
    at::Tensor x = norm_(at::embedding(tokens_, inputs[0]) + positions_);
    x = at::dropout(x, dropout_, is_training());
    at::Tensor balance;
    for (Block& block : blocks_) x = block(x, at::Tensor(), &balance);
    const at::Tensor logits = at::linear(head_norm_(at::gelu(head_(x))), tokens_, bias_);
    const at::Tensor loss = at::cross_entropy_loss(logits.view({-1, vocab_}), inputs[1].view({-1}));
    return balance.defined() ? loss + balance : loss;
  }

 private:
  int64_t seq_, vocab_;
  double dropout_;
  at::Tensor tokens_, positions_, bias_;
  torch::nn::LayerNorm norm_{nullptr}, head_norm_{nullptr};
  std::vector<Block> blocks_;
  torch::nn::Linear head_{nullptr};
};

}  // namespace

std::shared_ptr<TrainModule> build_bert(const ModelSpec& spec) {
  return std::make_shared<Bert>(spec);
}

std::shared_ptr<TrainModule> build_bert_moe(const ModelSpec& spec) {
  return std::make_shared<Bert>(spec);
}

}  // namespace motley
