// Losses. Canonicalisation has turned means into sums, so that a cut batch gives a partial sum.
#include <utility>

#include "graph/ops/builder.h"
#include "graph/ops/shapes.h"

namespace motley::ops {

namespace {

constexpr int64_t kNone = 0, kSum = 2;  // at::Reduction

// nll_loss_forward(x[n c], target[n], weight[c]?, reduction, ignore) -> loss, total_weight; in two
// dimensions x[n c h w], target[n h w]
Signature nll(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  int64_t reduction = int_arg(node, 3);
  if (b.in(0).size() < 2 || (reduction != kNone && reduction != kSum)) return b.take();
  for (int d = 0; d < static_cast<int>(b.in(1).size()); ++d) {
    int n = b.label(b.in(1)[d], LabelKind::reduction);
    b.operand(0, d == 0 ? 0 : d + 1, {n});
    b.operand(1, d, {n});
    if (reduction == kNone) b.result(0, d, {n});
  }
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

// nll_loss_backward(dy, x[n c], target[n], weight?, reduction, ignore, total_weight) -> dx; in two
// dimensions too
Signature nll_backward(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  int64_t reduction = int_arg(node, 4);
  if (b.in(1).size() < 2 || (reduction != kNone && reduction != kSum)) return b.take();
  for (int d = 0; d < static_cast<int>(b.in(2).size()); ++d) {
    int n = b.label(b.in(2)[d]), at = d == 0 ? 0 : d + 1;
    if (reduction == kNone) b.operand(0, d, {n});
    b.operand(1, at, {n});
    b.operand(2, d, {n});
    b.result(0, at, {n});
  }
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

// loss(x, y, weights?..., reduction): a sum over every element, or elementwise.
Signature pointwise_loss(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  int64_t reduction = int_arg(node, static_cast<size_t>(pointwise_loss_reduction(node.op)), 1);
  if (reduction == kNone) {
    b.pointwise();
  } else if (reduction == kSum && b.in(0) == b.in(1)) {
    std::vector<int> labels;
    for (int d = 0; d < static_cast<int>(b.in(0).size()); ++d)
      labels.push_back(b.label(b.in(0)[d], LabelKind::reduction));
    for (int i = 0; i < b.operands(); ++i) b.broadcast_operand(i, labels, b.in(0));
  }
  return b.take();
}

// loss_backward(dy, x, y, weights?..., reduction)
Signature pointwise_loss_backward(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  int64_t reduction = int_arg(node, static_cast<size_t>(pointwise_loss_reduction(node.op)), 1);
  if (reduction == kNone || reduction == kSum) {
    b.pointwise();
    b.linear({0});
  }
  return b.take();
}

OpDef shaped(OpDef op, std::vector<TensorSpec> (*shape)(const Graph&, const Node&)) {
  op.shape = shape;
  return op;
}

}  // namespace

int pointwise_loss_reduction(const std::string& op) {
  static const std::pair<const char*, int> positions[] = {
      {"aten::binary_cross_entropy", 3},
      {"aten::binary_cross_entropy_backward", 4},
      {"aten::binary_cross_entropy_with_logits", 4},
      {"aten::huber_loss", 2},
      {"aten::huber_loss_backward", 3},
      {"aten::mse_loss", 2},
      {"aten::mse_loss_backward", 3},
      {"aten::smooth_l1_loss", 2},
      {"aten::smooth_l1_loss_backward", 3},
      {"aten::soft_margin_loss", 2},
      {"aten::soft_margin_loss_backward", 3},
  };
  for (const auto& [name, position] : positions)
    if (op == name) return position;
  return -1;
}

const std::vector<OpDef>& loss_ops() {
  static const std::vector<OpDef> table = {
      def("aten::binary_cross_entropy", pointwise_loss),
      def("aten::binary_cross_entropy_backward", pointwise_loss_backward),
      def("aten::binary_cross_entropy_with_logits", pointwise_loss),
      def("aten::huber_loss", pointwise_loss),
      shaped(def("aten::huber_loss_backward", pointwise_loss_backward), shape_like_second),
      def("aten::mse_loss", pointwise_loss),
      def("aten::mse_loss_backward", pointwise_loss_backward),
      def("aten::nll_loss2d_backward", nll_backward),
      def("aten::nll_loss2d_forward", nll),
      def("aten::nll_loss_backward", nll_backward, nll_backward_extra),
      def("aten::nll_loss_forward", nll, nll_extra),
      def("aten::smooth_l1_loss", pointwise_loss),
      shaped(def("aten::smooth_l1_loss_backward", pointwise_loss_backward), shape_like_second),
      def("aten::soft_margin_loss", pointwise_loss),
      shaped(def("aten::soft_margin_loss_backward", pointwise_loss_backward), shape_like_second),
  };
  return table;
}

}  // namespace motley::ops
