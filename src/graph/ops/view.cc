// Ops that rename, cut or join index ranges. Dimensions are lists of labels here: view(B*S -> B, S)
// keeps the labels B, S.
#include <algorithm>

#include "graph/ops/builder.h"

namespace motley::ops {

namespace {

// Labels of a reshape: walk both shapes, gathering the smallest groups of dimensions of equal
// product; inside a group the labels are the common refinement of both factorisations, if one
// divides into the other.
Signature reshape(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  b.linear({0});
  const CheckedShape in = b.in(0), &out = b.out(0);
  auto cut_into = [](const CheckedShape& shape, size_t begin, size_t end,
                     const std::vector<int64_t>& sizes, const std::vector<int>& labels, auto put) {
    // Distributes labels (with sizes, outermost first) over the dimensions begin..end.
    size_t l = 0;
    for (size_t d = begin; d < end; ++d) {
      std::vector<int> mine;
      int64_t left = shape[d];
      while (left > 1) {
        mine.push_back(labels[l]);
        left /= sizes[l++];
      }
      put(static_cast<int>(d), mine);
    }
  };
  for (int64_t n : in)
    if (n == 0) return b.take();
  size_t i = 0, o = 0;
  while (i < in.size() || o < out.size()) {
    size_t i0 = i, o0 = o;
    int64_t pi = i < in.size() ? in[i++] : 1, po = o < out.size() ? out[o++] : 1;
    while (pi != po) {
      if (pi < po && i < in.size())
        pi *= in[i++];
      else if (o < out.size())
        po *= out[o++];
      else
        return b.take();
    }
    // Boundaries of the group as products of the dimensions after them.
    std::vector<int64_t> cuts = {pi, 1};
    auto add_cuts = [&](const CheckedShape& shape, size_t begin, size_t end) {
      int64_t suffix = 1;
      for (size_t d = end; d-- > begin;) cuts.push_back(suffix *= shape[d]);
    };
    add_cuts(in, i0, i);
    add_cuts(out, o0, o);
    std::sort(cuts.rbegin(), cuts.rend());
    cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
    bool divides = true;
    for (size_t c = 0; c + 1 < cuts.size(); ++c) divides = divides && cuts[c] % cuts[c + 1] == 0;
    if (!divides) continue;  // no labels: the group is never cut
    std::vector<int64_t> sizes;
    std::vector<int> labels;
    for (size_t c = 0; c + 1 < cuts.size(); ++c) {
      sizes.push_back(cuts[c] / cuts[c + 1]);
      labels.push_back(b.label(sizes.back()));
    }
    cut_into(in, i0, i, sizes, labels,
             [&](int d, const std::vector<int>& l) { b.operand_list(0, d, l); });
    cut_into(out, o0, o, sizes, labels,
             [&](int d, const std::vector<int>& l) { b.result_list(0, d, l); });
  }
  return b.take();
}

// Result dimension d is operand dimension order[d]; -1: a new dimension of size 1.
Signature permuted(const Graph& graph, const Node& node, const std::vector<int64_t>& order) {
  Builder b(graph, node);
  b.linear({0});
  for (size_t d = 0; d < order.size(); ++d) {
    if (order[d] < 0) continue;
    int l = b.label(b.in(0)[order[d]]);
    b.operand(0, static_cast<int>(order[d]), {l});
    b.result(0, static_cast<int>(d), {l});
  }
  return b.take();
}

std::vector<int64_t> identity(size_t rank) {
  std::vector<int64_t> order(rank);
  for (size_t d = 0; d < rank; ++d) order[d] = static_cast<int64_t>(d);
  return order;
}

Signature same(const Graph& graph, const Node& node) {
  return permuted(graph, node, identity(rank_of(graph, node)));
}

Signature t(const Graph& graph, const Node& node) {
  auto order = identity(rank_of(graph, node));
  std::reverse(order.begin(), order.end());
  return permuted(graph, node, order);
}

Signature transpose(const Graph& graph, const Node& node) {
  auto order = identity(rank_of(graph, node));
  std::swap(order[wrap_dim(int_arg(node, 1), order.size())],
            order[wrap_dim(int_arg(node, 2), order.size())]);
  return permuted(graph, node, order);
}

Signature permute(const Graph& graph, const Node& node) {
  auto order = ints_arg(node, 1);
  for (int64_t& d : order) d = wrap_dim(d, order.size());
  return permuted(graph, node, order);
}

Signature expand(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  b.pointwise();
  b.linear({0});
  return b.take();
}

// A range of `length` at `start` of a dimension of `size`: when it is one of size/length equal
// blocks, the dimension is (blocks x length) and the inner label may be cut; otherwise the
// dimension is not.
struct Block {
  int outer = -1, inner = -1;
};
Block block_labels(Builder* b, int64_t size, int64_t length, bool aligned) {
  if (size == length) return {-1, b->label(length)};
  if (!aligned || length == 0 || size % length != 0) return {};
  return {b->label(size / length, LabelKind::blocked), b->label(length)};
}

void other_dims(Builder* b, int operand, int result, size_t except) {
  for (size_t d = 0; d < b->in(operand).size(); ++d) {
    if (d == except) continue;
    int l = b->label(b->in(operand)[d]);
    b->operand(operand, static_cast<int>(d), {l});
    b->result(result, static_cast<int>(d), {l});
  }
}

int64_t clamp_start(int64_t start, int64_t size) {
  if (start < 0) start += size;
  return std::clamp<int64_t>(start, 0, size);
}

Signature slice(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  b.linear({0});
  size_t dim = wrap_dim(int_arg(node, 1), b.in(0).size());
  int64_t size = b.in(0)[dim], length = b.out(0)[dim], start = clamp_start(int_arg(node, 2), size);
  other_dims(&b, 0, 0, dim);
  bool aligned = int_arg(node, 4, 1) == 1 && length > 0 && start % length == 0;
  Block block = block_labels(&b, size, length, aligned);
  b.operand(0, static_cast<int>(dim), {block.outer, block.inner});
  b.result(0, static_cast<int>(dim), {block.inner});
  return b.take();
}

// slice_backward(grad, input_sizes, dim, start, end, step)
Signature slice_backward(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  b.linear({0});
  size_t dim = wrap_dim(int_arg(node, 2), b.in(0).size());
  int64_t size = b.out(0)[dim], length = b.in(0)[dim], start = clamp_start(int_arg(node, 3), size);
  other_dims(&b, 0, 0, dim);
  bool aligned = int_arg(node, 5, 1) == 1 && length > 0 && start % length == 0;
  Block block = block_labels(&b, size, length, aligned);
  b.operand(0, static_cast<int>(dim), {block.inner});
  b.result(0, static_cast<int>(dim), {block.outer, block.inner});
  return b.take();
}

// Start and end of a local block, when the dimension shrinks from `size` to `local`.
void scale_range(std::vector<Arg>* args, size_t at, int64_t start, int64_t length,
                 int64_t local_length) {
  if (length == local_length) return;
  int64_t local_start = start / length * local_length;
  args->at(at) = local_start;
  args->at(at + 1) = local_start + local_length;
}

void localize_slice(const LocalCall& call, std::vector<Arg>* args) {
  const Shape& in = call.graph.spec(call.graph.inputs_of(call.node)[0]).shape;
  const Shape& out = call.graph.spec(call.node.outputs[0]).shape;
  size_t dim = wrap_dim(int_arg(call.node, 1), in.size());
  scale_range(args, 2, clamp_start(int_arg(call.node, 2), in[dim]), out[dim],
              call.result_shapes[0][dim]);
}

void localize_slice_backward(const LocalCall& call, std::vector<Arg>* args) {
  args->at(1) = call.result_shapes[0];
  const Shape& grad = call.graph.spec(call.graph.inputs_of(call.node)[0]).shape;
  const Shape& out = call.graph.spec(call.node.outputs[0]).shape;
  size_t dim = wrap_dim(int_arg(call.node, 2), grad.size());
  scale_range(args, 3, clamp_start(int_arg(call.node, 3), out[dim]), grad[dim],
              call.operand_shapes[0][dim]);
}

// Dimension args[dim_arg] of the operand (whole: 0) or of the result (1) is not there on the other
// side.
Signature selected(const Graph& graph, const Node& node, int whole, size_t dim_arg) {
  Builder b(graph, node);
  b.linear({0});
  const CheckedShape shape = whole == 0 ? b.in(0) : b.out(0);
  const size_t dim = wrap_dim(int_arg(node, dim_arg), shape.size());
  for (size_t d = 0; d < shape.size(); ++d) {
    if (d == dim) continue;
    const int l = b.label(shape[d]), at = static_cast<int>(d), beside = d < dim ? at : at - 1;
    b.operand(0, whole == 0 ? at : beside, {l});
    b.result(0, whole == 0 ? beside : at, {l});
  }
  return b.take();
}

Signature select(const Graph& graph, const Node& node) { return selected(graph, node, 0, 1); }

Signature select_backward(const Graph& graph, const Node& node) {
  return selected(graph, node, 1, 2);
}

Signature unsqueeze(const Graph& graph, const Node& node) {
  auto order = identity(rank_of(graph, node));
  order.insert(order.begin() + wrap_dim(int_arg(node, 1), order.size() + 1), -1);
  return permuted(graph, node, order);
}

// squeeze.dim(d): the result keeps dimension d unless its size is 1. (Without `d` it would depend
// on the sizes of a piece.)
Signature squeeze(const Graph& graph, const Node& node) {
  const Shape& in = operand_spec(graph, node, 0).shape;
  auto order = identity(in.size());
  const size_t dim = wrap_dim(int_arg(node, 1), in.size());
  if (dim < in.size() && in[dim] == 1) order.erase(order.begin() + static_cast<int64_t>(dim));
  return permuted(graph, node, order);
}

// split.Tensor(x, size, dim), split_with_sizes(x, sizes, dim), unbind.int(x, dim)
Signature split(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  b.linear({0});
  size_t dim = wrap_dim(int_arg(node, 2), b.in(0).size());
  int64_t length = b.has_result(0) ? b.out(0)[dim] : 0;
  bool equal = true;
  for (int r = 0; r < b.results(); ++r) equal = equal && b.has_result(r) && b.out(r)[dim] == length;
  Block block = block_labels(&b, b.in(0)[dim], length, equal);
  b.operand(0, static_cast<int>(dim), {block.outer, block.inner});
  for (size_t d = 0; d < b.in(0).size(); ++d) {
    int l = d == dim ? block.inner : b.label(b.in(0)[d]);
    if (d != dim) b.operand(0, static_cast<int>(d), {l});
    for (int r = 0; r < b.results(); ++r) b.result(r, static_cast<int>(d), {l});
  }
  return b.take();
}

void localize_split(const LocalCall& call, std::vector<Arg>* args) {
  size_t dim = wrap_dim(int_arg(call.node, 2), call.operand_shapes[0].size());
  if (std::holds_alternative<int64_t>(args->at(1))) {
    // A piece of no elements cannot be given as a size; the executor never calls an op on an empty
    // operand.
    args->at(1) = call.result_shapes[0][dim];
  } else {
    std::vector<int64_t> sizes;
    for (const Shape& shape : call.result_shapes) sizes.push_back(shape[dim]);
    args->at(1) = sizes;
  }
}

// unfold(x, dim, size, step), whose windows come as a last dimension, and
// unfold_backward(dy, input_sizes, dim, size, step): the other dimensions.
Signature unfold(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  b.linear({0});
  const bool backward = node.op == "aten::unfold_backward";
  const size_t rank = (backward ? b.out(0) : b.in(0)).size(),
               dim = wrap_dim(int_arg(node, backward ? 2 : 1), rank);
  for (size_t d = 0; d < rank; ++d) {
    if (d == dim) continue;
    const int l = b.label(b.in(0)[d]);
    b.operand(0, static_cast<int>(d), {l});
    b.result(0, static_cast<int>(d), {l});
  }
  return b.take();
}

Signature unbind(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  b.linear({0});
  size_t dim = wrap_dim(int_arg(node, 1), b.in(0).size());
  for (size_t d = 0; d < b.in(0).size(); ++d) {
    if (d == dim) continue;
    int l = b.label(b.in(0)[d]);
    b.operand(0, static_cast<int>(d), {l});
    for (int r = 0; r < b.results(); ++r) b.result(r, static_cast<int>(d < dim ? d : d - 1), {l});
  }
  return b.take();
}

// cat(tensors, dim); stack(tensors, dim) joins along a new dimension. A cat leaves out vectors without a number, whatever the
// shape of the others.
Signature join(const Graph& graph, const Node& node, bool stacked) {
  Builder b(graph, node);
  std::vector<int> all;
  for (int i = 0; i < b.operands(); ++i)
    if (stacked || b.out(0).size() == 1 || b.in(i).plain() != Shape{0}) all.push_back(i);
  b.linear(all);
  if (all.empty()) return b.take();
  size_t rank = b.out(0).size(), dim = wrap_dim(int_arg(node, 1), rank);
  bool equal = true;
  for (int i : all) equal = equal && b.in(i) == b.in(all[0]);
  if (!equal && stacked) return b.take();
  for (size_t d = 0; d < rank; ++d) {
    if (d == dim && stacked) continue;
    size_t from = stacked && d > dim ? d - 1 : d;
    if (d == dim) {
      Block block = block_labels(&b, b.out(0)[d], b.in(all[0])[from], equal);
      b.result(0, static_cast<int>(d), {block.outer, block.inner});
      for (int i : all) b.operand(i, static_cast<int>(from), {block.inner});
      continue;
    }
    int l = b.label(b.out(0)[d]);
    b.result(0, static_cast<int>(d), {l});
    for (int i : all)
      if (b.in(i).size() > from) b.operand(i, static_cast<int>(from), {l});
  }
  return b.take();
}
Signature cat(const Graph& graph, const Node& node) { return join(graph, node, false); }
Signature stack(const Graph& graph, const Node& node) { return join(graph, node, true); }

// slice_scatter(x, y, dim, start, end, step) and select_scatter(x, y, dim, index): y in the place
// of a part of x; dimension `dim` is whole.
Signature scatter_view(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  b.linear({0, 1});
  const size_t rank = b.in(0).size(), dim = wrap_dim(int_arg(node, 2), rank);
  const bool slices = b.in(1).size() == rank;
  for (size_t d = 0; d < rank; ++d) {
    if (d == dim) continue;
    int l = b.label(b.in(0)[d]);
    b.operand(0, static_cast<int>(d), {l});
    b.operand(1, static_cast<int>(slices || d < dim ? d : d - 1), {l});
    b.result(0, static_cast<int>(d), {l});
  }
  return b.take();
}

// repeat(x, times): a dimension of the result is how often it occurs, and within that the operand's.
Signature repeat(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  b.linear({0});
  const std::vector<int64_t> times = ints_arg(node, 1);
  const int rank = static_cast<int>(b.out(0).size()),
            added = rank - static_cast<int>(b.in(0).size());
  if (static_cast<int>(times.size()) != rank) return b.take();
  for (int d = 0; d < rank; ++d) {
    const int64_t size = d < added ? 1 : b.in(0)[static_cast<size_t>(d - added)];
    std::vector<int> labels;
    if (const int64_t often = times[static_cast<size_t>(d)]; often > 1)
      labels.push_back(b.label(often));
    if (size > 1) {
      labels.push_back(b.label(size));
      b.operand(0, d - added, {labels.back()});
    }
    b.result_list(0, d, labels);
  }
  return b.take();
}

void localize_repeat(const LocalCall& call, std::vector<Arg>* args) {
  std::vector<int64_t> times = ints_arg(call.node, 1);
  const Shape& in = call.operand_shapes[0];
  const size_t added = times.size() - in.size();
  for (size_t d = 0; d < times.size(); ++d)
    times[d] = call.result_shapes[0][d] / (d < added ? 1 : std::max<int64_t>(1, in[d - added]));
  args->at(1) = times;
}

// roll(x, shifts, dims): the other dimensions.
Signature roll(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  b.linear({0});
  const size_t rank = b.in(0).size();
  std::vector<bool> rolled(rank, ints_arg(node, 2).empty());
  for (int64_t d : ints_arg(node, 2)) rolled[static_cast<size_t>(wrap_dim(d, rank))] = true;
  for (size_t d = 0; d < rank; ++d) {
    if (rolled[d]) continue;
    int l = b.label(b.in(0)[d]);
    b.operand(0, static_cast<int>(d), {l});
    b.result(0, static_cast<int>(d), {l});
  }
  return b.take();
}

// constant_pad_nd(x, [before, after of the last dimension, of the one before it, ...], value): the
// dimensions that are not padded.
Signature pad(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  if (real_arg(node, 2) == 0) b.linear({0});
  const std::vector<int64_t> sizes = ints_arg(node, 1);
  const size_t rank = b.in(0).size();
  for (size_t d = 0; d < rank; ++d) {
    const size_t at = 2 * (rank - 1 - d);
    if (at + 1 < sizes.size() && (sizes[at] != 0 || sizes[at + 1] != 0)) continue;
    int l = b.label(b.in(0)[d]);
    b.operand(0, static_cast<int>(d), {l});
    b.result(0, static_cast<int>(d), {l});
  }
  return b.take();
}

// tril and triu look at the last two dimensions.
Signature triangle(const Graph& graph, const Node& node) {
  Builder b(graph, node);
  b.linear({0});
  for (int d = 0; d + 2 < static_cast<int>(b.in(0).size()); ++d) {
    int l = b.label(b.in(0)[d]);
    b.operand(0, d, {l});
    b.result(0, d, {l});
  }
  return b.take();
}

double no_flops(const Graph&, const Node&) { return 0; }

OpDef alias(const char* name, Signature (*signature)(const Graph&, const Node&), int size_arg = -1,
            void (*localize)(const LocalCall&, std::vector<Arg>*) = nullptr) {
  OpDef op{name};
  op.signature = signature;
  op.flops = no_flops;
  op.alias = true;
  op.size_arg = size_arg;
  op.localize = localize;
  return op;
}

OpDef copy(const char* name, Signature (*signature)(const Graph&, const Node&), int size_arg = -1,
           void (*localize)(const LocalCall&, std::vector<Arg>*) = nullptr) {
  OpDef op = alias(name, signature, size_arg, localize);
  op.alias = false;
  return op;
}

}  // namespace

const std::vector<OpDef>& view_ops() {
  static const std::vector<OpDef> table = {
      alias("aten::_unsafe_view", reshape, 1),
      alias("aten::alias", same),
      copy("aten::cat", cat),
      copy("aten::constant_pad_nd", pad),
      alias("aten::detach", same),
      alias("aten::expand", expand, 1),
      alias("aten::permute", permute),
      copy("aten::repeat", repeat, -1, localize_repeat),
      alias("aten::reshape", reshape, 1),
      copy("aten::roll", roll),
      alias("aten::select.int", select),
      copy("aten::select_backward", select_backward, 1),
      copy("aten::select_scatter", scatter_view),
      alias("aten::slice.Tensor", slice, -1, localize_slice),
      copy("aten::slice_backward", slice_backward, -1, localize_slice_backward),
      copy("aten::slice_scatter", scatter_view),
      alias("aten::split.Tensor", split, -1, localize_split),
      alias("aten::split_with_sizes", split, -1, localize_split),
      alias("aten::squeeze.dim", squeeze),
      copy("aten::stack", stack),
      alias("aten::t", t),
      alias("aten::transpose.int", transpose),
      copy("aten::tril", triangle),
      copy("aten::triu", triangle),
      alias("aten::unbind.int", unbind),
      alias("aten::unfold", unfold),
      copy("aten::unfold_backward", unfold, 1),
      copy("aten::unsafe_split.Tensor", split, -1, localize_split),
      copy("aten::unsafe_split_with_sizes", split, -1, localize_split),
      alias("aten::unsqueeze", unsqueeze),
      alias("aten::view", reshape, 1),
  };
  return table;
}

}  // namespace motley::ops
