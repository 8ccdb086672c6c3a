// Vision Transformer (Dosovitskiy et al. 2021): patches by a strided convolution, a class token,
// learned positions, pre-norm encoder, classification from the class token. vit-moe is ViT whose
// every `every`-th block has experts in place of the feed-forward layer, with their balance loss.
#include <ATen/Functions.h>
#include <torch/nn/modules/conv.h>

#include "zoo/transformer.h"

namespace motley {
namespace {

class Vit : public TrainModule {
 public:
  explicit Vit(const ModelSpec& spec)
      : image_(spec["image"]), classes_(spec["classes"]), dropout_(spec.dropout()) {
    const int64_t hidden = spec["hidden"], patch = spec["patch"];
    const int64_t patches = (image_ / patch) * (image_ / patch);
    patches_ = register_module(
        "patches", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, hidden, patch).stride(patch)));
    class_token_ = register_parameter("class_token", embedding_table(1, hidden));
    positions_ = register_parameter("positions", embedding_table(patches + 1, hidden));
    for (int64_t i = 0; i < spec["layers"]; i++)
      blocks_.push_back(register_module(fmt::format("block{}", i), Block(block_of(spec, i))));
    norm_ = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({hidden})));
    head_ = register_module("head", torch::nn::Linear(hidden, classes_));
  }

  std::vector<InputSpec> inputs(int64_t batch) const override {
    return {{"images", {default_dtype(), {batch, 3, image_, image_}}},
            {"labels", {DType::i64, {batch}}, classes_}};
  }

  at::Tensor loss(const std::vector<at::Tensor>& inputs) override {
    at::Tensor x = patches_(inputs[0]).flatten(2).transpose(1, 2);
    x = at::cat({class_token_.expand({x.size(0), 1, x.size(2)}), x}, 1) + positions_;
    x = at::dropout(x, dropout_, is_training());
    at::Tensor balance;
    for (Block& block : blocks_) x = block(x, at::Tensor(), &balance);
    const at::Tensor loss = at::cross_entropy_loss(head_(norm_(x).select(1, 0)), inputs[1]);
    return balance.defined() ? loss + balance : loss;
  }

 private:
  BlockOptions block_of(const ModelSpec& spec, int64_t i) const {
    BlockOptions block{spec["hidden"], spec["heads"], dropout_};
    if (spec.has("experts") && (i + 1) % spec["every"] == 0) {
      block.experts = spec["experts"];
      block.top = spec["top"];
    }
    return block;
  }

  int64_t image_, classes_;
  double dropout_;
  torch::nn::Conv2d patches_{nullptr};
  at::Tensor class_token_, positions_;
  std::vector<Block> blocks_;
  torch::nn::LayerNorm norm_{nullptr};
  torch::nn::Linear head_{nullptr};
};

}  // namespace

std::shared_ptr<TrainModule> build_vit(const ModelSpec& spec) {
  return std::make_shared<Vit>(spec);
}

std::shared_ptr<TrainModule> build_vit_moe(const ModelSpec& spec) {
  return std::make_shared<Vit>(spec);
}

}  // namespace motley
