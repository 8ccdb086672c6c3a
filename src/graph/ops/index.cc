// Reading and writing by index.
#include <algorithm>

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

// _embedding_bag(weight[v d], index[n], offsets[b], ..) -> [b d], bag[n], sizes[b], largest[b d]
// where bags take the largest (mode 2), else of other shapes
Signature embedding_bag(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  const int d = b.label(b.in(0)[1]);
  b.operand(0, 1, {d});
  b.result(0, 1, {d});
  if (int_arg(node, 4) == 2 && b.has_result(3)) b.result(3, 1, {d});
  return b.take();
}

// _embedding_bag_backward(dy[b d], index[n], offsets[b], bag[n], sizes[b], largest, v, .., mode, ..)
// -> [v d]
Signature embedding_bag_backward(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  const int d = b.label(b.out(0)[1]);
  b.operand(0, 1, {d});
  b.result(0, 1, {d});
  if (int_arg(node, 8) == 2) b.operand(5, 1, {d});
  b.linear({0});
  return b.take();
}

// _embedding_bag_per_sample_weights_backward(dy[b d], weight[v d], ..) -> [n]
Signature embedding_bag_weights_backward(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  const int d = b.label(b.in(1)[1], LabelKind::reduction);
  b.operand(0, 1, {d});
  b.operand(1, 1, {d});
  b.linear({0});
  return b.take();
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

// Where the dimensions of x[i, :, j] = y stand: an index reads dimension d of x, and the positions
// that indices broadcast to stand where the first index does, or first if indices are apart.
struct Indexed {
  std::vector<int> operand;  // [dimension of x] tensor operand that indexes it; -1: none
  size_t position = 0;       // of the positions among the dimensions of y
  Shape positions;           // what the indices broadcast to
};

Indexed indexed(const Graph& graph, const Node& node, size_t rank) {
  Indexed at;
  at.operand.assign(rank, -1);
  const auto* list =
      node.args.size() > 1 ? std::get_if<std::vector<ValueId>>(&node.args[1]) : nullptr;
  if (list == nullptr || list->size() > rank) bad_call(node, "it has no list of indices");
  int next = 1, first = -1, last = -1, count = 0;
  for (size_t d = 0; d < list->size(); ++d) {
    if (!(*list)[d].valid()) continue;
    const Shape& shape = graph.spec((*list)[d]).shape;
    if (shape.size() > at.positions.size())
      at.positions.insert(at.positions.begin(), shape.size() - at.positions.size(), 1);
    for (size_t k = 0; k < shape.size(); ++k) {
      int64_t& size = at.positions[at.positions.size() - shape.size() + k];
      if (size == 1) size = shape[k];
    }
    at.operand[d] = next++;
    if (first < 0) first = static_cast<int>(d);
    last = static_cast<int>(d);
    ++count;
  }
  at.position = count > 0 && last - first + 1 == count ? static_cast<size_t>(first) : 0;
  return at;
}

// index.Tensor(x, indices) -> y
Signature index(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  b.linear({0});
  const Indexed at = indexed(graph, node, b.in(0).size());
  for (int i = 1; i < b.operands(); ++i)  // a mask reads as many dimensions as it has
    if (operand_spec(graph, node, static_cast<size_t>(i)).dtype == DType::b8) return b.take();
  std::vector<int> labels;
  for (int64_t size : at.positions) labels.push_back(b.label(size));
  for (int i = 1; i < b.operands(); ++i) b.broadcast_operand(i, labels, {node, at.positions});
  size_t out = 0;
  auto put_positions = [&] {
    for (int l : labels) b.result(0, static_cast<int>(out++), {l});
  };
  for (size_t d = 0; d < at.operand.size(); ++d) {
    if (out == at.position) put_positions();
    if (at.operand[d] >= 0) continue;
    int l = b.label(b.in(0)[d]);
    b.operand(0, static_cast<int>(d), {l});
    b.result(0, static_cast<int>(out++), {l});
  }
  return b.take();
}

// index_put(x, indices, y, accumulate) -> x with y at the indices. Where y is added the positions
// may be cut: each device adds its own to a partial x.
Signature index_put(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  const int y = b.operands() - 1;
  b.linear({0, y});
  const Indexed at = indexed(graph, node, b.in(0).size());
  for (int i = 1; i < y; ++i)
    if (operand_spec(graph, node, static_cast<size_t>(i)).dtype == DType::b8) return b.take();
  // The dimensions of the part of x that is written, which y broadcasts to. A position for which y
  // has no number of its own is not cut: a device without any would add y nowhere.
  Shape part;
  std::vector<int> labels;
  const Shape& added = operand_spec(graph, node, static_cast<size_t>(y)).shape;
  const size_t rank = at.positions.size() +
                      static_cast<size_t>(std::count(at.operand.begin(), at.operand.end(), -1));
  auto own_number = [&](size_t d, int64_t size) {
    const size_t from_end = rank - d;
    return from_end <= added.size() && added[added.size() - from_end] == size;
  };
  const bool adds = bool_arg(node, 3);
  auto put_positions = [&] {
    std::vector<int> own;
    for (int64_t size : at.positions) {
      const bool cut = adds && own_number(part.size(), size);
      own.push_back(b.label(size, cut ? LabelKind::reduction : LabelKind::blocked));
      part.push_back(size);
      labels.push_back(own.back());
    }
    for (int i = 1; i < y; ++i) b.broadcast_operand(i, own, {node, at.positions});
  };
  bool placed = false;
  for (size_t d = 0; d < at.operand.size(); ++d) {
    if (!placed && part.size() == at.position) {
      put_positions();
      placed = true;
    }
    if (at.operand[d] >= 0) continue;
    int l = b.label(b.in(0)[d]);
    b.operand(0, static_cast<int>(d), {l});
    b.result(0, static_cast<int>(d), {l});
    part.push_back(b.in(0)[d]);
    labels.push_back(l);
  }
  b.broadcast_operand(y, labels, {node, part});
  if (adds) b.added(0);
  return b.take();
}

// scatter(x, dim, index, y) and scatter_add: dimensions other than `dim` where all have the same
// size; scatter_add may cut the positions, each device adding its own to a partial x.
Signature scatter(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  const bool tensor = b.operands() == 3, adds = node.op == "aten::scatter_add";
  const size_t rank = b.in(0).size();
  if (b.in(1).size() != rank || (tensor && b.in(2).size() != rank)) return b.take();
  const size_t dim = rank == 0 ? 0 : static_cast<size_t>(wrap_dim(int_arg(node, 1), rank));
  for (size_t d = 0; d < rank; ++d) {
    const bool same = b.in(1)[d] == b.in(0)[d];
    if (tensor && b.in(2)[d] != b.in(1)[d]) continue;
    const int at = static_cast<int>(d);
    if (d == dim) {
      if (!adds) continue;
      int l = b.label(b.in(1)[d], LabelKind::reduction);
      b.operand(1, at, {l});
      b.operand(2, at, {l});
    } else if (same) {
      int l = b.label(b.in(0)[d]);
      b.operand(0, at, {l});
      b.operand(1, at, {l});
      if (tensor) b.operand(2, at, {l});
      b.result(0, at, {l});
    }
  }
  if (adds || node.op == "aten::scatter.src") b.linear({0, 2});
  if (adds) b.added(0);
  return b.take();
}

// index_add(x, dim, index, y, alpha): the other dimensions; positions may be cut, each device adding its own to a partial x.
Signature index_add(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  const size_t rank = b.in(0).size();
  if (b.in(2).size() != rank || b.in(1).size() != 1) return b.take();
  const size_t dim = wrap_dim(int_arg(node, 1), rank);
  for (size_t d = 0; d < rank; ++d) {
    const int at = static_cast<int>(d);
    const bool adds = d == dim;
    const int l = b.label(b.in(2)[d], adds ? LabelKind::reduction : LabelKind::parallel);
    b.operand(2, at, {l});
    b.operand(adds ? 1 : 0, adds ? 0 : at, {l});
    if (!adds) b.result(0, at, {l});
  }
  b.linear({0, 2});
  b.added(0);
  return b.take();
}

// index_copy(x, dim, index, y), index_fill(x, dim, index, y), index_reduce(x, dim, index, y, how):
// the other dimensions; y may be a number.
Signature index_write(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  const size_t rank = b.in(0).size();
  const int y = b.operands() == 3 && b.in(2).size() == rank ? 2 : -1;
  if (b.operands() == 3 && y < 0 && !b.in(2).empty()) return b.take();
  const size_t dim = rank == 0 ? 0 : static_cast<size_t>(wrap_dim(int_arg(node, 1), rank));
  for (size_t d = 0; d < rank; ++d) {
    if (d == dim) continue;
    const int l = b.label(b.in(0)[d]), at = static_cast<int>(d);
    b.operand(0, at, {l});
    b.operand(y, at, {l});
    b.result(0, at, {l});
  }
  if (node.op == "aten::index_copy") b.linear({0, 2});
  return b.take();
}

OpDef with_scratch(OpDef op) {
  op.scratch = true;
  return op;
}

}  // namespace

const std::vector<OpDef>& index_ops() {
  static const std::vector<OpDef> table = {
      with_scratch(def("aten::_embedding_bag", embedding_bag)),
      def("aten::_embedding_bag_backward", embedding_bag_backward),
      def("aten::_embedding_bag_per_sample_weights_backward", embedding_bag_weights_backward),
      def("aten::embedding", embedding, embedding_extra),
      def("aten::embedding_dense_backward", embedding_backward, embedding_backward_extra),
      def("aten::gather", gather),
      def("aten::index.Tensor", index),
      def("aten::index_add", index_add),
      def("aten::index_copy", index_write),
      def("aten::index_fill.int_Scalar", index_write),
      def("aten::index_fill.int_Tensor", index_write),
      def("aten::index_put", index_put),
      def("aten::index_reduce", index_write),
      def("aten::index_select", index_select),
      def("aten::scatter.src", scatter),
      def("aten::scatter.value", scatter),
      def("aten::scatter.value_reduce", scatter),
      def("aten::scatter_add", scatter),
      def("aten::scatter_reduce.two", scatter),
  };
  return table;
}

}  // namespace motley::ops
