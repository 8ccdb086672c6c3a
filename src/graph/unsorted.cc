#include "graph/unsorted.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "graph/op.h"
#include "graph/ops/builder.h"
#include "graph/rewrite.h"

namespace motley {

namespace {

enum class Kind : uint8_t {
  rows,     // in sorted order along a dimension
  keys,     // and these are what was sorted
  places,   // and these say where a row stood
  blocks,   // and these say in which block of `block` rows it stood
  inverse,  // not in sorted order: where a row stands now
};

// How a value depends on the order of a sort.
struct State {
  uint32_t sort = 0;  // the node
  Kind kind = Kind::rows;
  int dim = 0;  // that is in sorted order
  int64_t block = 1;
};

// What becomes of a node where everything stands in its first order.
enum class Action : uint8_t {
  copy,      // the same
  first,     // its first operand
  third,     // its third
  numbers,   // 0, 1, 2, ...
  sort,      // the keys, and these numbers
  take,      // every row of its first operand, a number of times
  add_back,  // the first operand and the sum of every so many rows
  product,   // rows_mm
  outer,     // rows_outer
};

struct Step {
  Action action = Action::copy;
  uint32_t sort = 0;
  int64_t number = 1;  // of rows of a block; of experts
};

// Whether a value is zero by its node.
bool is_zero(const Graph& graph, ValueId v) {
  const Node& node = graph.node(graph.value(v).producer);
  return node.op == "aten::zeros" || node.op == "aten::zeros_like" ||
         node.op == "aten::new_zeros" ||
         (node.op == "aten::full" && ops::real_arg(node, 1, 1) == 0);
}

bool is_sort(const Node& node) { return node.op == "aten::sort" || node.op == "aten::sort.stable"; }

// Follows the order of sorts through a graph.
class Orders {
 public:
  Orders(const Graph& graph, const std::set<uint32_t>& left)
      : graph_(graph), left_(left), states_(graph.values.size()), steps_(graph.nodes.size()) {}

  // A sort whose order somebody sees; nothing: there is none, and steps() are right.
  std::optional<uint32_t> seen() {
    for (uint32_t n = 0; n < graph_.nodes.size(); ++n)
      if (const auto sort = follow(n)) return sort;
    auto check = [&](ValueId v) {
      return v.valid() && states_[v.index] ? std::optional(states_[v.index]->sort) : std::nullopt;
    };
    for (const Parameter& p : graph_.parameters)
      if (const auto sort = check(p.gradient)) return sort;
    for (const Buffer& b : graph_.buffers)
      if (const auto sort = check(b.update)) return sort;
    for (ValueId v : graph_.outputs)
      if (const auto sort = check(v)) return sort;
    return check(graph_.loss);
  }
  const std::vector<Step>& steps() const { return steps_; }
  bool any() const { return any_; }

 private:
  const Shape& shape(ValueId v) const { return graph_.spec(v).shape; }
  const std::optional<State>& state(ValueId v) const { return states_[v.index]; }
  bool is(ValueId v, Kind kind) const { return state(v) && state(v)->kind == kind; }
  // Says which row a row was, or was of.
  bool is_index(ValueId v) const { return is(v, Kind::places) || is(v, Kind::blocks); }
  const Node& producer(ValueId v) const { return graph_.node(graph_.value(v).producer); }
  int64_t rows_of(uint32_t sort) const {
    return shape(std::get<ValueId>(graph_.nodes[sort].args[0]))[0];
  }
  static ValueId tensor(const Node& node, size_t at) {
    const auto* v = at < node.args.size() ? std::get_if<ValueId>(&node.args[at]) : nullptr;
    return v != nullptr ? *v : ValueId();
  }
  // The only index of index.Tensor and index_put, of dimension 0.
  static ValueId index_of(const Node& node) {
    const auto* list =
        node.args.size() > 1 ? std::get_if<std::vector<ValueId>>(&node.args[1]) : nullptr;
    return list != nullptr && list->size() == 1 ? (*list)[0] : ValueId();
  }
  void set(ValueId v, State state) {
    if (v.valid()) states_[v.index] = state;
  }
  void act(uint32_t n, Action action, uint32_t sort, int64_t number = 1) {
    steps_[n] = {action, sort, number};
  }

