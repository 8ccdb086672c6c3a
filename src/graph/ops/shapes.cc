#include "graph/ops/shapes.h"

#include <array>
#include <string>
#include <utility>

#include "core/error.h"

namespace motley {
namespace {

const TensorSpec kUndefined{DType::f32, {-1}};

const TensorSpec& operand(const Graph& graph, const Node& node, size_t i) {
  const auto* value = std::get_if<ValueId>(&node.args[i]);
  MOTLEY_CHECK(value != nullptr && value->valid(), "{}: argument {} is no tensor", node.op, i);
  return graph.spec(*value);
}

const std::vector<int64_t>& integers(const Node& node, size_t i) {
  return std::get<std::vector<int64_t>>(node.args[i]);
}

// Element d of an int[n] that may be given once for all dimensions.
int64_t per_dim(const std::vector<int64_t>& list, size_t d) {
  return list.size() == 1 ? list[0] : list[d];
}

// `outputs` where the mask in argument `i` is set, undefined elsewhere.
std::vector<TensorSpec> masked(const Node& node, size_t i, std::vector<TensorSpec> outputs) {
  const std::vector<int64_t>& mask = integers(node, i);
  for (size_t o = 0; o < outputs.size(); o++)
    if (mask[o] == 0) outputs[o] = kUndefined;
  return outputs;
}

}  // namespace

std::vector<TensorSpec> shape_like_first(const Graph& graph, const Node& node) {
  return {operand(graph, node, 0)};
}

std::vector<TensorSpec> shape_broadcast(const Graph& graph, const Node& node) {
  TensorSpec out = operand(graph, node, 0);
  const Shape& other = operand(graph, node, 1).shape;
  if (other.size() > out.shape.size())
    out.shape.insert(out.shape.begin(), other.size() - out.shape.size(), 1);
  for (size_t d = 0; d < other.size(); d++) {
    int64_t& size = out.shape[out.shape.size() - 1 - d];
    if (size == 1) size = other[other.size() - 1 - d];
  }
  return {out};
}

std::vector<TensorSpec> shape_like_second(const Graph& graph, const Node& node) {
  return {operand(graph, node, 1)};
}

// (input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
std::vector<TensorSpec> shape_convolution(const Graph& graph, const Node& node) {
  const TensorSpec& x = operand(graph, node, 0);
  const Shape& w = operand(graph, node, 1).shape;
  const bool transposed = std::get<bool>(node.args[6]);
  TensorSpec out{x.dtype, {x.shape[0]}};
  out.shape.push_back(transposed ? w[1] * std::get<int64_t>(node.args[8]) : w[0]);
  for (size_t d = 0; d + 2 < x.shape.size(); d++) {
    const int64_t size = x.shape[d + 2];
    const int64_t reach = per_dim(integers(node, 5), d) * (w[d + 2] - 1);
    const int64_t stride = per_dim(integers(node, 3), d), padding = per_dim(integers(node, 4), d);
    out.shape.push_back(transposed ? (size - 1) * stride - 2 * padding + reach +
                                         per_dim(integers(node, 7), d) + 1
                                   : (size + 2 * padding - reach - 1) / stride + 1);
  }
  return {out};
}

// (grad, input, weight, bias_sizes, ..., output_mask) -> gradients of input, weight, bias
std::vector<TensorSpec> shape_convolution_backward(const Graph& graph, const Node& node) {
  const TensorSpec& grad = operand(graph, node, 0);
  return masked(node, 10,
                {operand(graph, node, 1), operand(graph, node, 2), {grad.dtype, {grad.shape[1]}}});
}

// (input, weight, bias, running_mean, running_var, training, ...) -> output, saved mean, saved
// inverse deviation
std::vector<TensorSpec> shape_native_batch_norm(const Graph& graph, const Node& node) {
  const TensorSpec& x = operand(graph, node, 0);
  const TensorSpec saved{x.dtype, {std::get<bool>(node.args[5]) ? x.shape[1] : 0}};
  return {x, saved, saved};
}

// (grad, input, ..., output_mask) -> gradients of input, weight, bias
std::vector<TensorSpec> shape_native_batch_norm_backward(const Graph& graph, const Node& node) {
  const TensorSpec& x = operand(graph, node, 1);
  const TensorSpec channel{x.dtype, {x.shape[1]}};
  return masked(node, 9, {x, channel, channel});
}

// (input, normalized_shape, weight, bias, eps) -> output, mean, inverse deviation
std::vector<TensorSpec> shape_native_layer_norm(const Graph& graph, const Node& node) {
  const TensorSpec& x = operand(graph, node, 0);
  TensorSpec saved = x;
  for (size_t i = 0; i < integers(node, 1).size(); i++) saved.shape[saved.shape.size() - 1 - i] = 1;
  return {x, saved, saved};
}

// (grad, input, normalized_shape, mean, rstd, weight, bias, output_mask)
std::vector<TensorSpec> shape_native_layer_norm_backward(const Graph& graph, const Node& node) {
  const TensorSpec& x = operand(graph, node, 1);
  const TensorSpec affine{x.dtype, integers(node, 2)};
  return masked(node, 7, {x, affine, affine});
}

// (input, weight, bias, N, C, HxW, group, eps) -> output, mean, inverse deviation
std::vector<TensorSpec> shape_native_group_norm(const Graph& graph, const Node& node) {
  const TensorSpec& x = operand(graph, node, 0);
  const TensorSpec saved{x.dtype,
                         {std::get<int64_t>(node.args[3]), std::get<int64_t>(node.args[6])}};
  return {x, saved, saved};
}

// (grad, input, mean, rstd, weight, N, C, HxW, group, output_mask)
std::vector<TensorSpec> shape_native_group_norm_backward(const Graph& graph, const Node& node) {
  const TensorSpec& x = operand(graph, node, 1);
  const TensorSpec affine{x.dtype, {std::get<int64_t>(node.args[6])}};
  return masked(node, 9, {x, affine, affine});
}

// (weight, indices, ...)
std::vector<TensorSpec> shape_embedding(const Graph& graph, const Node& node) {
  const TensorSpec& weight = operand(graph, node, 0);
  TensorSpec out{weight.dtype, operand(graph, node, 1).shape};
  out.shape.push_back(weight.shape[1]);
  return {out};
}

// (grad, indices, num_weights, ...)
std::vector<TensorSpec> shape_embedding_dense_backward(const Graph& graph, const Node& node) {
  const TensorSpec& grad = operand(graph, node, 0);
  return {{grad.dtype, {std::get<int64_t>(node.args[2]), grad.shape.back()}}};
}

// (self, dim, index)
std::vector<TensorSpec> shape_index_select(const Graph& graph, const Node& node) {
  TensorSpec out = operand(graph, node, 0);
  int64_t dim = std::get<int64_t>(node.args[1]);
  if (dim < 0) dim += static_cast<int64_t>(out.shape.size());
  out.shape[static_cast<size_t>(dim)] = operand(graph, node, 2).numel();
  return {out};
}

// (self, kernel_size, stride, padding, dilation, ceil_mode) -> output, indices
std::vector<TensorSpec> shape_max_pool(const Graph& graph, const Node& node) {
  TensorSpec out = operand(graph, node, 0);
  const size_t places = node.op == "aten::max_pool3d_with_indices" ? 3 : 2;
  const bool ceil = std::get<bool>(node.args[5]);
  const std::vector<int64_t>& strides =
      integers(node, 2).empty() ? integers(node, 1) : integers(node, 2);
  for (size_t d = 0; d < places; d++) {
    int64_t& size = out.shape[out.shape.size() - places + d];
    const int64_t stride = per_dim(strides, d), padding = per_dim(integers(node, 3), d);
    const int64_t span = size + 2 * padding -
                         per_dim(integers(node, 4), d) * (per_dim(integers(node, 1), d) - 1) - 1;
    int64_t count = (span + (ceil ? stride - 1 : 0)) / stride + 1;
    if (ceil && (count - 1) * stride >= size + padding) count--;  // a window must start inside
    size = count;
  }
  return {out, {DType::i64, out.shape}};
}

// (self, output_size)
std::vector<TensorSpec> shape_adaptive_avg_pool2d(const Graph& graph, const Node& node) {
  TensorSpec out = operand(graph, node, 0);
  for (size_t d = 0; d < 2; d++)
    out.shape[out.shape.size() - 2 + d] = per_dim(integers(node, 1), d);
  return {out};
}

// (grad, input_sizes, ...)
std::vector<TensorSpec> shape_unfold_backward(const Graph& graph, const Node& node) {
  return {{operand(graph, node, 0).dtype, integers(node, 1)}};
}

ShapeFunction find_shape(const std::string& op) {
  static constexpr std::array<std::pair<const char*, ShapeFunction>, 27> table = {{
      {"aten::_adaptive_avg_pool2d", shape_adaptive_avg_pool2d},
      {"aten::_adaptive_avg_pool2d_backward", shape_like_second},
      {"aten::_ctc_loss_backward", shape_like_second},
      {"aten::_ctc_loss_backward.Tensor", shape_like_second},
      {"aten::convolution", shape_convolution},
      {"aten::convolution_backward", shape_convolution_backward},
      {"aten::embedding", shape_embedding},
      {"aten::embedding_dense_backward", shape_embedding_dense_backward},
      {"aten::index_put", shape_like_first},
      {"aten::index_select", shape_index_select},
      {"aten::masked_fill.Scalar", shape_broadcast},
      {"aten::masked_fill.Tensor", shape_broadcast},
      {"aten::max_pool2d_with_indices", shape_max_pool},
      {"aten::max_pool2d_with_indices_backward", shape_like_second},
      {"aten::max_pool3d_with_indices", shape_max_pool},
      {"aten::max_pool3d_with_indices_backward", shape_like_second},
      {"aten::mse_loss_backward", shape_like_second},
      {"aten::native_batch_norm", shape_native_batch_norm},
      {"aten::native_batch_norm_backward", shape_native_batch_norm_backward},
      {"aten::native_group_norm", shape_native_group_norm},
      {"aten::native_group_norm_backward", shape_native_group_norm_backward},
      {"aten::native_layer_norm", shape_native_layer_norm},
      {"aten::native_layer_norm_backward", shape_native_layer_norm_backward},
      {"aten::reflection_pad2d_backward", shape_like_second},
      {"aten::relu", shape_like_first},
      {"aten::replication_pad2d_backward", shape_like_second},
      {"aten::unfold_backward", shape_unfold_backward},
  }};
  for (const auto& [name, function] : table)
    if (op == name) return function;
  return nullptr;
}

}  // namespace motley
