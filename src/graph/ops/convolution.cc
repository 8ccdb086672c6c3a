// Convolution and pooling. Space is never cut (it would need a halo).
#include "graph/ops/builder.h"

namespace motley::ops {

namespace {

bool transposed(const Node& node, size_t at) { return bool_arg(node, at); }

// convolution(x[n ci ..], w[co ci ..], bias[co]?, stride, padding, dilation, transposed,
// output_padding, groups)
Signature convolution(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  int n = b.label(b.in(0)[0]);
  b.operand(0, 0, {n});
  b.result(0, 0, {n});
  if (int_arg(node, 8, 1) != 1) return b.take();
  int ci = b.label(b.in(0)[1], LabelKind::reduction), co = b.label(b.out(0)[1]);
  bool flipped = transposed(node, 6);
  b.operand(0, 1, {ci});
  b.operand(1, flipped ? 0 : 1, {ci});
  b.operand(1, flipped ? 1 : 0, {co});
  b.result(0, 1, {co});
  if (int bias = operand_index(graph, node, 2); bias >= 0) {
    b.operand(bias, 0, {co});
    b.added(bias);
  } else {
    b.linear({0});
    b.linear({1});
  }
  return b.take();
}

// convolution_backward(dy, x, w, bias_sizes, stride, padding, dilation, transposed, output_padding,
// groups, mask)
//   -> dx, dw, dbias
Signature convolution_backward(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  int n = b.label(b.in(1)[0], LabelKind::reduction);
  b.operand(0, 0, {n});
  b.operand(1, 0, {n});
  b.result(0, 0, {n});
  b.linear({0});
  if (int_arg(node, 9, 1) != 1) return b.take();
  bool flipped = transposed(node, 7);
  int ci = b.label(b.in(1)[1]), co = b.label(b.in(0)[1], LabelKind::reduction);
  if (ci >= 0) b.info(ci).ignored_by = 1u << 2;  // the bias gradient does not look at the input
  b.operand(0, 1, {co});
  b.operand(1, 1, {ci});
  b.operand(2, flipped ? 1 : 0, {co});
  b.operand(2, flipped ? 0 : 1, {ci});
  b.result(0, 1, {ci});
  b.result(1, flipped ? 1 : 0, {co});
  b.result(1, flipped ? 0 : 1, {ci});
  b.result(2, 0, {co});
  return b.take();
}

// bias_sizes is the local number of output channels.
void localize_backward(const LocalCall& call, std::vector<Arg>* args) {
  if (auto sizes = std::get_if<std::vector<int64_t>>(&args->at(3)); sizes && sizes->size() == 1)
    *sizes = {call.operand_shapes[0][1]};
}

double macs(const TensorSpec& output, const TensorSpec& weight) {
  const Shape& w = weight.shape;
  double per_output = 2;
  for (size_t d = 1; d < w.size(); ++d) per_output *= static_cast<double>(w[d]);
  return per_output * static_cast<double>(output.numel());
}
double convolution_flops(const Graph& graph, const Node& node) {
  return macs(result_spec(graph, node, 0), operand_spec(graph, node, 1));
}
double backward_flops(const Graph& graph, const Node& node) {
  int products = 0;
  for (size_t o = 0; o < node.outputs.size() && o < 2; ++o) products += node.outputs[o].valid();
  return products * macs(operand_spec(graph, node, 0), operand_spec(graph, node, 2));
}

// Pooling: sample and channel are shared by every tensor.
Signature pool(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  for (int d = 0; d + 2 < static_cast<int>(b.in(0).size()); ++d) {
    int l = b.label(b.in(0)[d]);
    for (int i = 0; i < b.operands(); ++i) b.operand(i, d, {l});
    for (int r = 0; r < b.results(); ++r) b.result(r, d, {l});
  }
  if (node.op != "aten::max_pool2d_with_indices") b.linear({0});
  return b.take();
}

// upsample_*_backward(dy, output size, input size, ...): the input's size is a device's own.
void localize_upsample_backward(const LocalCall& call, std::vector<Arg>* args) {
  args->at(2) = call.result_shapes[0];
}

OpDef def(const char* name, Signature (*signature)(const Graph&, const Node&),
          double (*flops)(const Graph&, const Node&) = nullptr,
          void (*localize)(const LocalCall&, std::vector<Arg>*) = nullptr) {
  OpDef op{name};
  op.signature = signature;
  op.flops = flops;
  op.localize = localize;
  return op;
}

}  // namespace

const std::vector<OpDef>& convolution_ops() {
  static const std::vector<OpDef> table = {
      def("aten::_adaptive_avg_pool2d", pool),
      def("aten::_adaptive_avg_pool2d_backward", pool),
      def("aten::avg_pool2d", pool),
      def("aten::avg_pool2d_backward", pool),
      def("aten::convolution", convolution, convolution_flops),
      def("aten::convolution_backward", convolution_backward, backward_flops, localize_backward),
      def("aten::max_pool2d_with_indices", pool),
      def("aten::max_pool2d_with_indices_backward", pool),
      def("aten::upsample_bilinear2d", pool),
      def("aten::upsample_bilinear2d.vec", pool),
      def("aten::upsample_bilinear2d_backward", pool, nullptr, localize_upsample_backward),
      def("aten::upsample_bilinear2d_backward.vec", pool, nullptr, localize_upsample_backward),
      def("aten::upsample_nearest2d", pool),
      def("aten::upsample_nearest2d.vec", pool),
      def("aten::upsample_nearest2d_backward", pool, nullptr, localize_upsample_backward),
      def("aten::upsample_nearest2d_backward.vec", pool, nullptr, localize_upsample_backward),
  };
  return table;
}

}  // namespace motley::ops