  // The sort whose order this node shows, if it does.
  std::optional<uint32_t> follow(uint32_t n) {
    const Node& node = graph_.nodes[n];
    std::optional<uint32_t> sort;
    for (ValueId v : graph_.inputs_of(node)) {
      if (!state(v)) continue;
      if (sort && *sort != state(v)->sort) return sort;
      sort = state(v)->sort;
    }
    if (!sort) {
      begin(n);
      return {};
    }
    if (inverts(n, *sort) || moves(n, *sort) || multiplies(n, *sort) || counts(node)) return {};
    return row_by_row(n, *sort) ? std::nullopt : sort;
  }

  void begin(uint32_t n) {
    const Node& node = graph_.nodes[n];
    if (!is_sort(node) || left_.contains(n) || node.args.empty()) return;
    const ValueId keys = tensor(node, 0);
    if (!keys.valid() || shape(keys).size() != 1 || shape(keys)[0] < 2) return;
    any_ = true;
    set(node.outputs[0], {n, Kind::keys});
    if (node.outputs.size() > 1) set(node.outputs[1], {n, Kind::places});
    act(n, Action::sort, n);
  }

  // The inverse of the permutation: index_put(_, [places], 0 1 2 ...), or its sort.
  bool inverts(uint32_t n, uint32_t sort) {
    const Node& node = graph_.nodes[n];
    if (is_sort(node) && is(tensor(node, 0), Kind::places) && node.outputs.size() > 1) {
      if (ops::bool_arg(node, node.op == "aten::sort" ? 2 : 3)) return false;
      set(node.outputs[1], {sort, Kind::inverse});  // the other output is 0, 1, 2, ...
      act(n, Action::numbers, sort);
      return true;
    }
    if (node.op != "aten::index_put" || ops::bool_arg(node, 3)) return false;
    const ValueId index = index_of(node), values = tensor(node, 2);
    if (!index.valid() || !is(index, Kind::places) || !values.valid() || state(values) ||
        shape(node.outputs[0]) != Shape{rows_of(sort)})
      return false;
    const Node& numbers = producer(values);
    if (numbers.op != "aten::arange" || ops::int_arg(numbers, 0) != rows_of(sort)) return false;
    set(node.outputs[0], {sort, Kind::inverse});
    act(n, Action::numbers, sort);
    return true;
  }

  // Rows that are taken in sorted order, and put back.
  bool moves(uint32_t n, uint32_t sort) {
    const Node& node = graph_.nodes[n];
    const bool takes = node.op == "aten::index.Tensor", puts = node.op == "aten::index_put";
    const bool gathers = node.op == "aten::gather", adds = node.op == "aten::scatter_add";
    const bool selects = node.op == "aten::index_select";
    if (!takes && !puts && !gathers && !adds && !selects) return false;
    const ValueId x = tensor(node, 0), index = takes || puts ? index_of(node) : tensor(node, 2);
    if (!index.valid() || !x.valid()) return false;
    const ValueId out = node.outputs[0];
    if (takes || selects) {
      if (selects && ops::int_arg(node, 1) != 0) return false;
      if (is(index, Kind::inverse) && state(x) && state(x)->kind != Kind::inverse &&
          state(x)->dim == 0 && shape(index).size() == 1 && shape(x)[0] == rows_of(sort)) {
        act(n, Action::first, sort);
        return true;
      }
      if (!state(x) && is_index(index) && shape(index).size() == 1)
        return take(n, sort, x, *state(index), out);
      return false;
    }
    if (gathers) {
      if (state(x) || !is_index(index) || ops::int_arg(node, 1) != 0 || !same_rows(index, x))
        return false;
      return take(n, sort, x, *state(index), out);
    }
    const ValueId rows = puts ? tensor(node, 2) : tensor(node, 3);
    if (state(x) || !rows.valid()) return false;
    if (puts && is(index, Kind::inverse)) {  // the gradient of y'[inverse]
      if (state(rows) || shape(rows) != shape(x) || shape(x)[0] != rows_of(sort) ||
          (ops::bool_arg(node, 3) && !is_zero(graph_, x)))
        return false;
      set(out, {sort});
      act(n, Action::third, sort);
      return true;
    }
    if ((puts && (!ops::bool_arg(node, 3) || shape(index).size() != 1)) ||
        (adds && (ops::int_arg(node, 1) != 0 || !same_rows(index, x))))
      return false;
    if (!is_index(index) || !is_row(rows) || shape(rows)[0] != rows_of(sort)) return false;
    const int64_t block = state(index)->block;
    Shape all = shape(x);
    if (all.empty() || all[0] * block != rows_of(sort)) return false;
    all[0] = rows_of(sort);
    if (shape(rows) != all) return false;
    act(n, Action::add_back, sort, block);
    return true;
  }
  bool is_row(ValueId v) const {
    return state(v) && state(v)->kind != Kind::inverse && state(v)->dim == 0;
  }
  // Whether an index names whole rows of x, by their first dimension.
  bool same_rows(ValueId index, ValueId x) const {
    return !shape(x).empty() && shape(index).size() == shape(x).size() &&
           std::equal(shape(x).begin() + 1, shape(x).end(), shape(index).begin() + 1);
  }
  bool take(uint32_t n, uint32_t sort, ValueId x, const State& index, ValueId out) {
    if (shape(x).empty() || shape(x)[0] * index.block != rows_of(sort)) return false;
    const bool keys = x == tensor(graph_.nodes[sort], 0) && index.kind == Kind::places;
    set(out, {sort, keys ? Kind::keys : Kind::rows});
    act(n, Action::take, sort, index.block);
    return true;
  }

