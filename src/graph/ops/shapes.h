// Shapes of results, for the operators that libtorch has no Meta kernel for. An OpDef names one as
// its `shape`.
//
// Capture finds out by itself how a result's sizes follow from its operands' where sizes are all
// there is to it (pointwise ops, reductions, ...); listed here is what has windows or sizes among
// its arguments, or is common.
//
// Each takes a node whose arguments are complete and whose outputs are not, and returns one spec
// per output; {-1} is an output that is undefined. Arguments are taken to be valid: the model ran.
#pragma once

#include <vector>

#include "graph/graph.h"

namespace motley {

using ShapeFunction = std::vector<TensorSpec> (*)(const Graph&, const Node&);

// Result 0 is like operand 0: pointwise ops whose other operands broadcast to it, and most
// `_backward`s.
std::vector<TensorSpec> shape_like_first(const Graph& graph, const Node& node);
// Result 0 has the type of operand 0 and the shape to which operands 0 and 1 broadcast:
// masked_fill.
std::vector<TensorSpec> shape_broadcast(const Graph& graph, const Node& node);
// Like the second argument: mse_loss_backward, max_pool2d_with_indices_backward,
// _adaptive_avg_pool2d_backward, ...
std::vector<TensorSpec> shape_like_second(const Graph& graph, const Node& node);

std::vector<TensorSpec> shape_convolution(const Graph& graph, const Node& node);
std::vector<TensorSpec> shape_convolution_backward(const Graph& graph, const Node& node);
std::vector<TensorSpec> shape_native_batch_norm(const Graph& graph, const Node& node);
std::vector<TensorSpec> shape_native_batch_norm_backward(const Graph& graph, const Node& node);
std::vector<TensorSpec> shape_native_layer_norm(const Graph& graph, const Node& node);
std::vector<TensorSpec> shape_native_layer_norm_backward(const Graph& graph, const Node& node);
std::vector<TensorSpec> shape_native_group_norm(const Graph& graph, const Node& node);
std::vector<TensorSpec> shape_native_group_norm_backward(const Graph& graph, const Node& node);
std::vector<TensorSpec> shape_embedding(const Graph& graph, const Node& node);
std::vector<TensorSpec> shape_embedding_dense_backward(const Graph& graph, const Node& node);
std::vector<TensorSpec> shape_index_select(const Graph& graph, const Node& node);
std::vector<TensorSpec> shape_adaptive_avg_pool2d(const Graph& graph, const Node& node);

// The table of the above by operator name, for operators without an OpDef; nullptr: not in it.
ShapeFunction find_shape(const std::string& op);

}  // namespace motley
