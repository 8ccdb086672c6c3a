// Reading and writing by index.
#include "graph/ops/builder.h"

namespace motley::ops {

namespace {

// embedding(weight[v d], index[...]) -> [... d]
Signature embedding(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  int d = b.label(b.in(0)[1]);
  b.operand(0, 1, {d});
  b.result(0, -1, {d});
  for (int i = 0; i < static_cast<int>(b.in(1).size()); ++i) {
    int l = b.label(b.in(1)[i]);
    b.operand(1, i, {l});
    b.result(0, i, {l});
  }
  b.linear({0});
  return b.take();
}

// Vocabulary cut: rows a device does not hold read as zero.
std::vector<ExtraRule> embedding_extra(const Graph&, const Node&) {
  return {{"embedding.vocab",
           {Placement::shard(0), Placement::replicated()},
           {Placement::partial()},
           {}}};
}

// embedding_dense_backward(dy[... d], index[...], num_weights, padding_idx, scale) -> [v d]
Signature embedding_backward(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  int d = b.label(b.out(0)[1]);
  b.operand(0, -1, {d});
  b.result(0, 1, {d});
  bool scaled = bool_arg(node, 4);  // scale_grad_by_freq counts occurrences in the whole batch
  for (int i = 0; i < static_cast<int>(b.in(1).size()); ++i) {
    int l = b.label(b.in(1)[i], scaled ? LabelKind::blocked : LabelKind::reduction);
    b.operand(0, i, {l});
    b.operand(1, i, {l});
  }
  b.linear({0});
  return b.take();
}

std::vector<ExtraRule> embedding_backward_extra(const Graph&, const Node& node) {
  if (bool_arg(node, 4)) return {};
  return {{"embedding_backward.vocab",
           {Placement::replicated(), Placement::replicated()},
           {Placement::shard(0)},
           {}}};
}

// index_select(x, dim, index): the other dimensions, and the positions that are read.
Signature index_select(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  size_t dim = wrap_dim(int_arg(node, 1), b.in(0).size());
  for (size_t d = 0; d < b.in(0).size(); ++d) {
    int l = b.label(b.out(0)[d]);
    if (d == dim)
      b.operand(1, 0, {l});
    else
      b.operand(0, static_cast<int>(d), {l});
    b.result(0, static_cast<int>(d), {l});
  }
  b.linear({0});
  return b.take();
}

// gather(x, dim, index): dimensions other than `dim` where both have the same size.
Signature gather(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  if (b.in(0).size() != b.in(1).size()) return b.take();
  size_t dim = b.in(0).empty() ? 0 : wrap_dim(int_arg(node, 1), b.in(0).size());
  for (size_t d = 0; d < b.in(0).size(); ++d) {
    if (d == dim) {
      int l = b.label(b.in(1)[d]);
      b.operand(1, static_cast<int>(d), {l});
      b.result(0, static_cast<int>(d), {l});
    } else if (b.in(0)[d] == b.in(1)[d]) {
      int l = b.label(b.in(0)[d]);
      b.operand(0, static_cast<int>(d), {l});
      b.operand(1, static_cast<int>(d), {l});
      b.result(0, static_cast<int>(d), {l});
    }
  }
  b.linear({0});
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

const std::vector<OpDef>& index_ops() {
  static const std::vector<OpDef> table = {
      def("aten::embedding", embedding, embedding_extra),
      def("aten::embedding_dense_backward", embedding_backward, embedding_backward_extra),
      def("aten::gather", gather),
      def("aten::index_select", index_select),
  };
  return table;
}

}  // namespace motley::ops