  // How many keys there are of each does not depend on their order.
  bool counts(const Node& node) const {
    return node.op == "aten::histc" || node.op == "aten::bincount";
  }
  // For how many experts these are the ends of their rows; 0: they are something else.
  int64_t ends_of(ValueId offsets, uint32_t sort) const {
    const Node& sum = producer(stripped(offsets));
    if (sum.op != "aten::cumsum" || !tensor(sum, 0).valid()) return 0;
    const Node& count = producer(stripped(tensor(sum, 0)));
    if (count.op != "aten::histc" || !tensor(count, 0).valid()) return 0;
    const int64_t experts = ops::int_arg(count, 1);
    const double most = ops::real_arg(count, 3);
    if (ops::real_arg(count, 2) != 0 ||
        (most != static_cast<double>(experts) && most != static_cast<double>(experts - 1)))
      return 0;
    const ValueId counted = tensor(count, 0), keys = tensor(graph_.nodes[sort], 0);
    const bool sorted = is(counted, Kind::keys) && state(counted)->sort == sort;
    const bool same = graph_.spec(counted).numel() == graph_.spec(keys).numel() &&
                      stripped(counted) == stripped(keys);
    return sorted || same ? experts : 0;
  }
  // What a value was before conversions and views.
  ValueId stripped(ValueId v) const {
    while (true) {
      const Node& node = producer(v);
      const bool same = node.op == "aten::_to_copy" || node.op == "aten::view" ||
                        node.op == "aten::reshape" || node.op == "aten::clone";
      if (!same || !tensor(node, 0).valid()) return v;
      v = tensor(node, 0);
    }
  }
  bool multiplies(uint32_t n, uint32_t sort) {
    const Node& node = graph_.nodes[n];
    if (node.op != "aten::_grouped_mm") return false;
    const ValueId a = tensor(node, 0), b = tensor(node, 1), offsets = tensor(node, 2);
    for (size_t at = 3; at < node.args.size(); ++at)
      if (!std::holds_alternative<std::monostate>(node.args[at])) return false;
    if (!a.valid() || !b.valid() || !offsets.valid() || shape(a).size() != 2 ||
        is(a, Kind::inverse) || is(b, Kind::inverse))
      return false;
    const int64_t experts = ends_of(offsets, sort), rows = rows_of(sort);
    if (experts == 0) return false;
    if (state(a) && state(a)->dim == 0 && shape(a)[0] == rows && !state(b) &&
        shape(b).size() == 3 && shape(b)[0] == experts) {
      set(node.outputs[0], {sort});
      act(n, Action::product, sort, experts);
      return true;
    }
    if (state(a) && state(a)->dim == 1 && shape(a)[1] == rows && is_row(b) &&
        shape(b).size() == 2 && shape(b)[0] == rows) {
      act(n, Action::outer, sort, experts);
      return true;
    }
    return false;
  }

  // Whether all rows along a dimension are the same, in whatever order.
  bool is_alike(ValueId v, size_t d) const {
    const Node& node = producer(v);
    if (node.op == "aten::full" || is_zero(graph_, v) || node.op == "aten::ones") return true;
    if (node.op != "aten::expand") return false;
    const Shape& from = shape(tensor(node, 0));
    const size_t added = shape(v).size() - from.size();
    return d < added || from[d - added] == 1;
  }

