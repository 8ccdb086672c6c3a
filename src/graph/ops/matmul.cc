// Matrix products: Figure 9 of HAP follows from the labels.
#include "graph/ops/builder.h"

namespace motley::ops {

namespace {

// [b] i k, [b] k j -> [b] i j, with an optional added operand in front.
Signature product(const Graph& graph, const Node& node, bool batched, bool bias) {
  Builder b(graph, node);
  int first = bias ? 1 : 0, d = batched ? 1 : 0;
  const CheckedShape x = b.in(first), &y = b.in(first + 1);
  int batch = batched ? b.label(x[0]) : -1, i = b.label(x[d]), j = b.label(y[d + 1]);
  int k = b.label(x[d + 1], LabelKind::reduction);
  if (batched) {
    b.operand(first, 0, {batch});
    b.operand(first + 1, 0, {batch});
    b.result(0, 0, {batch});
  }
  b.operand(first, d, {i});
  b.operand(first, d + 1, {k});
  b.operand(first + 1, d, {k});
  b.operand(first + 1, d + 1, {j});
  b.result(0, d, {i});
  b.result(0, d + 1, {j});
  if (bias) {
    std::vector<int> labels = batched ? std::vector<int>{batch, i, j} : std::vector<int>{i, j};
    b.broadcast_operand(0, labels, b.out(0));
    b.added(0);
    b.linear({0, 1});
    b.linear({0, 2});
  } else {
    b.linear({0});
    b.linear({1});
  }
  return b.take();
}

Signature mm(const Graph& graph, const Node& node) { return product(graph, node, false, false); }
Signature addmm(const Graph& graph, const Node& node) { return product(graph, node, false, true); }
Signature bmm(const Graph& graph, const Node& node) { return product(graph, node, true, false); }
Signature baddbmm(const Graph& graph, const Node& node) { return product(graph, node, true, true); }

Signature mv(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  int i = b.label(b.in(0)[0]), k = b.label(b.in(0)[1], LabelKind::reduction);
  b.operand(0, 0, {i});
  b.operand(0, 1, {k});
  b.operand(1, 0, {k});
  b.result(0, 0, {i});
  b.linear({0});
  b.linear({1});
  return b.take();
}

Signature dot(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  int k = b.label(b.in(0)[0], LabelKind::reduction);
  b.operand(0, 0, {k});
  b.operand(1, 0, {k});
  b.linear({0});
  b.linear({1});
  return b.take();
}

// Of torch 2: rows of one matrix, group by group, by a matrix each; or one matrix a group (the gradient).
// (a, b, offs?, bias?, dtype?): [t k], [e k n] -> [t n]; [k t], [t n] -> [e k n]; [e m k], [k t] -> [m t].
std::vector<TensorSpec> shape_grouped(const Graph& graph, const Node& node) {
  const TensorSpec &a = operand_spec(graph, node, 0), &b = operand_spec(graph, node, 1);
  const size_t da = a.shape.size(), db = b.shape.size();
  if (da < 2 || db < 2 || da > 3 || db > 3) bad_call(node, "an operand is no matrix");
  TensorSpec out{a.dtype, {a.shape[da - 2], b.shape[db - 1]}};
  if (da == 3 && db == 3) out.shape.insert(out.shape.begin(), a.shape[0]);
  if (da == 2 && db == 2)
    out.shape.insert(out.shape.begin(), operand_spec(graph, node, 2).shape.at(0));
  return {out};
}
double flops_grouped(const Graph& graph, const Node& node) {
  const Shape &a = operand_spec(graph, node, 0).shape, &b = operand_spec(graph, node, 1).shape;
  if (a.size() < 2 || b.size() < 2) return 0;
  const double rows = static_cast<double>(a[a.size() - 2]), sums = static_cast<double>(a.back());
  const double groups = a.size() == 3 && b.size() == 3 ? static_cast<double>(a[0]) : 1;
  return 2 * groups * rows * sums * static_cast<double>(b.back());
}

// Of ours: each row of x[s k] by the matrix of w[e k n] that ids[s] names -> [s n].
Signature rows_mm(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  const int s = b.label(b.in(0)[0]), n = b.label(b.in(1)[2]);
  const int k = b.label(b.in(0)[1], LabelKind::reduction);
  b.operand(0, 0, {s});
  b.operand(0, 1, {k});
  b.operand(1, 1, {k});
  b.operand(1, 2, {n});
  b.operand(2, 0, {s});
  b.result(0, 0, {s});
  b.result(0, 1, {n});
  b.linear({0});
  b.linear({1});
  return b.take();
}
std::vector<TensorSpec> shape_rows_mm(const Graph& graph, const Node& node) {
  const TensorSpec &x = operand_spec(graph, node, 0), &w = operand_spec(graph, node, 1);
  if (x.shape.size() != 2 || w.shape.size() != 3) bad_call(node, "it takes a matrix and a batch");
  return {{x.dtype, {x.shape[0], w.shape[2]}}};
}
// A device with some of the matrices computes the rows that these are for.
std::vector<ExtraRule> rows_mm_extra(const Graph&, const Node&) {
  const Placement r = Placement::replicated();
  return {{"rows_mm.experts", {r, Placement::shard(0), r}, {Placement::partial()}, {}}};
}

// Its gradient: (x[s m], y[s n], ids[s], experts) -> [e m n], sums over the rows of each.
Signature rows_outer(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  const int s = b.label(b.in(0)[0], LabelKind::reduction);
  const int m = b.label(b.in(0)[1]), n = b.label(b.in(1)[1]);
  b.operand(0, 0, {s});
  b.operand(0, 1, {m});
  b.operand(1, 0, {s});
  b.operand(1, 1, {n});
  b.operand(2, 0, {s});
  b.result(0, 1, {m});
  b.result(0, 2, {n});
  b.linear({0});
  b.linear({1});
  return b.take();
}
std::vector<TensorSpec> shape_rows_outer(const Graph& graph, const Node& node) {
  const TensorSpec &x = operand_spec(graph, node, 0), &y = operand_spec(graph, node, 1);
  if (x.shape.size() != 2 || y.shape.size() != 2) bad_call(node, "it takes two matrices");
  return {{x.dtype, {int_arg(node, 3), x.shape[1], y.shape[1]}}};
}
std::vector<ExtraRule> rows_outer_extra(const Graph&, const Node&) {
  const Placement r = Placement::replicated();
  return {{"rows_outer.experts", {r, r, r}, {Placement::shard(0)}, {}}};
}
double flops_rows(const Graph& graph, const Node& node) {
  const Shape &x = operand_spec(graph, node, 0).shape, &y = operand_spec(graph, node, 1).shape;
  return x.size() == 2 && !y.empty()
             ? 2.0 * static_cast<double>(x[0]) * static_cast<double>(x[1] * y.back())
             : 0;
}

// Twice the product of the result's size and the contracted dimension.
double flops(const Graph& graph, const Node& node) {
  const Shape& last = operand_spec(graph, node, graph.inputs_of(node).size() - 1).shape;
  int64_t k = last.size() >= 2 ? last[last.size() - 2] : last[0];
  return 2.0 * static_cast<double>(result_spec(graph, node, 0).numel()) * static_cast<double>(k);
}

OpDef product(const char* name, decltype(OpDef::signature) signature) {
  return def(name, signature, flops);
}

}  // namespace

const std::vector<OpDef>& matmul_ops() {
  OpDef grouped{"aten::_grouped_mm"};
  grouped.flops = flops_grouped;
  grouped.shape = shape_grouped;
  OpDef rows{"motley_torch::rows_mm", rows_mm, rows_mm_extra, flops_rows};
  rows.shape = shape_rows_mm;
  OpDef outer{"motley_torch::rows_outer", rows_outer, rows_outer_extra, flops_rows};
  outer.shape = shape_rows_outer;
  static const std::vector<OpDef> table = {
      grouped,
      product("aten::addmm", addmm),
      product("aten::baddbmm", baddbmm),
      product("aten::bmm", bmm),
      product("aten::dot", dot),
      product("aten::mm", mm),
      product("aten::mv", mv),
      rows,
      outer,
  };
  return table;
}

}  // namespace motley::ops
