// Operators that do the same for every matrix, picture or row of a batch: linear algebra,
// distances, and what looks at single dimensions.
#include <algorithm>

#include "graph/ops/builder.h"

namespace motley::ops {

namespace {

// All tensors begin with the batch, which is what the first operand has before its last `own`
// dimensions. Where operands have other ranks, or broadcast, nothing is cut; pivots have one
// dimension less.
Signature batch(const Graph& graph, const Node& node, size_t own) {
  Builder b(graph, node);
  const CheckedShape first = b.in(0);
  for (int i = 1; i < b.operands(); ++i) {
    const bool pivots = operand_spec(graph, node, static_cast<size_t>(i)).dtype == DType::i32;
    if (b.in(i).size() + (pivots ? 1 : 0) != first.size()) return b.take();
  }
  for (size_t d = 0; d + own < first.size(); ++d) {
    bool shared = true;
    for (int i = 1; i < b.operands(); ++i) shared = shared && b.in(i)[d] == first[d];
    for (int r = 0; r < b.results(); ++r)
      shared = shared && (!b.has_result(r) || (d < b.out(r).size() && b.out(r)[d] == first[d]));
    if (!shared) continue;
    const int l = b.label(first[d]), at = static_cast<int>(d);
    for (int i = 0; i < b.operands(); ++i) b.operand(i, at, {l});
    for (int r = 0; r < b.results(); ++r) b.result(r, at, {l});
  }
  return b.take();
}
Signature rows(const Graph& graph, const Node& node) { return batch(graph, node, 1); }
Signature matrices(const Graph& graph, const Node& node) { return batch(graph, node, 2); }
Signature pictures(const Graph& graph, const Node& node) { return batch(graph, node, 3); }
Signature linear_pictures(const Graph& graph, const Node& node) {
  Signature signature = pictures(graph, node);
  signature.linear.push_back({0});
  return signature;
}

// distances(x[.. i m], y[.. j m]) -> [.. i j]; backward (d[.. i j], x, y, distances[.. i j]) ->
// dx[.. i m], which is a sum over j.
Signature distances(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  const bool backward = b.operands() == 4;
  const int x = backward ? 1 : 0, y = x + 1;
  const size_t rank = b.in(x).size();
  if (rank < 2 || b.in(y).size() != rank) return b.take();
  const auto put = [&](int d, int l, bool of_x, bool of_y, bool of_result) {
    if (of_x) b.operand(x, d, {l});
    if (of_y) b.operand(y, of_x ? d : d - 1, {l});
    if (backward) b.operand(0, d, {l}), b.operand(3, d, {l});
    if (of_result) b.result(0, d, {l});
  };
  const int i = static_cast<int>(rank) - 2;
  for (int d = 0; d < i; ++d)
    if (const auto at = static_cast<size_t>(d); b.in(x)[at] == b.in(y)[at])
      put(d, b.label(b.in(x)[at]), true, true, true);
  put(i, b.label(b.in(x)[rank - 2]), true, false, true);
  const auto summed = backward ? LabelKind::reduction : LabelKind::parallel;
  put(i + 1, b.label(b.in(y)[rank - 2], summed), false, true, !backward);
  if (backward) b.linear({0});
  return b.take();
}

// x, and results of its rank, but for the dimensions that are looked at as a whole.
Signature beside(const Graph& graph, const Node& node, const std::vector<int64_t>& whole,
                 bool linear) {
  Builder b(graph, node);
  const size_t rank = b.in(0).size();
  std::vector<bool> free(rank, true);
  for (int64_t d : whole)
    if (rank > 0) free[static_cast<size_t>(wrap_dim(d, rank))] = false;
  for (size_t d = 0; d < rank; ++d) {
    if (!free[d]) continue;
    bool shared = true;
    for (int i = 1; i < b.operands(); ++i)
      shared = shared && b.in(i).size() == rank && b.in(i)[d] == b.in(0)[d];
    if (!shared) continue;
    const int l = b.label(b.in(0)[d]), at = static_cast<int>(d);
    for (int i = 0; i < b.operands(); ++i) b.operand(i, at, {l});
    for (int r = 0; r < b.results(); ++r) b.result(r, at, {l});
  }
  if (linear) b.linear({0});
  return b.take();
}
Signature channels_shuffled(const Graph& graph, const Node& node) {
  return beside(graph, node, {1}, true);
}
Signature cross(const Graph& graph, const Node& node) {
  return beside(graph, node, {int_arg(node, 2, -1)}, false);
}
Signature glu(const Graph& graph, const Node& node) {
  return beside(graph, node, {int_arg(node, 1, -1)}, false);
}
Signature glu_backward(const Graph& graph, const Node& node) {
  return beside(graph, node, {int_arg(node, 2, -1)}, true);
}

// renorm(x, p, dim, most): each of the parts along `dim`, which are looked at as a whole.
Signature renorm(const Graph& graph, const Node& node) {
  std::vector<int64_t> whole;
  const size_t rank = operand_spec(graph, node, 0).shape.size(),
               dim = rank == 0 ? 0 : static_cast<size_t>(wrap_dim(int_arg(node, 2), rank));
  for (size_t d = 0; d < rank; ++d)
    if (d != dim) whole.push_back(static_cast<int64_t>(d));
  return beside(graph, node, whole, false);
}

// rot90(x, times, [d, e]): the other dimensions.
Signature rotated(const Graph& graph, const Node& node) {
  return beside(graph, node, ints_arg(node, 2), true);
}

// Operand `full` has two dimensions that the result (or, of `within`, the operand) with the
// diagonal has not; its last dimension is the diagonal.
Signature diagonals(const Graph& graph, const Node& node, size_t at, bool full_result,
                    bool scatters) {
  Builder b(graph, node);
  const CheckedShape full = full_result ? b.out(0) : b.in(0);
  const int64_t other = node.op == "aten::diag_embed" ? -2 : 0;  // where none is said
  const size_t rank = full.size(),
               one = static_cast<size_t>(wrap_dim(int_arg(node, at, other), rank)),
               two = static_cast<size_t>(wrap_dim(int_arg(node, at + 1, other + 1), rank));
  int short_at = 0;
  for (size_t d = 0; d < rank; ++d) {
    if (d == one || d == two) continue;
    const int l = b.label(full[d]), long_at = static_cast<int>(d);
    if (full_result || scatters) b.result(0, long_at, {l});
    if (!full_result) b.operand(0, long_at, {l});
    if (full_result) b.operand(0, short_at, {l});
    if (scatters) b.operand(1, short_at, {l});
    if (!full_result && !scatters) b.result(0, short_at, {l});
    ++short_at;
  }
  if (scatters)
    b.linear({0, 1});
  else
    b.linear({0});
  return b.take();
}
// diagonal(x, offset, d, e), diagonal_backward(dy, sizes, offset, d, e), diag_embed(x, offset, d,
// e), diagonal_scatter(x, y, offset, d, e)
Signature diagonal(const Graph& graph, const Node& node) {
  return diagonals(graph, node, 2, false, false);
}
Signature diagonal_backward(const Graph& graph, const Node& node) {
  return diagonals(graph, node, 3, true, false);
}
Signature embedded(const Graph& graph, const Node& node) {
  return diagonals(graph, node, 2, true, false);
}
Signature diagonal_scatter(const Graph& graph, const Node& node) {
  return diagonals(graph, node, 3, false, true);
}

// One element of the result from one of operand `i`, the other operands whole.
Signature of_one(const Graph& graph, const Node& node, int i) {
  Builder b(graph, node);
  for (size_t d = 0; d < b.in(i).size(); ++d) {
    const int l = b.label(b.in(i)[d]), at = static_cast<int>(d);
    b.operand(i, at, {l});
    b.result(0, at, {l});
  }
  return b.take();
}
Signature of_first(const Graph& graph, const Node& node) { return of_one(graph, node, 0); }
// take(x, index)
Signature take(const Graph& graph, const Node& node) {
  Signature signature = of_one(graph, node, 1);
  signature.linear.push_back({0});
  return signature;
}
// searchsorted(sorted[.. n] or sorted[n], x[.. m])
Signature searched(const Graph& graph, const Node& node) {
  if (operand_spec(graph, node, 0).shape.size() == 1) return of_one(graph, node, 1);
  return rows(graph, node);
}

// _trilinear(x, y, z, where each has no dimension, what is summed): a product of three.
Signature trilinear(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  const std::vector<int64_t> summed = ints_arg(node, 6);
  const size_t rank = b.in(0).size() + ints_arg(node, 3).size();
  const auto has = [](const std::vector<int64_t>& dims, size_t d) {
    return std::find(dims.begin(), dims.end(), static_cast<int64_t>(d)) != dims.end();
  };
  std::vector<int> next(3);
  int out = 0;
  for (size_t d = 0; d < rank; ++d) {
    std::vector<int> at(3, -1);
    int64_t size = 1;
    for (int i = 0; i < 3; ++i) {
      if (has(ints_arg(node, 3 + static_cast<size_t>(i)), d)) continue;
      at[static_cast<size_t>(i)] = next[static_cast<size_t>(i)]++;
      size = std::max(size, b.in(i)[static_cast<size_t>(at[static_cast<size_t>(i)])]);
    }
    const bool sums = has(summed, d);
    const int l = b.label(size, sums ? LabelKind::reduction : LabelKind::parallel);
    for (int i = 0; i < 3; ++i)
      if (const int p = at[static_cast<size_t>(i)];
          p >= 0 && b.in(i)[static_cast<size_t>(p)] == size)
        b.operand(i, p, {l});
    if (!sums) b.result(0, out++, {l});
  }
  for (int i = 0; i < 3; ++i) b.linear({i});
  return b.take();
}

// addbmm(c, x[b i k], y[b k j]) -> [i j]
Signature addbmm(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  const int n = b.label(b.in(1)[0], LabelKind::reduction), i = b.label(b.in(1)[1]),
            k = b.label(b.in(1)[2], LabelKind::reduction), j = b.label(b.in(2)[2]);
  b.operand(1, 0, {n}), b.operand(1, 1, {i}), b.operand(1, 2, {k});
  b.operand(2, 0, {n}), b.operand(2, 1, {k}), b.operand(2, 2, {j});
  b.result(0, 0, {i}), b.result(0, 1, {j});
  b.broadcast_operand(0, {i, j}, b.out(0));
  b.added(0);
  b.linear({0, 1});
  b.linear({0, 2});
  return b.take();
}
double addbmm_flops(const Graph& graph, const Node& node) {
  const TensorSpec& x = operand_spec(graph, node, 1);
  const Shape& out = result_spec(graph, node, 0).shape;
  return 2.0 * static_cast<double>(x.numel()) * static_cast<double>(out.empty() ? 1 : out.back());
}

// affine_grid_generator(theta[n 2 3], [n c h w]) -> [n h w 2]
Signature affine_grid(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  const int n = b.label(b.in(0)[0]);
  b.operand(0, 0, {n});
  b.result(0, 0, {n});
  b.linear({0});
  return b.take();
}
void localize_affine_grid(const LocalCall& call, std::vector<Arg>* args) {
  if (auto* sizes = std::get_if<std::vector<int64_t>>(&args->at(1)); sizes && !sizes->empty())
    sizes->front() = call.result_shapes[0][0];
}

// ctc_loss(x[t n c], targets[n s], lengths[n], lengths[n]) -> [n], alpha[n t ...]; backward (dy[n],
// x, targets, lengths, lengths, loss[n], alpha) -> [t n c]
Signature ctc(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  const bool backward = b.operands() == 7;
  const int x = backward ? 1 : 0;
  if (!backward && b.operands() != 4) return b.take();
  if (b.in(x).size() != 3 || b.in(x + 1).size() != 2) return b.take();
  const int n = b.label(b.in(x)[1]);
  for (int i = 0; i < b.operands(); ++i) b.operand(i, i == x ? 1 : 0, {n});
  for (int r = 0; r < b.results(); ++r) b.result(r, backward ? 1 : 0, {n});
  if (backward) b.linear({0});
  return b.take();
}

// Of matrices of n x n elements: `times` n^3 each.
double cubes(const Graph& graph, const Node& node, double times) {
  const TensorSpec& x = operand_spec(graph, node, 0);
  return times * static_cast<double>(x.numel()) *
         static_cast<double>(x.shape.empty() ? 1 : x.shape.back());
}
double cube(const Graph& graph, const Node& node) { return cubes(graph, node, 1); }
double ten_cubes(const Graph& graph, const Node& node) { return cubes(graph, node, 10); }
// Distances of rows of m numbers: three operations for each.
double distance_flops(const Graph& graph, const Node& node) {
  const Shape& x = operand_spec(graph, node, 0).shape;
  return 3.0 * static_cast<double>(result_spec(graph, node, 0).numel()) *
         static_cast<double>(x.empty() ? 1 : x.back());
}

OpDef localized(OpDef op, void (*localize)(const LocalCall&, std::vector<Arg>*)) {
  op.localize = localize;
  return op;
}

OpDef sized(OpDef op, int argument) {
  op.size_arg = argument;
  return op;
}

}  // namespace

const std::vector<OpDef>& batched_ops() {
  static const std::vector<OpDef> table = {
      def("aten::_cdist_backward", distances, distance_flops),
      def("aten::_cdist_forward", distances, distance_flops),
      def("aten::_ctc_loss_backward.Tensor", ctc),
      def("aten::_euclidean_dist", distances, distance_flops),
      def("aten::_linalg_det", matrices, cube),
      def("aten::_linalg_eigh", matrices, ten_cubes),
      def("aten::_linalg_slogdet", matrices, cube),
      def("aten::_linalg_solve_ex", matrices, cube),
      def("aten::_linalg_svd", matrices, ten_cubes),
      def("aten::_trilinear", trilinear),
      def("aten::addbmm", addbmm, addbmm_flops),
      localized(def("aten::affine_grid_generator", affine_grid), localize_affine_grid),
      def("aten::bucketize.Tensor", of_first),
      def("aten::channel_shuffle", channels_shuffled),
      def("aten::cholesky_inverse", matrices, cube),
      def("aten::cholesky_solve", matrices, cube),
      def("aten::diag_embed", embedded),
      def("aten::diagonal", diagonal),
      sized(def("aten::diagonal_backward", diagonal_backward), 1),
      def("aten::diagonal_scatter", diagonal_scatter),
      def("aten::glu", glu),
      def("aten::glu_backward", glu_backward),
      def("aten::isin.Tensor_Tensor", of_first),
      def("aten::linalg_cholesky_ex", matrices, cube),
      def("aten::linalg_cross", cross),
      def("aten::linalg_inv_ex", matrices, cube),
      def("aten::linalg_lu_factor_ex", matrices, cube),
      def("aten::linalg_lu_solve", matrices, cube),
      def("aten::linalg_matrix_exp", matrices, ten_cubes),
      def("aten::linalg_pinv.atol_rtol_tensor", matrices, ten_cubes),
      def("aten::linalg_qr", matrices, ten_cubes),
      def("aten::linalg_solve_triangular", matrices, cube),
      def("aten::pixel_shuffle", linear_pictures),
      def("aten::pixel_unshuffle", linear_pictures),
      def("aten::renorm", renorm),
      def("aten::rot90", rotated),
      def("aten::searchsorted.Tensor", searched),
      def("aten::take", take),
      def("motley_torch::ctc_loss", ctc),
  };
  return table;
}

}  // namespace motley::ops
