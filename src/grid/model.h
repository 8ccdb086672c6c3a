// A model as the grid search sees it: a chain of layers, each a few numbers.
//
// A layer states what one sample costs in its forward pass; the backward pass does twice the matrix
// products and traffic. "Cut" quantities are divided by the tensor-parallel degree (and by context
// parallelism, for all that scales with tokens), "whole" ones are on every tensor-parallel rank.
//
// A chain of transformer layers is described by transformer_model(): embedding, blocks, and a head
// of final normalisation and output projection. Its numbers, with h hidden, s tokens, v vocabulary,
// a heads, f feed-forward width (4h):
//
//   block       products   2 s (4 h^2 + 2 h f) + 4 s^2 h flops
//               parameters 4 h^2 + 2 h f + f + 3 h cut, 6 h whole
//   embedding   parameters v h cut, s h whole;  head  products 2 s h v
//   saved       what PyTorch keeps of an unfused fp16 block (Korthikanti et al. 2022):
//               s h (10 + 24/t) + 5 a s^2 / t bytes; scaled to other element sizes
//   traffic     reads and writes of the unfused elementwise operators: `score_passes` passes over
//               the a s^2 attention scores, `hidden_passes` over s h
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/units.h"

namespace motley::grid {

struct Layer {
  std::string name;
  Flops flops = 0;               // matrix products of the forward pass of one sample
  Bytes traffic = 0;             // memory traffic of its other operators, cut
  Bytes traffic_whole = 0;       // the same, whole
  double kernels = 0;            // launched by the forward pass
  double parameters = 0;         // elements, cut
  double parameters_whole = 0;   // elements, whole
  double expert_parameters = 0;  // elements, cut by tensor and expert parallelism
  double output = 0;             // elements of one sample handed to the next layer
  double key_values = 0;         // elements of one sample that context parallelism exchanges
  double routed = 0;             // elements of one sample that expert parallelism exchanges
  Bytes saved = 0;               // kept for the backward pass of one sample, cut
  Bytes saved_whole = 0;         // the same, whole
  Flops core_flops = 0;          // of `flops`, `traffic` and `saved`: the attention scores, which
  Bytes core_traffic = 0;        // selective recomputation repeats and does not keep
  Bytes core_saved = 0;
  int all_reduces = 0;  // of `output` in the forward pass under tensor parallelism; as many in
                        // the backward pass
  int tied = -1;        // the layer whose parameters this one uses too
  bool block = false;   // heavy: a stage without any is degenerate
  friend bool operator==(const Layer&, const Layer&) = default;
};

// Element sizes of the training arithmetic, and what is kept per parameter.
struct Precision {
  std::string name;
  Bytes activation = 2, weight = 2;
  Bytes gradient = 2;       // kept
  Bytes reduced = 2;        // sent by the gradient all-reduce
  Bytes reduce_buffer = 0;  // of the all-reduce, per parameter
  Bytes optimizer = 12;     // master copy and moments
  bool half = true;         // rate of the matrix products
  friend bool operator==(const Precision&, const Precision&) = default;
};
// fp16 weights and gradients, fp32 master copy and moments, gradients reduced in fp32: 22 bytes.
Precision fp16_adam();
// fp32 everything (matrix products in TF32 where the device has it): 16 bytes.
Precision fp32_adam();

struct Model {
  std::string name;
  std::vector<Layer> layers;
  Precision precision;
  int heads = 1;            // tensor parallelism divides them
  int experts = 0;          // expert parallelism divides them; 0: none
  int64_t tokens = 1;       // of a sample; context parallelism divides them
  Bytes message_extra = 0;  // what a pipeline message carries besides activations
  int size() const { return static_cast<int>(layers.size()); }
  double parameters() const;  // elements, tied ones once
};

struct TransformerShape {
  int layers = 24, hidden = 1024, heads = 16, ffn = 0;  // ffn 0: 4 hidden
  int64_t seq = 1024, vocab = 50257;
  bool tied = true;
  double score_passes = 20;   // over the attention scores, reads and writes counted apart
  double hidden_passes = 60;  // over the hidden states, of which a third is whole
  double kernels = 60;        // of a block
  int experts = 0;            // > 0: every block's feed-forward is this many experts, top_k used
  int top_k = 2;
};
Model transformer_model(const std::string& name, const TransformerShape& shape,
                        const Precision& precision);

}  // namespace motley::grid
