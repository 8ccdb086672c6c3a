// Layer norm, batch norm, softmax.
#include "graph/ops/builder.h"

namespace motley::ops {

namespace {

// native_layer_norm(x, normalized_shape, weight?, bias?, eps) -> y, mean, rstd
Signature layer_norm(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  int rank = static_cast<int>(b.in(0).size()),
      outer = rank - static_cast<int>(ints_arg(node, 1).size());
  for (int d = 0; d < outer; ++d) {
    int l = b.label(b.in(0)[d]);
    b.operand(0, d, {l});
    for (int r = 0; r < 3; ++r) b.result(r, d, {l});
  }
  return b.take();
}

// native_layer_norm_backward(dy, x, normalized_shape, mean, rstd, weight?, bias?, mask) -> dx,
// dweight, dbias
Signature layer_norm_backward(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  int rank = static_cast<int>(b.in(0).size()),
      outer = rank - static_cast<int>(ints_arg(node, 2).size());
  for (int d = 0; d < outer; ++d) {
    int l = b.label(b.in(0)[d], LabelKind::reduction);
    for (int i = 0; i < 4; ++i) b.operand(i, d, {l});
    b.result(0, d, {l});
  }
  b.linear({0});
  return b.take();
}

// Every tensor of rank >= 2 is [n, c, ...]; every vector is [c].
Signature batch_norm(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  int channels = b.label(b.in(0)[1]), samples = b.label(b.in(0)[0], LabelKind::blocked);
  for (int i = 0; i < b.operands(); ++i)
    if (b.in(i).size() >= 2) b.operand(i, 0, {samples});
  for (int r = 0; r < b.results(); ++r)
    if (b.has_result(r) && b.out(r).size() >= 2) b.result(r, 0, {samples});
  for (int i = 0; i < b.operands(); ++i)
    if (!b.in(i).empty()) b.operand(i, b.in(i).size() == 1 ? 0 : 1, {channels});
  for (int r = 0; r < b.results(); ++r)
    if (b.has_result(r) && !b.out(r).empty()) b.result(r, b.out(r).size() == 1 ? 0 : 1, {channels});
  return b.take();
}

// One rule over the batch: statistics of the whole batch by an all-reduce inside, the semantics of
// one device.
std::vector<ExtraRule> batch_rule(const Graph& graph, const Node& node, const char* name,
                                  size_t training_arg) {
  if (!bool_arg(node, training_arg)) return {};
  ExtraRule rule;
  rule.name = name;
  int64_t channels = 1;
  for (ValueId v : graph.inputs_of(node)) {
    const TensorSpec& spec = graph.spec(v);
    bool image = spec.shape.size() >= 2;
    if (image) channels = spec.shape[1];
    rule.operands.push_back(image ? Placement::shard(0) : Placement::replicated());
  }
  for (ValueId v : node.outputs)
    rule.results.push_back(v.valid() && graph.spec(v).shape.size() >= 2 ? Placement::shard(0)
                                                                        : Placement::replicated());
  DType dtype = operand_spec(graph, node, 0).dtype;
  rule.collectives.push_back(
      {Collective::all_reduce, 2 * channels * size_of(dtype), is_half(dtype)});
  return {rule};
}

// native_batch_norm(x, weight?, bias?, mean?, var?, training, momentum, eps) -> y, save_mean,
// save_invstd
std::vector<ExtraRule> batch_norm_extra(const Graph& graph, const Node& node) {
  return batch_rule(graph, node, "batch_norm.batch", 5);
}

// native_batch_norm_backward(dy, x, weight?, mean?, var?, save_mean?, save_invstd?, train, eps,
// mask) -> dx, dw, db
std::vector<ExtraRule> batch_norm_backward_extra(const Graph& graph, const Node& node) {
  return batch_rule(graph, node, "batch_norm_backward.batch", 7);
}

// native_group_norm(x[n ..], weight?, bias?, n, c, hw, groups, eps) -> y[n ..], mean[n g], rstd[n
// g]
Signature group_norm(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  int n = b.label(b.in(0)[0]);
  b.operand(0, 0, {n});
  for (int r = 0; r < 3; ++r) b.result(r, 0, {n});
  return b.take();
}

// native_group_norm_backward(dy, x, mean, rstd, weight?, n, c, hw, groups, mask) -> dx, dw, db
Signature group_norm_backward(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  int n = b.label(b.in(1)[0], LabelKind::reduction);
  for (int i = 0; i < 4; ++i) b.operand(i, 0, {n});
  b.result(0, 0, {n});
  b.linear({0});
  return b.take();
}

void localize_group_norm(const LocalCall& call, std::vector<Arg>* args) {
  args->at(3) = call.operand_shapes[0][0];
}
void localize_group_norm_backward(const LocalCall& call, std::vector<Arg>* args) {
  args->at(5) = call.operand_shapes[1][0];
}

// _weight_norm_interface(v, g, dim) -> w, norms; its backward(dw, v, g, norms, dim) -> dv, dg. The
// norm is over every dimension but `dim`.
Signature weight_norm(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  const bool backward = b.operands() == 4;
  const size_t rank = b.in(0).size(), dim = wrap_dim(int_arg(node, backward ? 4 : 2), rank);
  int l = b.label(b.in(0)[dim]);
  for (int i = 0; i < b.operands(); ++i) b.operand(i, static_cast<int>(dim), {l});
  for (int r = 0; r < b.results(); ++r) b.result(r, static_cast<int>(dim), {l});
  if (backward) b.linear({0});
  return b.take();
}

Signature softmax_along(const Graph& graph, const Node& node, size_t dim_arg, bool linear) {
  Builder b(graph, node);
  int rank = static_cast<int>(b.out(0).size()),
      dim = static_cast<int>(wrap_dim(int_arg(node, dim_arg), b.out(0).size()));
  for (int d = 0; d < rank; ++d) {
    int l = b.label(b.out(0)[d], d == dim ? LabelKind::blocked : LabelKind::parallel);
    for (int i = 0; i < b.operands(); ++i) b.operand(i, d, {l});
    b.result(0, d, {l});
  }
  if (linear) b.linear({0});
  return b.take();
}

Signature softmax(const Graph& graph, const Node& node) {
  return softmax_along(graph, node, 1, false);
}
Signature softmax_backward(const Graph& graph, const Node& node) {
  return softmax_along(graph, node, 2, true);
}

// The normalised dimension may be cut: row maxima and row sums are all-reduced inside (one value a
// row each).
std::vector<ExtraRule> class_rule(const Graph& graph, const Node& node, const char* name,
                                  size_t dim_arg, int reductions) {
  const TensorSpec& out = result_spec(graph, node, 0);
  if (out.shape.empty() || !is_float(out.dtype)) return {};
  int64_t dim = wrap_dim(int_arg(node, dim_arg), out.shape.size());
  Placement shard = Placement::shard(static_cast<int>(dim));
  ExtraRule rule{name, std::vector<Placement>(graph.inputs_of(node).size(), shard), {shard}, {}};
  for (int i = 0; i < reductions; ++i)
    rule.collectives.push_back({Collective::all_reduce,
                                out.bytes() / std::max<int64_t>(1, out.shape[dim]),
                                is_half(out.dtype)});
  return {rule};
}

std::vector<ExtraRule> softmax_extra(const Graph& graph, const Node& node) {
  return class_rule(graph, node, "softmax.class", 1, 2);
}
std::vector<ExtraRule> log_softmax_extra(const Graph& graph, const Node& node) {
  return class_rule(graph, node, "log_softmax.class", 1, 2);
}
std::vector<ExtraRule> softmax_backward_extra(const Graph& graph, const Node& node) {
  return class_rule(graph, node, "softmax_backward.class", 2, 1);
}
std::vector<ExtraRule> log_softmax_backward_extra(const Graph& graph, const Node& node) {
  return class_rule(graph, node, "log_softmax_backward.class", 2, 1);
}

double flops_of_elements(const Graph& graph, const Node& node) {
  return 8.0 * static_cast<double>(operand_spec(graph, node, 0).numel());
}

OpDef costly(const char* name, decltype(OpDef::signature) signature,
             decltype(OpDef::extra) extra = nullptr) {
  OpDef op = def(name, signature, extra);
  op.flops = flops_of_elements;
  return op;
}

OpDef local(const char* name, Signature (*signature)(const Graph&, const Node&),
            void (*localize)(const LocalCall&, std::vector<Arg>*)) {
  OpDef op = costly(name, signature);
  op.localize = localize;
  return op;
}

}  // namespace

const std::vector<OpDef>& normalization_ops() {
  static const std::vector<OpDef> table = {
      costly("aten::_log_softmax", softmax, log_softmax_extra),
      costly("aten::_log_softmax_backward_data", softmax_backward, log_softmax_backward_extra),
      costly("aten::_safe_softmax", softmax),
      costly("aten::_softmax", softmax, softmax_extra),
      costly("aten::_softmax_backward_data", softmax_backward, softmax_backward_extra),
      costly("aten::_weight_norm_interface", weight_norm),
      costly("aten::_weight_norm_interface_backward", weight_norm),
      costly("aten::native_batch_norm", batch_norm, batch_norm_extra),
      costly("aten::native_batch_norm_backward", batch_norm, batch_norm_backward_extra),
      local("aten::native_group_norm", group_norm, localize_group_norm),
      local("aten::native_group_norm_backward", group_norm_backward, localize_group_norm_backward),
      costly("aten::native_layer_norm", layer_norm),
      costly("aten::native_layer_norm_backward", layer_norm_backward),
  };
  return table;
}

}  // namespace motley::ops
