// Runs a captured graph on one device: the plain meaning of a graph, against which everything
// distributed is checked.
//
// Nodes run in order, boxed, below autograd; a value is freed after its last use. A node costs one
// dispatch and what its kernel costs.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "graph/graph.h"

namespace motley {

using TensorMap = std::map<std::string, at::Tensor>;

// What the sources of a graph stand for, by name.
struct Feeds {
  TensorMap parameters, buffers, inputs;
};

// Replaces an operator: operands in the order of Graph::inputs_of, one result per output.
using Kernel = std::function<std::vector<at::Tensor>(const Graph&, const Node&,
                                                     const std::vector<at::Tensor>& operands)>;

struct InterpretOptions {
  at::Device device = at::kCPU;
  std::map<std::string, Kernel> kernels;  // by op name: random ops with a stream of their own, ...
  std::function<void(ValueId, const at::Tensor&)> observe;  // sees every value once
};

struct StepResult {
  at::Tensor loss;      // undefined: the graph has none
  TensorMap gradients;  // of the parameters the loss depends on
  TensorMap updates;    // new values of the buffers that the step changes
  std::vector<at::Tensor> outputs;
};

// Throws UserError naming a source without a tensor, or one whose shape or type is not the graph's.
StepResult interpret(const Graph& graph, const Feeds& feeds, const InterpretOptions& options = {});

}  // namespace motley
