// ResNet-50 (He et al. 2016) with the stride of a block in its 3x3 convolution. `width` is the
// number of channels of the first stage (64 in the paper); all others scale with it.
#include <ATen/Functions.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

#include "zoo/module.h"

namespace motley {
namespace {

constexpr int64_t kExpansion = 4;
constexpr int kBlocks[] = {3, 4, 6, 3};

// A convolution without bias, followed by batch normalisation.
class ConvNormImpl : public torch::nn::Module {
 public:
  ConvNormImpl(int64_t in, int64_t out, int64_t kernel, int64_t stride)
      : conv_(register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, kernel)
                                                            .stride(stride)
                                                            .padding(kernel / 2)
                                                            .bias(false)))),
        norm_(register_module("norm", torch::nn::BatchNorm2d(out))) {}
  at::Tensor forward(const at::Tensor& x) { return norm_(conv_(x)); }

 private:
  torch::nn::Conv2d conv_;
  torch::nn::BatchNorm2d norm_;
};
TORCH_MODULE(ConvNorm);

class BottleneckImpl : public torch::nn::Module {
 public:
  BottleneckImpl(int64_t in, int64_t width, int64_t stride)
      : reduce_(register_module("reduce", ConvNorm(in, width, 1, 1))),
        middle_(register_module("middle", ConvNorm(width, width, 3, stride))),
        expand_(register_module("expand", ConvNorm(width, width * kExpansion, 1, 1))) {
    if (stride != 1 || in != width * kExpansion)
      shortcut_ = register_module("shortcut", ConvNorm(in, width * kExpansion, 1, stride));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = expand_(middle_(reduce_(x).relu_()).relu_());
    return y.add_(shortcut_.is_empty() ? x : shortcut_(x)).relu_();
  }

 private:
  ConvNorm reduce_, middle_, expand_, shortcut_{nullptr};
};
TORCH_MODULE(Bottleneck);

class Resnet50 : public TrainModule {
 public:
  explicit Resnet50(const ModelSpec& spec)
      : image_(spec["image"]), classes_(spec["classes"]), dropout_(spec.dropout()) {
    int64_t channels = spec["width"];
    stem_ = register_module("stem", ConvNorm(3, channels, 7, 2));
    for (int stage = 0; stage < 4; stage++) {
      const int64_t width = spec["width"] << stage;
      for (int i = 0; i < kBlocks[stage]; i++) {
        const int64_t stride = stage > 0 && i == 0 ? 2 : 1;
        blocks_.push_back(register_module(fmt::format("block{}_{}", stage + 1, i + 1),
                                          Bottleneck(channels, width, stride)));
        channels = width * kExpansion;
      }
    }
    head_ = register_module("head", torch::nn::Linear(channels, classes_));
  }

  std::vector<InputSpec> inputs(int64_t batch) const override {
    return {{"images", {default_dtype(), {batch, 3, image_, image_}}},
            {"labels", {DType::i64, {batch}}, classes_}};
  }

  at::Tensor loss(const std::vector<at::Tensor>& inputs) override {
    at::Tensor x = at::max_pool2d(stem_(inputs[0]).relu_(), {3, 3}, {2, 2}, {1, 1});
    for (Bottleneck& block : blocks_) x = block(x);
    x = at::adaptive_avg_pool2d(x, {1, 1}).flatten(1);
    return at::cross_entropy_loss(head_(at::dropout(x, dropout_, is_training())), inputs[1]);
  }

 private:
  int64_t image_, classes_;
  double dropout_;
  ConvNorm stem_{nullptr};
  std::vector<Bottleneck> blocks_;
  torch::nn::Linear head_{nullptr};
};

}  // namespace

std::shared_ptr<TrainModule> build_resnet50(const ModelSpec& spec) {
  return std::make_shared<Resnet50>(spec);
}

}  // namespace motley
