// Attention as one operator, which never holds the scores. The names are those of libtorch's kernels for the CPU; other
// devices have theirs (interpret/attention.h).
//
//   out[b h s d], sums[b h s] = attention(q[b h s d], k[b g t d], v[b g t d], p, causal, mask?[b h s t], scale)
//
// Heads of keys and values may serve several heads of queries: h = (g, heads of one g). Cut are rows of the batch and heads;
// a head's tokens are together.
#include "graph/ops/builder.h"

namespace motley::ops {

namespace {

struct Heads {
  int rows, shared,
      own;  // labels: batch, heads of keys, heads of queries for one of keys (-1: one)
};

Heads heads_of(Builder& b, const Node& node, int query) {
  const CheckedShape q = b.in(query), k = b.in(query + 1);
  const int64_t shared = k[1];
  if (q.size() != 4 || k.size() != 4 || shared < 1 || q[1] % shared != 0)
    bad_call(node, "heads of queries are no multiple of those of keys");
  return {b.label(q[0]), b.label(shared), q[1] == shared ? -1 : b.label(q[1] / shared)};
}

// Tensor operand i is indexed like queries, or like keys.
void like_query(Builder& b, const Heads& h, int i, bool is_result) {
  const auto set = [&](int d, std::initializer_list<int> labels) {
    is_result ? b.result(i, d, labels) : b.operand(i, d, labels);
  };
  set(0, {h.rows});
  h.own < 0 ? set(1, {h.shared}) : set(1, {h.shared, h.own});
}

void like_key(Builder& b, const Heads& h, int i, bool is_result) {
  is_result ? b.result(i, 0, {h.rows}) : b.operand(i, 0, {h.rows});
  is_result ? b.result(i, 1, {h.shared}) : b.operand(i, 1, {h.shared});
}

// A mask broadcasts against [b h s t].
void mask(Builder& b, const Heads& h, int i) {
  if (i >= b.operands()) return;
  const CheckedShape m = b.in(i);
  if (m.size() != 4) return;  // [s t]
  if (m[0] > 1) b.operand(i, 0, {h.rows});
  if (m[1] > 1) h.own < 0 ? b.operand(i, 1, {h.shared}) : b.operand(i, 1, {h.shared, h.own});
}

Signature attention(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  const Heads h = heads_of(b, node, 0);
  like_query(b, h, 0, false);
  // Cutting the heads of queries that share keys leaves the keys whole.
  like_key(b, h, 1, false);
  like_key(b, h, 2, false);
  mask(b, h, 3);
  like_query(b, h, 0, true);
  like_query(b, h, 1, true);
  if (h.own >= 0) b.info(h.own).kind = LabelKind::blocked;
  return b.take();
}

// attention_backward(dout, q, k, v, out, sums, p, causal, mask?, scale) -> dq, dk, dv
Signature attention_backward(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  const Heads h = heads_of(b, node, 1);
  for (int i : {0, 1, 4, 5}) like_query(b, h, i, false);
  for (int i : {2, 3}) like_key(b, h, i, false);
  mask(b, h, 6);
  like_query(b, h, 0, true);
  like_key(b, h, 1, true);
  like_key(b, h, 2, true);
  if (h.own >= 0) b.info(h.own).kind = LabelKind::blocked;
  return b.take();
}

// Two products of queries and keys; of a causal one half is not computed.
double products(const Graph& graph, const Node& node, size_t query, size_t causal) {
  const TensorSpec &q = operand_spec(graph, node, query), &k = operand_spec(graph, node, query + 1);
  const double tokens = k.shape.size() == 4 ? static_cast<double>(k.shape[2]) : 0;
  return (bool_arg(node, causal) ? 2.0 : 4.0) * static_cast<double>(q.numel()) * tokens;
}
double flops(const Graph& graph, const Node& node) { return products(graph, node, 0, 4); }
// Five products: the scores are computed again.
double backward_flops(const Graph& graph, const Node& node) {
  return 2.5 * products(graph, node, 1, 7);
}

std::vector<TensorSpec> shape(const Graph& graph, const Node& node) {
  const TensorSpec& q = operand_spec(graph, node, 0);
  TensorSpec sums = q;
  sums.shape.pop_back();
  if (size_of(q.dtype) == 2) sums.dtype = DType::f32;
  return {q, sums};
}
std::vector<TensorSpec> backward_shape(const Graph& graph, const Node& node) {
  return {operand_spec(graph, node, 1), operand_spec(graph, node, 2), operand_spec(graph, node, 3)};
}

}  // namespace

const std::vector<OpDef>& attention_ops() {
  static const std::vector<OpDef> table = [] {
    OpDef forward{"aten::_scaled_dot_product_flash_attention_for_cpu"};
    forward.signature = attention;
    forward.flops = flops;
    forward.shape = shape;
    OpDef backward{"aten::_scaled_dot_product_flash_attention_for_cpu_backward"};
    backward.signature = attention_backward;
    backward.flops = backward_flops;
    backward.shape = backward_shape;
    return std::vector<OpDef>{forward, backward};
  }();
  return table;
}

}  // namespace motley::ops
