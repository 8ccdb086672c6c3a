// A model as the grid search sees it: a chain of layers, each a few numbers.
//
// A layer states what one sample costs in its forward pass; the backward pass does twice the matrix
// products and traffic. "Cut" quantities are divided by the tensor-parallel degree (and by context
// parallelism, for all that scales with tokens), "whole" ones are on every tensor-parallel rank.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/units.h"

namespace motley::grid {

struct Layer {
  std::string name;
  Flops flops = 0;          // matrix products of the forward pass of one sample
  Bytes traffic = 0;        // memory traffic of its other operators, cut
  Bytes traffic_whole = 0;  // the same, whole
  double kernels = 0;       // launched by the forward pass
  // Launched more where samples times heads of a device are no multiple of 4: Megatron's fused
  // softmax takes four at a time.
  double unfused = 0;
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
  double parameters() const;          // elements, tied ones once
  std::vector<bool> blocks() const {  // [layer] heavy
    std::vector<bool> block;
    for (const Layer& layer : layers) block.push_back(layer.block);
    return block;
  }
};

}  // namespace motley::grid
