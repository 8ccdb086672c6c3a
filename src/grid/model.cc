#include "grid/model.h"

#include "core/error.h"

namespace motley::grid {

Precision fp16_adam() {
  return {.name = "fp16",
          .activation = 2,
          .weight = 2,
          .gradient = 4,
          .reduced = 4,
          .reduce_buffer = 4,
          .optimizer = 12,
          .half = true};
}

Precision fp32_adam() {
  return {.name = "fp32",
          .activation = 4,
          .weight = 4,
          .gradient = 4,
          .reduced = 4,
          .reduce_buffer = 0,
          .optimizer = 8,
          .half = false};
}

double Model::parameters() const {
  double sum = 0;
  for (const Layer& l : layers) sum += l.parameters + l.parameters_whole + l.expert_parameters;
  return sum;
}

Model transformer_model(const std::string& name, const TransformerShape& shape,
                        const Precision& precision) {
  if (shape.layers < 1 || shape.hidden < 1 || shape.heads < 1 || shape.seq < 1 || shape.vocab < 1)
    throw user_error("grid", "{}: layers, hidden, heads, seq and vocab must be positive", name);
  const double h = shape.hidden, s = static_cast<double>(shape.seq),
               v = static_cast<double>(shape.vocab), a = shape.heads;
  const double f = shape.ffn > 0 ? shape.ffn : 4 * h;
  const double e = precision.activation, scale = e / 2;
  const double used = shape.experts > 0 ? shape.top_k : 1;

  Model model;
  model.name = name;
  model.precision = precision;
  model.heads = shape.heads;
  model.experts = shape.experts;
  model.tokens = shape.seq;

  Layer embedding;
  embedding.name = "embedding";
  embedding.parameters = v * h;
  embedding.parameters_whole = s * h;
  embedding.traffic_whole = 6 * s * h * e;
  embedding.kernels = 6;
  embedding.output = s * h;
  embedding.saved_whole = s * h;
  model.layers.push_back(embedding);

  Layer block;
  block.flops = 2 * s * (4 * h * h + 2 * h * f * used) + 4 * s * s * h;
  block.traffic = (shape.score_passes * a * s * s + shape.hidden_passes * 2 / 3 * s * h) * e;
  block.traffic_whole = shape.hidden_passes / 3 * s * h * e;
  block.kernels = shape.kernels;
  block.parameters = 4 * h * h + 3 * h;
  block.parameters_whole = 6 * h;
  const double feed_forward = 2 * h * f + f;
  if (shape.experts > 0) {
    block.expert_parameters = feed_forward * shape.experts;
    block.parameters_whole += h * shape.experts;
    block.routed = s * h * shape.top_k;
  } else {
    block.parameters += feed_forward;
  }
  block.output = s * h;
  block.key_values = 2 * s * h;
  block.saved = (24 * s * h + 5 * a * s * s) * scale;
  block.saved_whole = 10 * s * h * scale;
  block.core_flops = 4 * s * s * h;
  block.core_traffic = shape.score_passes * a * s * s * e;
  block.core_saved = 5 * a * s * s * scale;
  block.all_reduces = 2;
  block.block = true;
  for (int i = 0; i < shape.layers; ++i) {
    block.name = fmt::format("block {}", i);
    model.layers.push_back(block);
  }

  Layer head;
  head.name = "head";
  head.flops = 2 * s * h * v;
  head.traffic = 6 * s * v * 4;  // the loss works on 32-bit logits
  head.traffic_whole = 4 * s * h * e;
  head.kernels = 20;
  head.parameters_whole = 2 * h;
  if (shape.tied)
    head.tied = 0;
  else
    head.parameters = v * h;
  head.output = 1;
  head.saved = s * v * (4 + e);
  head.saved_whole = 2 * s * h * e;
  model.layers.push_back(head);
  return model;
}

}  // namespace motley::grid
