// One result element from one element of every operand, with broadcasting.
#include <array>
#include <utility>

#include "graph/ops/builder.h"
#include "graph/segment.h"

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

// log_sigmoid_forward(x) -> y, buffer; a buffer that the device does not need is empty.
Signature two_results(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  const std::vector<int> labels = b.pointwise();
  if (b.has_result(1) && b.out(1) == b.out(0))
    for (size_t d = 0; d < labels.size(); ++d) b.result(1, static_cast<int>(d), {labels[d]});
  return b.take();
}

// prelu(x[n c ..], w[c] or w[1]) -> y
Signature prelu(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  for (int d = 0; d < static_cast<int>(b.in(0).size()); ++d) {
    int l = b.label(b.in(0)[d]);
    b.operand(0, d, {l});
    b.result(0, d, {l});
    if (d == 1 && b.in(1).size() == 1 && b.in(1)[0] == b.in(0)[1]) b.operand(1, 0, {l});
  }
  return b.take();
}

// prelu_backward(dy, x[n c ..], w[c] or w[1]) -> dx, dw
Signature prelu_backward(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  for (int d = 0; d < static_cast<int>(b.in(1).size()); ++d) {
    const bool channel = d == 1 && b.in(2).size() == 1 && b.in(2)[0] == b.in(1)[1];
    int l = b.label(b.in(1)[d], channel ? LabelKind::parallel : LabelKind::reduction);
    for (int i : {0, 1}) b.operand(i, d, {l});
    b.result(0, d, {l});
    if (channel) {
      b.operand(2, 0, {l});
      b.result(1, 0, {l});
    }
  }
  b.linear({0});
  return b.take();
}

// _prelu_kernel_backward(dy, x, w of as many dimensions) -> dx, dw not yet summed
Signature prelu_kernel_backward(const Graph& graph, const Node& node) {
  Signature signature = two_results(graph, node);
  signature.linear.push_back({0});
  return signature;
}

double per_element(const Graph& graph, const Node& node, double flops) {
  return flops * static_cast<double>(result_spec(graph, node, 0).numel());
}
double flops_8(const Graph& graph, const Node& node) { return per_element(graph, node, 8); }

OpDef random(const char* name) {
  OpDef op = def(name, plain);
  op.random = true;
  return op;
}

}  // namespace