  // What the labels say: rows in their order make rows in their order, or a sum over all of them.
  bool row_by_row(uint32_t n, uint32_t sort) {
    const Node& node = graph_.nodes[n];
    const OpDef* op = find_op(node.op);
    if (op == nullptr || op->signature == nullptr || op->random) return false;
    const ValueList inputs = graph_.inputs_of(node);
    const Signature signature = op->signature(graph_, node);
    int label = -1;
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (!state(inputs[i])) continue;
      if (is(inputs[i], Kind::inverse)) return false;
      const auto& dims = signature.operands[i].dims;
      const auto d = static_cast<size_t>(state(inputs[i])->dim);
      if (d >= dims.size() || dims[d].size() != 1) return false;
      if (label >= 0 && dims[d][0] != label) return false;
      label = dims[d][0];
    }
    auto carries = [&](const std::vector<int>& labels) {
      return std::find(labels.begin(), labels.end(), label) != labels.end();
    };
    for (size_t i = 0; i < inputs.size(); ++i)
      for (size_t d = 0; d < signature.operands[i].dims.size(); ++d)
        if (carries(signature.operands[i].dims[d]) &&
            (state(inputs[i]) ? static_cast<size_t>(state(inputs[i])->dim) != d
                              : !is_alike(inputs[i], d)))
          return false;
    const Label& of = signature.labels[static_cast<size_t>(label)];
    if (of.kind == LabelKind::blocked || of.ignored_by != 0) return false;
    for (size_t r = 0; r < node.outputs.size(); ++r) {
      if (!node.outputs[r].valid()) continue;
      std::optional<int> at;
      const auto& dims = signature.results[r].dims;
      for (size_t d = 0; d < dims.size(); ++d) {
        if (!carries(dims[d])) continue;
        if (at || dims[d].size() != 1) return false;
        at = static_cast<int>(d);
      }
      if (at)
        set(node.outputs[r], named(node, {sort, Kind::rows, *at}));
      else if (of.kind != LabelKind::reduction)
        return false;
    }
    return true;
  }
  // What is known of integers that say where rows stood stays known.
  State named(const Node& node, State made) const {
    const ValueId from = tensor(node, 0);
    if (!from.valid() || !state(from) || state(from)->kind == Kind::rows || made.dim != 0 ||
        graph_.spec(node.outputs[0]).dtype != DType::i64)
      return node.op == "aten::_to_copy" && from.valid() && is(from, Kind::keys)
                 ? State{made.sort, Kind::keys}
                 : made;
    const State& before = *state(from);
    if (before.kind == Kind::places && shape(from).size() == 1 &&
        (node.op == "aten::floor_divide" || node.op == "aten::div.Tensor_mode") &&
        node.args.size() > 1 && std::holds_alternative<int64_t>(node.args[1])) {
      const int64_t block = std::get<int64_t>(node.args[1]);
      const bool whole = block > 0 && rows_of(made.sort) % block == 0;
      const auto* mode = node.args.size() > 2 ? std::get_if<std::string>(&node.args[2]) : nullptr;
      const bool rounds = node.op == "aten::floor_divide" || mode != nullptr;
      return whole && rounds ? State{made.sort, Kind::blocks, 0, block} : made;
    }
    const bool same = node.op == "aten::view" || node.op == "aten::expand" ||
                      node.op == "aten::unsqueeze" || node.op == "aten::clone" ||
                      node.op == "aten::_to_copy" || node.op == "aten::reshape";
    return same ? State{made.sort, before.kind, 0, before.block} : made;
  }

  const Graph& graph_;
  const std::set<uint32_t>& left_;
  std::vector<std::optional<State>> states_;
  std::vector<Step> steps_;
  bool any_ = false;
};

class UnsortedRewriter : Rewriting {
 public:
  explicit UnsortedRewriter(const Graph& from) : Rewriting(from) {}

  Graph run(const std::vector<Step>& steps) {
    for (size_t n = 0; n < from_.nodes.size(); ++n) rewrite(from_.nodes[n], steps[n]);
    return finish();
  }

 private:
  ValueId numbers(int64_t count, Phase phase) {
    return emit("aten::arange", {count, DType::i64, {}, {}, {}}, {DType::i64, {count}}, phase);
  }
  // What was sorted, as integers.
  ValueId keys(uint32_t sort) {
    const ValueId v = value_[std::get<ValueId>(from_.nodes[sort].args[0]).index];
    if (to_.spec(v).dtype == DType::i64) return v;
    return emit("aten::_to_copy", {v, DType::i64, {}, {}, {}, false, {}},
                {DType::i64, to_.spec(v).shape}, Phase::forward);
  }
  ValueId viewed(ValueId x, Shape shape, Phase phase) {
    const DType type = to_.spec(x).dtype;
    return emit("aten::view", {x, shape}, {type, shape}, phase);
  }

