// Multi-layer perceptron: `layers` linear layers in all, ReLU between them, cross-entropy on top.
#include <ATen/Functions.h>
#include <torch/nn/modules/linear.h>

#include "zoo/module.h"

namespace motley {
namespace {

class Mlp : public TrainModule {
 public:
  explicit Mlp(const ModelSpec& spec)
      : in_(spec["in"]), classes_(spec["classes"]), dropout_(spec.dropout()) {
    int64_t width = in_;
    for (int64_t i = 0; i + 1 < spec["layers"]; i++) {
      hidden_.push_back(
          register_module(fmt::format("hidden{}", i), torch::nn::Linear(width, spec["hidden"])));
      width = spec["hidden"];
    }
    head_ = register_module("head", torch::nn::Linear(width, classes_));
  }

  std::vector<InputSpec> inputs(int64_t batch) const override {
    return {{"x", {default_dtype(), {batch, in_}}}, {"labels", {DType::i64, {batch}}, classes_}};
  }

  at::Tensor loss(const std::vector<at::Tensor>& inputs) override {
    at::Tensor x = inputs[0];
    for (torch::nn::Linear& layer : hidden_)
      x = at::dropout(layer(x).relu(), dropout_, is_training());
    return at::cross_entropy_loss(head_(x), inputs[1]);
  }

 private:
  int64_t in_, classes_;
  double dropout_;
  std::vector<torch::nn::Linear> hidden_;
  torch::nn::Linear head_{nullptr};
};

}  // namespace

std::shared_ptr<TrainModule> build_mlp(const ModelSpec& spec) {
  return std::make_shared<Mlp>(spec);
}

}  // namespace motley
