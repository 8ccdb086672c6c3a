// Losses. Canonicalisation has turned means into sums, so that a cut batch gives a partial sum.
#include "graph/ops/builder.h"

namespace motley::ops {

namespace {

constexpr int64_t kNone = 0, kSum = 2;  // at::Reduction

// nll_loss_forward(x[n c], target[n], weight[c]?, reduction, ignore) -> loss, total_weight
Signature nll(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  if (b.in(0).size() != 2) return b.take();
  int64_t reduction = int_arg(node, 3);
  if (reduction != kNone && reduction != kSum) return b.take();
  int n = b.label(b.in(0)[0], LabelKind::reduction);
  b.operand(0, 0, {n});
  b.operand(1, 0, {n});
  if (reduction == kNone) b.result(0, 0, {n});
  return b.take();
}

// Classes cut: the device that holds the target's class contributes, the others add zero.
std::vector<ExtraRule> nll_extra(const Graph& graph, const Node& node) {
  if (int_arg(node, 3) != kSum || is_tensor_arg(node, 2) ||
      operand_spec(graph, node, 0).shape.size() != 2)
    return {};
  return {{"nll_loss.class",
           {Placement::shard(1), Placement::replicated()},
           {Placement::partial(), Placement::replicated()},
           {}}};
}

// nll_loss_backward(dy, x[n c], target[n], weight?, reduction, ignore, total_weight) -> dx
Signature nll_backward(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  int64_t reduction = int_arg(node, 4);
  if (b.in(1).size() != 2 || (reduction != kNone && reduction != kSum)) return b.take();
  int n = b.label(b.in(1)[0]);
  if (reduction == kNone) b.operand(0, 0, {n});
  b.operand(1, 0, {n});
  b.operand(2, 0, {n});
  b.result(0, 0, {n});
  int c = b.label(b.in(1)[1], LabelKind::blocked);
  b.operand(1, 1, {c});
  b.result(0, 1, {c});
  b.linear({0});
  return b.take();
}

std::vector<ExtraRule> nll_backward_extra(const Graph& graph, const Node& node) {
  if (int_arg(node, 4) != kSum || is_tensor_arg(node, 3) ||
      operand_spec(graph, node, 1).shape.size() != 2)
    return {};
  Placement r = Placement::replicated();
  return {{"nll_loss_backward.class", {r, Placement::shard(1), r, r}, {Placement::shard(1)}, {}}};
}

// loss(x, y, reduction): a sum over every element, or elementwise.
Signature pointwise_loss(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  int64_t reduction = int_arg(node, node.op == "aten::binary_cross_entropy" ? 3 : 2, 1);
  if (reduction == kNone) {
    b.pointwise();
  } else if (reduction == kSum && b.in(0) == b.in(1)) {
    for (int d = 0; d < static_cast<int>(b.in(0).size()); ++d) {
      int l = b.label(b.in(0)[d], LabelKind::reduction);
      b.operand(0, d, {l});
      b.operand(1, d, {l});
    }
  }
  return b.take();
}

// loss_backward(dy, x, y, reduction)
Signature pointwise_loss_backward(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  int64_t reduction = int_arg(node, 3, 1);
  if (reduction == kNone || reduction == kSum) {
    b.pointwise();
    b.linear({0});
  }
  return b.take();
}

OpDef def(const char* name, Signature (*signature)(const Graph&, const Node&),
          std::vector<ExtraRule> (*extra)(const Graph&, const Node&) = nullptr) {
  OpDef op{name};
  op.signature = signature;
  op.extra = extra;
  return op;
}

}  // namespace

const std::vector<OpDef>& loss_ops() {
  static const std::vector<OpDef> table = {
      def("aten::binary_cross_entropy", pointwise_loss),
      def("aten::mse_loss", pointwise_loss),
      def("aten::mse_loss_backward", pointwise_loss_backward),
      def("aten::nll_loss_backward", nll_backward, nll_backward_extra),
      def("aten::nll_loss_forward", nll, nll_extra),
  };
  return table;
}

}  // namespace motley::ops
