// The TransGAN generator (Jiang et al. 2021) as AMP modifies it: a latent vector becomes a small
// grid of wide tokens, `layers` blocks of width `hidden` work on it, pixel shuffling makes it eight
// times larger a side and 64 times narrower, `layers` blocks of width hidden / 64 go on, and a
// linear map gives an image. The loss is the mean squared distance to a target image, so that a
// step needs no discriminator.
#include <ATen/Functions.h>

#include "zoo/transformer.h"

namespace motley {
namespace {

constexpr int64_t kUp = 8;  // pixel shuffling, a side

class TransGan : public TrainModule {
 public:
  explicit TransGan(const ModelSpec& spec)
      : side_(spec["side"]), latent_(spec["latent"]), hidden_(spec["hidden"]) {
    if (hidden_ % (kUp * kUp * spec["heads"]) != 0)
      throw user_error("zoo", "transgan: hidden is {}, which is not a multiple of {} heads x {}",
                       hidden_, spec["heads"], kUp * kUp);
    const double dropout = spec.dropout();
    const int64_t narrow = hidden_ / (kUp * kUp), pixels = side_ * kUp;
    grid_ = register_module("grid", torch::nn::Linear(latent_, side_ * side_ * hidden_));
    wide_positions_ = register_parameter("wide_positions", embedding_table(side_ * side_, hidden_));
    narrow_positions_ =
        register_parameter("narrow_positions", embedding_table(pixels * pixels, narrow));
    for (int64_t i = 0; i < spec["layers"]; i++)
      wide_.push_back(register_module(fmt::format("wide{}", i),
                                      Block(BlockOptions{hidden_, spec["heads"], dropout})));
    for (int64_t i = 0; i < spec["layers"]; i++)
      narrow_.push_back(register_module(fmt::format("narrow{}", i),
                                        Block(BlockOptions{narrow, spec["heads"], dropout})));
    image_ = register_module("image", torch::nn::Linear(narrow, 3));
  }

  std::vector<InputSpec> inputs(int64_t batch) const override {
    const int64_t pixels = side_ * kUp;
    return {{"latent", {default_dtype(), {batch, latent_}}},
            {"target", {default_dtype(), {batch, pixels * pixels, 3}}}};
  }

  at::Tensor loss(const std::vector<at::Tensor>& inputs) override {
    const int64_t batch = inputs[0].size(0), narrow = hidden_ / (kUp * kUp), pixels = side_ * kUp;
    at::Tensor x = grid_(inputs[0]).view({batch, side_ * side_, hidden_}) + wide_positions_;
    for (Block& block : wide_) x = block(x, at::Tensor());
    // [row, column, channel, up, up] -> [row, up, column, up, channel]
    x = x.view({batch, side_, side_, narrow, kUp, kUp})
            .permute({0, 1, 4, 2, 5, 3})
            .reshape({batch, pixels * pixels, narrow});
    x = x + narrow_positions_;
    for (Block& block : narrow_) x = block(x, at::Tensor());
    return at::mse_loss(image_(x), inputs[1]);
  }

 private:
  int64_t side_, latent_, hidden_;
  torch::nn::Linear grid_{nullptr}, image_{nullptr};
  at::Tensor wide_positions_, narrow_positions_;
  std::vector<Block> wide_, narrow_;
};

}  // namespace

std::shared_ptr<TrainModule> build_transgan(const ModelSpec& spec) {
  return std::make_shared<TransGan>(spec);
}

}  // namespace motley
