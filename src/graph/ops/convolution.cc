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
double convolution_backward_flops(const Graph& graph, const Node& node) {
  int products = 0;
  for (size_t o = 0; o < node.outputs.size() && o < 2; ++o) products += node.outputs[o].valid();
  return products * macs(operand_spec(graph, node, 0), operand_spec(graph, node, 2));
}

// 3 of "aten::avg_pool3d_backward".
int places_of(const std::string& op) {
  for (size_t at = 1; at < op.size(); ++at)
    if (op[at] == 'd' && op[at - 1] >= '1' && op[at - 1] <= '3') return op[at - 1] - '0';
  return 0;
}

// Pooling, padding with what is there and resizing: sample and channel, which are the dimensions
// but the last n of "...nd", are shared by every tensor.
Signature pool(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  const int places = places_of(node.op);
  for (int d = 0; d + places < static_cast<int>(b.in(0).size()); ++d) {
    int l = b.label(b.in(0)[d]);
    for (int i = 0; i < b.operands(); ++i) b.operand(i, d, {l});
    for (int r = 0; r < b.results(); ++r) b.result(r, d, {l});
  }
  const bool finds_largest = b.results() > 1;
  if (!finds_largest) b.linear({0});
  return b.take();
}

// grid_sampler_2d(x[n c h w], grid[n i j 2]) -> [n c i j]; its backward pass (dy, x, grid, ...) -> dx, dgrid, which is a sum over
// channels.
Signature grid_sampler(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  b.linear({0});
  const bool backward = b.operands() == 3;
  const int n = b.label(b.in(0)[0]),
            c = b.label(b.in(0)[1], backward ? LabelKind::reduction : LabelKind::parallel);
  for (int i = 0; i < b.operands(); ++i) {
    b.operand(i, 0, {n});
    if (i + 1 < b.operands()) b.operand(i, 1, {c});
  }
  for (int r = 0; r < b.results(); ++r) {
    if (!b.has_result(r)) continue;
    b.result(r, 0, {n});
    if (r == 0) b.result(r, 1, {c});
  }
  return b.take();
}

// im2col(x[n? c h w], kernel, ...) -> [n? (c k) places], and its transpose col2im.
Signature columns(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  const bool folds = node.op == "aten::col2im";
  const CheckedShape image = folds ? b.out(0) : b.in(0), &rows = folds ? b.in(0) : b.out(0);
  b.linear({0});
  const int channel = static_cast<int>(image.size()) - 3;
  if (channel < 0 || rows.size() + 1 != image.size()) return b.take();
  const int64_t channels = image[static_cast<size_t>(channel)];
  if (channels == 0 || rows[static_cast<size_t>(channel)] % channels != 0) return b.take();
  const auto put = [&](bool of_rows, int d, std::vector<int> labels) {
    if (of_rows == folds)
      b.operand_list(0, d, std::move(labels));
    else
      b.result_list(0, d, std::move(labels));
  };
  if (channel == 1) {
    const int sample = b.label(image[0]);
    put(false, 0, {sample}), put(true, 0, {sample});
  }
  const int c = b.label(channels);
  const int64_t places = rows[static_cast<size_t>(channel)] / channels;  // of the kernel
  put(false, channel, {c});
  put(true, channel,
      places == 1 ? std::vector<int>{c} : std::vector<int>{c, b.label(places, LabelKind::blocked)});
  return b.take();
}

// upsample_*_backward(dy, output size, input size, ...): the input's size is a device's own.
void localize_upsample_backward(const LocalCall& call, std::vector<Arg>* args) {
  args->at(2) = call.result_shapes[0];
}

}  // namespace

const std::vector<OpDef>& convolution_ops() {
  static const std::vector<OpDef> table = [] {
    std::vector<OpDef> ops = {
        def("aten::col2im", columns),
        def("aten::convolution", convolution, convolution_flops),
        def("aten::convolution_backward", convolution_backward, convolution_backward_flops,
            localize_backward),
        def("aten::grid_sampler_2d", grid_sampler),
        def("aten::grid_sampler_2d_backward", grid_sampler),
        def("aten::grid_sampler_3d", grid_sampler),
        def("aten::grid_sampler_3d_backward", grid_sampler),
        def("aten::im2col", columns),
    };
    for (const char* name : {"aten::_adaptive_avg_pool2d",
                             "aten::_adaptive_avg_pool2d_backward",
                             "aten::_adaptive_avg_pool3d",
                             "aten::_adaptive_avg_pool3d_backward",
                             "aten::adaptive_max_pool2d",
                             "aten::adaptive_max_pool2d_backward",
                             "aten::adaptive_max_pool3d",
                             "aten::adaptive_max_pool3d_backward",
                             "aten::avg_pool2d",
                             "aten::avg_pool2d_backward",
                             "aten::avg_pool3d",
                             "aten::avg_pool3d_backward",
                             "aten::fractional_max_pool2d",
                             "aten::fractional_max_pool2d_backward",
                             "aten::fractional_max_pool3d",
                             "aten::fractional_max_pool3d_backward",
                             "aten::max_pool2d_with_indices",
                             "aten::max_pool2d_with_indices_backward",
                             "aten::max_pool3d_with_indices",
                             "aten::max_pool3d_with_indices_backward",
                             "aten::max_unpool2d",
                             "aten::max_unpool3d",
                             "aten::reflection_pad1d",
                             "aten::reflection_pad1d_backward",
                             "aten::reflection_pad2d",
                             "aten::reflection_pad2d_backward",
                             "aten::reflection_pad3d",
                             "aten::reflection_pad3d_backward",
                             "aten::replication_pad1d",
                             "aten::replication_pad1d_backward",
                             "aten::replication_pad2d",
                             "aten::replication_pad2d_backward",
                             "aten::replication_pad3d",
                             "aten::replication_pad3d_backward"})
      ops.push_back(def(name, pool));
      // torch 1.13 has the overload "vec" (of factors) in what it captures, for forward and backward.
#define RESIZING(NAME)                                                           \
  def("aten::" NAME, pool), def("aten::" NAME ".vec", pool),                     \
      def("aten::" NAME "_backward", pool, nullptr, localize_upsample_backward), \
      def("aten::" NAME "_backward.vec", pool, nullptr, localize_upsample_backward)
    for (const OpDef& op :
         {RESIZING("_upsample_bicubic2d_aa"), RESIZING("_upsample_bilinear2d_aa"),
          RESIZING("_upsample_nearest_exact1d"), RESIZING("_upsample_nearest_exact2d"),
          RESIZING("_upsample_nearest_exact3d"), RESIZING("upsample_bicubic2d"),
          RESIZING("upsample_bilinear2d"), RESIZING("upsample_linear1d"),
          RESIZING("upsample_nearest1d"), RESIZING("upsample_nearest2d"),
          RESIZING("upsample_nearest3d"), RESIZING("upsample_trilinear3d")})
      ops.push_back(op);
#undef RESIZING
    return ops;
  }();
  return table;
}

}  // namespace motley::ops
