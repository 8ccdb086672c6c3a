// One result element from one element of every operand, with broadcasting.
#include <array>
#include <utility>

#include "graph/ops/builder.h"

namespace motley::ops {

namespace {

Signature plain(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  b.pointwise();
  return b.take();
}

// Linear in the first operand, the others being factors (mul by a number, div, the gradients of
// activations).
Signature linear_in_first(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  b.pointwise();
  if (is_tensor_arg(node, 0)) b.linear({0});
  return b.take();
}

// a + alpha * b: partial sums add up, unless one of the two is a number, which would be added once
// per device.
Signature additive(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  b.pointwise();
  if (b.operands() == 2) b.linear({0, 1});
  return b.take();
}

Signature multiplicative(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  b.pointwise();
  for (int i = 0; i < b.operands(); ++i) b.linear({i});
  return b.take();
}

// where(condition, a, b)
Signature selection(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  b.pointwise();
  if (b.operands() == 3) b.linear({1, 2});
  return b.take();
}

// masked_fill(x, mask, value): linear in x when the value is zero.
Signature masked(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  b.pointwise();
  if (b.operands() == 2 && real_arg(node, 2, 1) == 0) b.linear({0});
  return b.take();
}

// A conversion between float types is linear up to rounding; from or to integers it is not.
Signature conversion(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  b.pointwise();
  if (is_float(operand_spec(graph, node, 0).dtype) && is_float(result_spec(graph, node, 0).dtype))
    b.linear({0});
  return b.take();
}

double per_element(const Graph& graph, const Node& node, double flops) {
  return flops * static_cast<double>(result_spec(graph, node, 0).numel());
}
double flops_8(const Graph& graph, const Node& node) { return per_element(graph, node, 8); }

OpDef def(const char* name, Signature (*signature)(const Graph&, const Node&),
          double (*flops)(const Graph&, const Node&) = nullptr) {
  OpDef op{name};
  op.signature = signature;
  op.flops = flops;
  return op;
}

OpDef random(const char* name) {
  OpDef op = def(name, plain);
  op.random = true;
  return op;
}

}  // namespace

const std::vector<OpDef>& elementwise_ops() {
  static const std::vector<OpDef> table = {
      def("aten::_to_copy", conversion),
      def("aten::abs", plain),
      def("aten::add.Scalar", plain),
      def("aten::add.Tensor", additive),
      def("aten::addcdiv", plain),
      def("aten::addcmul", plain),
      random("aten::bernoulli.p"),
      def("aten::bitwise_and.Tensor", plain),
      def("aten::bitwise_not", plain),
      def("aten::bitwise_or.Tensor", plain),
      def("aten::clamp", plain),
      def("aten::clamp_min", plain),
      def("aten::clone", linear_in_first),
      def("aten::copy", plain),
      def("aten::cos", plain, flops_8),
      def("aten::div.Scalar", linear_in_first),
      def("aten::div.Tensor", linear_in_first),
      def("aten::eq.Scalar", plain),
      def("aten::eq.Tensor", plain),
      def("aten::erf", plain, flops_8),
      def("aten::exp", plain, flops_8),
      def("aten::fill.Scalar", plain),
      def("aten::ge.Scalar", plain),
      def("aten::ge.Tensor", plain),
      def("aten::gelu", plain, flops_8),
      def("aten::gelu_backward", linear_in_first, flops_8),
      def("aten::gt.Scalar", plain),
      def("aten::gt.Tensor", plain),
      def("aten::hardtanh", plain),
      def("aten::hardtanh_backward", linear_in_first),
      def("aten::le.Scalar", plain),
      def("aten::le.Tensor", plain),
      def("aten::leaky_relu", plain),
      def("aten::leaky_relu_backward", linear_in_first),
      def("aten::lerp.Scalar", plain),
      def("aten::log", plain, flops_8),
      def("aten::logical_and", plain),
      def("aten::logical_not", plain),
      def("aten::logical_or", plain),
      def("aten::lt.Scalar", plain),
      def("aten::lt.Tensor", plain),
      def("aten::masked_fill.Scalar", masked),
      def("aten::masked_fill.Tensor", masked),
      def("aten::maximum", plain),
      def("aten::minimum", plain),
      def("aten::mul.Scalar", linear_in_first),
      def("aten::mul.Tensor", multiplicative),
      def("aten::ne.Scalar", plain),
      def("aten::ne.Tensor", plain),
      def("aten::neg", linear_in_first),
      def("aten::ones_like", plain),
      def("aten::pow.Tensor_Scalar", plain, flops_8),
      def("aten::reciprocal", plain),
      def("aten::relu", plain),
      def("aten::rsqrt", plain),
      def("aten::rsub.Scalar", plain),
      def("aten::rsub.Tensor", additive),
      def("aten::sgn", plain),
      def("aten::sigmoid", plain, flops_8),
      def("aten::sigmoid_backward", linear_in_first),
      def("aten::sign", plain),
      def("aten::silu", plain, flops_8),
      def("aten::silu_backward", linear_in_first, flops_8),
      def("aten::sin", plain, flops_8),
      def("aten::softplus", plain, flops_8),
      def("aten::sqrt", plain),
      def("aten::sub.Scalar", plain),
      def("aten::sub.Tensor", additive),
      def("aten::tanh", plain, flops_8),
      def("aten::tanh_backward", linear_in_first),
      def("aten::threshold", plain),
      def("aten::threshold_backward", linear_in_first),
      def("aten::where.self", selection),
      def("aten::zeros_like", linear_in_first),
  };
  return table;
}

}  // namespace motley::ops