const std::vector<OpDef>& elementwise_ops() {
  static const std::vector<OpDef> table = {
      def("aten::__lshift__.Scalar", plain),
      def("aten::__lshift__.Tensor", plain),
      def("aten::__rshift__.Scalar", plain),
      def("aten::__rshift__.Tensor", plain),
      def("aten::_prelu_kernel", plain),
      def("aten::_prelu_kernel_backward", prelu_kernel_backward),
      def("aten::_to_copy", conversion),
      def("aten::abs", plain),
      def("aten::acos", plain),
      def("aten::acosh", plain),
      def("aten::add.Scalar", plain),
      def("aten::add.Tensor", additive),
      def("aten::addcdiv", plain),
      def("aten::addcmul", plain),
      def("aten::asin", plain),
      def("aten::asinh", plain),
      def("aten::atan", plain),
      def("aten::atan2", plain),
      def("aten::atanh", plain),
      random("aten::bernoulli.p"),
      def("aten::bitwise_and.Scalar", plain),
      def("aten::bitwise_and.Tensor", plain),
      def("aten::bitwise_left_shift.Tensor", plain),
      def("aten::bitwise_left_shift.Tensor_Scalar", plain),
      def("aten::bitwise_not", plain),
      def("aten::bitwise_or.Scalar", plain),
      def("aten::bitwise_or.Tensor", plain),
      def("aten::bitwise_right_shift.Tensor", plain),
      def("aten::bitwise_right_shift.Tensor_Scalar", plain),
      def("aten::bitwise_xor.Scalar", plain),
      def("aten::bitwise_xor.Tensor", plain),
      def("aten::ceil", plain),
      def("aten::celu", plain),
      def("aten::clamp", plain),
      def("aten::clamp.Tensor", plain),
      def("aten::clamp_max", plain),
      def("aten::clamp_max.Tensor", plain),
      def("aten::clamp_min", plain),
      def("aten::clamp_min.Tensor", plain),
      def("aten::clone", linear_in_first),
      def("aten::copy", plain),
      def("aten::copysign.Scalar", plain),
      def("aten::copysign.Tensor", plain),
      def("aten::cos", plain, flops_8),
      def("aten::cosh", plain),
      def("aten::deg2rad", plain),
      def("aten::digamma", plain),
      def("aten::div.Scalar", linear_in_first),
      def("aten::div.Tensor", linear_in_first),
      def("aten::div.Tensor_mode", plain),
      def("aten::elu", plain),
      def("aten::elu_backward", linear_in_first),
      def("aten::eq.Scalar", plain),
      def("aten::eq.Tensor", plain),
      def("aten::erf", plain, flops_8),
      def("aten::erfc", plain),
      def("aten::erfinv", plain),
      def("aten::exp", plain, flops_8),
      def("aten::exp2", plain),
      def("aten::expm1", plain),
      random("aten::exponential"),
      def("aten::fill.Scalar", plain),
      def("aten::float_power.Tensor_Scalar", plain),
      def("aten::float_power.Tensor_Tensor", plain),
      def("aten::floor", plain),
      def("aten::floor_divide", plain),
      def("aten::fmax", plain),
      def("aten::fmin", plain),
      def("aten::fmod.Scalar", plain),
      def("aten::fmod.Tensor", plain),
      def("aten::frac", plain),
      def("aten::full_like", plain),
      def("aten::gcd", plain),
      def("aten::ge.Scalar", plain),
      def("aten::ge.Tensor", plain),
      def("aten::gelu", plain, flops_8),
      def("aten::gelu_backward", linear_in_first, flops_8),
      def("aten::gt.Scalar", plain),
      def("aten::gt.Tensor", plain),
      def("aten::hardshrink", plain),
      def("aten::hardshrink_backward", linear_in_first),
      def("aten::hardsigmoid", plain),
      def("aten::hardsigmoid_backward", linear_in_first),
      def("aten::hardswish", plain),
      def("aten::hardswish_backward", linear_in_first),
      def("aten::hardtanh", plain),
      def("aten::hardtanh_backward", linear_in_first),
      def("aten::heaviside", plain),
      def("aten::hypot", plain),
      def("aten::i0", plain),
      def("aten::isin.Tensor_Scalar", plain),
      def("aten::isinf", plain),
      def("aten::isnan", plain),
      def("aten::isneginf", plain),
      def("aten::isposinf", plain),
      def("aten::lcm", plain),
      def("aten::ldexp.Tensor", plain),
      def("aten::le.Scalar", plain),
      def("aten::le.Tensor", plain),
      def("aten::leaky_relu", plain),
      def("aten::leaky_relu_backward", linear_in_first),
      def("aten::lerp.Scalar", plain),
      def("aten::lerp.Tensor", plain),
      def("aten::lgamma", plain),
      def("aten::log", plain, flops_8),
      def("aten::log10", plain),
      def("aten::log1p", plain),
      def("aten::log2", plain),
      def("aten::log_sigmoid_backward", linear_in_first, flops_8),
      def("aten::log_sigmoid_forward", two_results, flops_8),
      def("aten::logaddexp", plain),
      def("aten::logaddexp2", plain),
      def("aten::logical_and", plain),
      def("aten::logical_not", plain),
      def("aten::logical_or", plain),
      def("aten::logical_xor", plain),
      def("aten::logit", plain),
      def("aten::logit_backward", linear_in_first),
      def("aten::lt.Scalar", plain),
      def("aten::lt.Tensor", plain),
      def("aten::masked_fill.Scalar", masked),
      def("aten::masked_fill.Tensor", masked),
      def("aten::maximum", plain),
      def("aten::minimum", plain),
      def("aten::mish", plain),
      def("aten::mish_backward", linear_in_first),
      def("aten::mul.Scalar", linear_in_first),
      def("aten::mul.Tensor", multiplicative),
      def("aten::mvlgamma", plain),
      def("aten::nan_to_num", plain),
      def("aten::ne.Scalar", plain),
      def("aten::ne.Tensor", plain),
      def("aten::neg", linear_in_first),
      def("aten::nextafter", plain),
      random("aten::normal_functional"),
      def("aten::ones_like", plain),
      def("aten::polygamma", plain),
      def("aten::pow.Scalar", plain),
      def("aten::pow.Tensor_Scalar", plain, flops_8),
      def("aten::pow.Tensor_Tensor", plain),
      def("aten::prelu", prelu),
      def("aten::prelu_backward", prelu_backward),
      def("aten::rad2deg", plain),
      random("aten::rand_like"),
      random("aten::randint_like"),
      random("aten::randint_like.low_dtype"),
      random("aten::randn_like"),
      def("aten::reciprocal", plain),
      def("aten::relu", plain),
      def("aten::remainder.Scalar", plain),
      def("aten::remainder.Tensor", plain),
      def("aten::round", plain),
      def("aten::round.decimals", plain),
      def("aten::rsqrt", plain),
      def("aten::rsub.Scalar", plain),
      def("aten::rsub.Tensor", additive),
      def("aten::sgn", plain),
      def("aten::sigmoid", plain, flops_8),
      def("aten::sigmoid_backward", linear_in_first),
      def("aten::sign", plain),
      def("aten::signbit", plain),
      def("aten::silu", plain, flops_8),
      def("aten::silu_backward", linear_in_first, flops_8),
      def("aten::sin", plain, flops_8),
      def("aten::sinc", plain),
      def("aten::sinh", plain),
      def("aten::softplus", plain, flops_8),
      def("aten::softplus_backward", linear_in_first),
      def("aten::softshrink", plain),
      def("aten::softshrink_backward", linear_in_first),
      def("aten::special_bessel_j0", plain),
      def("aten::special_bessel_j1", plain),
      def("aten::special_entr", plain),
      def("aten::special_erfcx", plain),
      def("aten::special_i0e", plain),
      def("aten::special_i1", plain),
      def("aten::special_i1e", plain),
      def("aten::special_log_ndtr", plain),
      def("aten::special_ndtri", plain),
      def("aten::special_xlog1py", plain),
      def("aten::special_zeta", plain),
      def("aten::sqrt", plain),
      def("aten::sub.Scalar", plain),
      def("aten::sub.Tensor", additive),
      def("aten::tan", plain),
      def("aten::tanh", plain, flops_8),
      def("aten::tanh_backward", linear_in_first),
      def("aten::threshold", plain),
      def("aten::threshold_backward", linear_in_first),
      def("aten::trunc", plain),
      random("aten::uniform"),
      def("aten::where.self", selection),
      def("aten::xlogy.Tensor", plain),
      def("aten::zeros_like", linear_in_first),
      def(kBoundary, linear_in_first),
  };
  return table;
}

}  // namespace motley::ops
