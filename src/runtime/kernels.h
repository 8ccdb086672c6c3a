// Kernels of the theory's extra rules: operators whose sharded form is more than the operator on
// local pieces.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "comm/communicator.h"
#include "graph/graph.h"

namespace motley {

struct KernelCall {
  const Graph& graph;
  const Node& node;
  const std::vector<at::Tensor>& operands;  // local
  const std::vector<Shape>& results;        // local shapes
  Communicator& communicator;
  int64_t begin = 0;   // first index of this device's piece of the cut dimension
  int64_t length = 0;  // of the piece
};

using RuleKernel = std::vector<at::Tensor> (*)(const KernelCall&);

// The kernel of a rule ("embedding.vocab"). Every rule of the op table has one.
RuleKernel find_kernel(const std::string& rule);

}  // namespace motley
