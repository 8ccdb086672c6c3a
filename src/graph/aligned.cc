#include "graph/aligned.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "graph/ops/builder.h"
#include "graph/rewrite.h"

namespace motley {

namespace {

class AlignedRewriter : Rewriting {
 public:
  explicit AlignedRewriter(const Graph& from) : Rewriting(from) {}

  Graph run() {
    for (const Node& node : from_.nodes)
      if (!rewrite(node)) add(node, arguments(node), results(node));
    return finish();
  }

 private:
  const Node& producer(ValueId v) const { return from_.node(from_.value(v).producer); }

  // Whether it is 0, 1, .., n - 1 along its first dimension, all others being 1.
  bool counts(ValueId v, int64_t n) const {
    Shape shape(from_.spec(v).shape.size(), 1);
    if (shape.empty()) return false;
    shape[0] = n;
    while (true) {
      if (from_.spec(v).numel() != n) return false;
      const Node& node = producer(v);
      if (node.op == "aten::arange")
        return shape == from_.spec(v).shape && ops::int_arg(node, 0) == n;
      if (node.op != "aten::view" && node.op != "aten::unsqueeze") return false;
      if (from_.spec(v).shape != shape) return false;
      v = std::get<ValueId>(node.args[0]);
      shape.assign(from_.spec(v).shape.size(), 1);
      if (shape.empty()) return false;
      shape[0] = n;
    }
  }

  // i[n ..] of an index [0 1 .., i] into the first two dimensions of x, which broadcasts to i's shape.
  std::optional<ValueId> of_each(const Node& node) const {
    const auto* list =
        node.args.size() > 1 ? std::get_if<std::vector<ValueId>>(&node.args[1]) : nullptr;
    const auto* x = node.args.empty() ? nullptr : std::get_if<ValueId>(&node.args[0]);
    if (list == nullptr || list->size() != 2 || x == nullptr || !(*list)[0].valid() ||
        !(*list)[1].valid())
      return {};
    const Shape& shape = from_.spec(*x).shape;
    const TensorSpec& index = from_.spec((*list)[1]);
    if (shape.size() < 2 || shape[0] < 2 || index.dtype != DType::i64 || index.shape.empty() ||
        index.shape[0] != shape[0] || from_.spec((*list)[0]).shape.size() != index.shape.size() ||
        !counts((*list)[0], shape[0]))
      return {};
    return (*list)[1];
  }

  // The index of gather for i, [n, numbers of each sample, the other dimensions of x].
  ValueId gathered(ValueId index, const Shape& x, Phase phase) {
    const TensorSpec spec = to_.spec(index);
    const ValueId below =
        emit("aten::lt.Scalar", {index, int64_t{0}}, {DType::b8, spec.shape}, phase);
    const ValueId from_end = emit("aten::add.Scalar", {index, x[1], int64_t{1}}, spec, phase);
    const ValueId from_start = emit("aten::where.self", {below, from_end, index}, spec, phase);
    Shape shape(x.size(), 1);
    shape[0] = x[0];
    shape[1] = spec.numel() / x[0];
    const ValueId seen = emit("aten::view", {from_start, shape}, {spec.dtype, shape}, phase);
    std::copy(x.begin() + 2, x.end(), shape.begin() + 2);
    return emit("aten::expand", {seen, shape, false}, {spec.dtype, shape}, phase);
  }

  bool rewrite(const Node& node) {
    const bool takes = node.op == "aten::index.Tensor", puts = node.op == "aten::index_put";
    if (!takes && !(puts && ops::bool_arg(node, 3))) return false;
    const auto each = of_each(node);
    if (!each) return false;
    const ValueId x = std::get<ValueId>(node.args[0]), out = node.outputs[0];
    const Shape& shape = from_.spec(x).shape;
    if (puts) {  // what is added has a number for each place
      const ValueId values = std::get<ValueId>(node.args[2]);
      Shape all = from_.spec(*each).shape;
      all.insert(all.end(), shape.begin() + 2, shape.end());
      if (from_.spec(values).shape != all) return false;
    }
    const ValueId index = gathered(value_[each->index], shape, node.phase);
    const DType type = from_.spec(x).dtype;
    const Shape flat = to_.spec(index).shape;
    if (takes) {
      const ValueId y = emit("aten::gather", {value_[x.index], int64_t{1}, index, false},
                             {type, flat}, node.phase);
      const TensorSpec& spec = from_.spec(out);
      value_[out.index] = emit("aten::view", {y, spec.shape}, spec, node.phase);
      return true;
    }
    const ValueId values = value_[std::get<ValueId>(node.args[2]).index];
    const ValueId y =
        emit("aten::view", {values, flat}, {to_.spec(values).dtype, flat}, node.phase);
    value_[out.index] = emit("aten::scatter_add", {value_[x.index], int64_t{1}, index, y},
                             from_.spec(out), node.phase);
    return true;
  }
};

}  // namespace

std::optional<Graph> aligned(const Graph& graph) {
  const auto takes_or_puts = [](const Node& node) {
    return node.op == "aten::index.Tensor" || node.op == "aten::index_put";
  };
  if (std::none_of(graph.nodes.begin(), graph.nodes.end(), takes_or_puts)) return std::nullopt;
  return AlignedRewriter(graph).run();
}

}  // namespace motley
