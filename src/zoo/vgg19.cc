// VGG-19 (Simonyan and Zisserman 2015), configuration E. `width` is the number of channels of the
// first block (64 in the paper); all others, and the 4096 units of the classifier, scale with it.
#include <ATen/Functions.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>

#include "zoo/module.h"

namespace motley {
namespace {

constexpr int kConvolutions[] = {2, 2, 4, 4, 4};  // per block, each followed by a max-pool

class Vgg19 : public TrainModule {
 public:
  explicit Vgg19(const ModelSpec& spec)
      : image_(spec["image"]), classes_(spec["classes"]), dropout_(spec.dropout()) {
    if (image_ < 32)
      throw user_error("zoo", "vgg19: image is {}; five poolings need at least 32", image_);
    int64_t channels = 3;
    for (int block = 0; block < 5; block++) {
      const int64_t width = spec["width"] * std::min(1 << block, 8);
      for (int i = 0; i < kConvolutions[block]; i++) {
        convolutions_.push_back(register_module(
            fmt::format("conv{}_{}", block + 1, i + 1),
            torch::nn::Conv2d(torch::nn::Conv2dOptions(channels, width, 3).padding(1))));
        channels = width;
      }
    }
    const int64_t units = 64 * spec["width"];
    fc1_ = register_module("fc1", torch::nn::Linear(channels * 7 * 7, units));
    fc2_ = register_module("fc2", torch::nn::Linear(units, units));
    fc3_ = register_module("fc3", torch::nn::Linear(units, classes_));
  }

  std::vector<InputSpec> inputs(int64_t batch) const override {
    return {{"images", {default_dtype(), {batch, 3, image_, image_}}},
            {"labels", {DType::i64, {batch}}, classes_}};
  }

  at::Tensor loss(const std::vector<at::Tensor>& inputs) override {
    at::Tensor x = inputs[0];
    size_t next = 0;
    for (int convolutions : kConvolutions) {
      for (int i = 0; i < convolutions; i++) x = convolutions_[next++](x).relu_();
      x = at::max_pool2d(x, {2, 2}, {2, 2});
    }
    x = at::adaptive_avg_pool2d(x, {7, 7}).flatten(1);
    x = at::dropout(fc1_(x).relu_(), dropout_, is_training());
    x = at::dropout(fc2_(x).relu_(), dropout_, is_training());
    return at::cross_entropy_loss(fc3_(x), inputs[1]);
  }

 private:
  int64_t image_, classes_;
  double dropout_;
  std::vector<torch::nn::Conv2d> convolutions_;
  torch::nn::Linear fc1_{nullptr}, fc2_{nullptr}, fc3_{nullptr};
};

}  // namespace

std::shared_ptr<TrainModule> build_vgg19(const ModelSpec& spec) {
  return std::make_shared<Vgg19>(spec);
}

}  // namespace motley
