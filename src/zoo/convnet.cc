// A residual network of two blocks with batch normalisation, for tests: strided convolution,
// in-place ReLU and addition, running statistics, global average pooling.
#include <ATen/Functions.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

#include "zoo/module.h"

namespace motley {
namespace {

class Convnet : public TrainModule {
 public:
  explicit Convnet(const ModelSpec& spec)
      : image_(spec["image"]),
        classes_(spec["classes"]),
        dropout_(spec.dropout()),
        conv1_(register_module("conv1", conv(3, spec["width"], 1))),
        conv2_(register_module("conv2", conv(spec["width"], spec["width"], 1))),
        conv3_(register_module("conv3", conv(spec["width"], 2 * spec["width"], 2))),
        norm1_(register_module("norm1", torch::nn::BatchNorm2d(spec["width"]))),
        norm2_(register_module("norm2", torch::nn::BatchNorm2d(spec["width"]))),
        norm3_(register_module("norm3", torch::nn::BatchNorm2d(2 * spec["width"]))),
        head_(register_module("head", torch::nn::Linear(2 * spec["width"], classes_))) {}

  std::vector<InputSpec> inputs(int64_t batch) const override {
    return {{"images", {default_dtype(), {batch, 3, image_, image_}}},
            {"labels", {DType::i64, {batch}}, classes_}};
  }

  at::Tensor loss(const std::vector<at::Tensor>& inputs) override {
    const at::Tensor x = norm1_(conv1_(inputs[0])).relu_();
    at::Tensor y = norm2_(conv2_(x)).add_(x).relu_();
    y = norm3_(conv3_(y)).relu_();
    y = at::adaptive_avg_pool2d(y, {1, 1}).flatten(1);
    return at::cross_entropy_loss(head_(at::dropout(y, dropout_, is_training())), inputs[1]);
  }

 private:
  static torch::nn::Conv2d conv(int64_t in, int64_t out, int64_t stride) {
    return torch::nn::Conv2d(
        torch::nn::Conv2dOptions(in, out, 3).stride(stride).padding(1).bias(false));
  }

  int64_t image_, classes_;
  double dropout_;
  torch::nn::Conv2d conv1_, conv2_, conv3_;
  torch::nn::BatchNorm2d norm1_, norm2_, norm3_;
  torch::nn::Linear head_;
};

}  // namespace

std::shared_ptr<TrainModule> build_convnet(const ModelSpec& spec) {
  return std::make_shared<Convnet>(spec);
}

}  // namespace motley
