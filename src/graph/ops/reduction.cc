// Sums and other reductions over dimensions. Means are rewritten as sums by canonicalisation.
#include <algorithm>

#include "graph/ops/builder.h"

namespace motley::ops {

namespace {

std::vector<bool> reduced_dims(const std::vector<int64_t>& dims, size_t rank) {
  std::vector<bool> reduced(rank, dims.empty());
  for (int64_t d : dims)
    if (int64_t w = wrap_dim(d, rank); w >= 0 && w < static_cast<int64_t>(rank)) reduced[w] = true;
  return reduced;
}

Signature reduce(const Graph& graph, const Node& node, const std::vector<bool>& reduced, bool keep,
                 LabelKind kind) {
  Builder b(graph, node);
  int at = 0;
  for (size_t d = 0; d < reduced.size(); ++d) {
    int l = b.label(b.in(0)[d], reduced[d] ? kind : LabelKind::parallel);
    b.operand(0, static_cast<int>(d), {l});
    if (!reduced[d])
      for (int r = 0; r < b.results(); ++r) b.result(r, at, {l});
    at += !reduced[d] || keep;
  }
  if (kind == LabelKind::reduction) b.linear({0});
  return b.take();
}

Signature sum(const Graph& graph, const Node& node) {
  return reduce(graph, node, reduced_dims({}, rank_of(graph, node)), false, LabelKind::reduction);
}

Signature sum_dims(const Graph& graph, const Node& node) {
  return reduce(graph, node, reduced_dims(ints_arg(node, 1), rank_of(graph, node)),
                bool_arg(node, 2), LabelKind::reduction);
}

// amax, amin, mean left as it is, var: the reduced dimensions are whole.
Signature whole_dims(const Graph& graph, const Node& node) {
  return reduce(graph, node, reduced_dims(ints_arg(node, 1), rank_of(graph, node)),
                bool_arg(node, 2), LabelKind::blocked);
}

// op(x, dim, keepdim) with one or two results (max.dim, argmax).
Signature one_dim(const Graph& graph, const Node& node) {
  std::vector<bool> reduced(rank_of(graph, node));
  if (auto dims = ints_arg(node, 1); !dims.empty() && !reduced.empty())
    reduced[wrap_dim(dims[0], reduced.size())] = true;
  else
    reduced.assign(reduced.size(), true);
  return reduce(graph, node, reduced, bool_arg(node, 2), LabelKind::blocked);
}

// kthvalue(x, k, dim, keepdim)
Signature kth(const Graph& graph, const Node& node) {
  return reduce(graph, node, reduced_dims({int_arg(node, 2, -1)}, rank_of(graph, node)),
                bool_arg(node, 3), LabelKind::blocked);
}

// var(x, dims, correction, keepdim)
Signature spread(const Graph& graph, const Node& node) {
  return reduce(graph, node, reduced_dims(ints_arg(node, 1), rank_of(graph, node)),
                bool_arg(node, 3), LabelKind::blocked);
}

// norm(x, p, dims, keepdim)
Signature norm(const Graph& graph, const Node& node) {
  return reduce(graph, node, reduced_dims(ints_arg(node, 2), rank_of(graph, node)),
                bool_arg(node, 3), LabelKind::blocked);
}

Signature everything(const Graph& graph, const Node& node) {
  return reduce(graph, node, reduced_dims({}, rank_of(graph, node)), false, LabelKind::blocked);
}

// cumsum(x, dim), sort-like: same shape, dimension `dim` whole.
Signature along(const Graph& graph, const Node& node, size_t arg, bool linear) {
  Builder b(graph, node);
  size_t rank = b.in(0).size(), dim = rank ? wrap_dim(int_arg(node, arg), rank) : 0;
  for (size_t d = 0; d < rank; ++d) {
    int l = d == dim ? -1 : b.label(b.in(0)[d]);
    b.operand(0, static_cast<int>(d), {l});
    for (int r = 0; r < b.results(); ++r) b.result(r, static_cast<int>(d), {l});
  }
  if (linear) b.linear({0});
  return b.take();
}
Signature scan(const Graph& graph, const Node& node) { return along(graph, node, 1, false); }
Signature cumsum(const Graph& graph, const Node& node) { return along(graph, node, 1, true); }
Signature flip(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  b.linear({0});
  auto flipped = reduced_dims(ints_arg(node, 1), b.in(0).size());
  for (size_t d = 0; d < b.in(0).size(); ++d) {
    int l = flipped[d] ? -1 : b.label(b.in(0)[d]);
    b.operand(0, static_cast<int>(d), {l});
    b.result(0, static_cast<int>(d), {l});
  }
  return b.take();
}
Signature topk(const Graph& graph, const Node& node) { return along(graph, node, 2, false); }

}  // namespace

const std::vector<OpDef>& reduction_ops() {
  static const std::vector<OpDef> table = {
      def("aten::all", everything),
      def("aten::all.dim", one_dim),
      def("aten::amax", whole_dims),
      def("aten::amin", whole_dims),
      def("aten::aminmax", one_dim),
      def("aten::any", everything),
      def("aten::any.dim", one_dim),
      def("aten::argmax", one_dim),
      def("aten::argmin", one_dim),
      def("aten::count_nonzero.dim_IntList", whole_dims),
      def("aten::cummax", scan),
      def("aten::cummin", scan),
      def("aten::cumprod", scan),
      def("aten::cumsum", cumsum),
      def("aten::dist", everything),
      def("aten::flip", flip),
      def("aten::kthvalue", kth),
      def("aten::linalg_vector_norm", norm),
      def("aten::logcumsumexp", scan),
      def("aten::logsumexp", whole_dims),
      def("aten::max", everything),
      def("aten::max.dim", one_dim),
      def("aten::mean", everything),
      def("aten::mean.dim", whole_dims),
      def("aten::median", everything),
      def("aten::median.dim", one_dim),
      def("aten::min", everything),
      def("aten::min.dim", one_dim),
      def("aten::mode", one_dim),
      def("aten::nanmedian", everything),
      def("aten::nanmedian.dim", one_dim),
      def("aten::nansum", whole_dims),
      def("aten::norm.ScalarOpt_dim", norm),
      def("aten::prod", everything),
      def("aten::prod.dim_int", one_dim),
      def("aten::sort", scan),
      def("aten::sort.stable", topk),
      def("aten::std.correction", spread),
      def("aten::std_mean.correction", spread),
      def("aten::sum", sum),
      def("aten::sum.dim_IntList", sum_dims),
      def("aten::topk", topk),
      def("aten::trace", everything),
      def("aten::var.correction", spread),
      def("aten::var_mean.correction", spread),
  };
  return table;
}

}  // namespace motley::ops