  // Every row `times` times.
  ValueId repeated(ValueId x, int64_t times, Phase phase) {
    if (times == 1) return x;
    Shape shape = to_.spec(x).shape, all = shape;
    shape.insert(shape.begin() + 1, 1);
    const ValueId apart = viewed(x, shape, phase);
    shape[1] = times;
    const ValueId each =
        emit("aten::expand", {apart, shape, false}, {to_.spec(x).dtype, shape}, phase);
    const ValueId copied = emit("aten::clone", {each, {}}, {to_.spec(x).dtype, shape}, phase);
    all[0] *= times;
    return viewed(copied, all, phase);
  }
  // x and the sums of `times` rows each.
  ValueId summed(ValueId x, ValueId rows, int64_t times, Phase phase) {
    const TensorSpec& spec = to_.spec(x);
    ValueId sum = rows;
    if (times > 1) {
      Shape shape = spec.shape;
      shape.insert(shape.begin() + 1, times);
      sum = emit("aten::sum.dim_IntList", {viewed(rows, shape, phase), Shape{1}, false, {}}, spec,
                 phase);
    }
    return is_zero(to_, x) ? sum : emit("aten::add.Tensor", {x, sum, int64_t{1}}, spec, phase);
  }
  ValueId transposed(ValueId a, Phase phase) {
    const Node& node = to_.node(to_.value(a).producer);
    if (node.op == "aten::t" || node.op == "aten::transpose.int")
      return std::get<ValueId>(node.args[0]);
    const TensorSpec spec{to_.spec(a).dtype, {to_.spec(a).shape[1], to_.spec(a).shape[0]}};
    return emit("aten::transpose.int", {a, int64_t{0}, int64_t{1}}, spec, phase);
  }

  void rewrite(const Node& node, const Step& step) {
    std::vector<Arg> args = arguments(node);
    auto tensor = [&](size_t at) { return std::get<ValueId>(args[at]); };
    auto becomes = [&](size_t o, ValueId v) {
      if (o < node.outputs.size() && node.outputs[o].valid()) value_[node.outputs[o].index] = v;
    };
    const int64_t rows =
        step.action == Action::copy
            ? 0
            : from_.spec(std::get<ValueId>(from_.nodes[step.sort].args[0])).shape[0];
    switch (step.action) {
      case Action::copy:
        return add(node, std::move(args), results(node));
      case Action::first:
        return becomes(0, tensor(0));
      case Action::third:
        return becomes(0, tensor(2));
      case Action::numbers: {
        const ValueId all = numbers(rows, node.phase);
        becomes(0, all);
        return becomes(1, all);
      }
      case Action::sort:
        becomes(0, tensor(0));
        return becomes(1, numbers(rows, node.phase));
      case Action::take:
        return becomes(0, repeated(tensor(0), step.number, node.phase));
      case Action::add_back: {
        const ValueId put = tensor(node.op == "aten::index_put" ? 2 : 3);
        return becomes(0, summed(tensor(0), put, step.number, node.phase));
      }
      case Action::product:
        return becomes(0, emit("motley_torch::rows_mm", {tensor(0), tensor(1), keys(step.sort)},
                               results(node)[0], node.phase));
      case Action::outer: {
        const ValueId a = tensor(0);
        const TensorSpec turned{to_.spec(a).dtype, {to_.spec(a).shape[1], to_.spec(a).shape[0]}};
        const ValueId left =
            emit("aten::transpose.int", {a, int64_t{0}, int64_t{1}}, turned, node.phase);
        return becomes(
            0, emit("motley_torch::rows_outer", {left, tensor(1), keys(step.sort), step.number},
                    results(node)[0], node.phase));
      }
    }
  }
};

}  // namespace

std::optional<Graph> unsorted(const Graph& graph) {
  std::set<uint32_t> left;
  while (true) {
    Orders orders(graph, left);
    const auto seen = orders.seen();
    if (seen)
      left.insert(*seen);
    else if (orders.any())
      return UnsortedRewriter(graph).run(orders.steps());
    else
      return std::nullopt;
  }
}

}  // namespace motley
