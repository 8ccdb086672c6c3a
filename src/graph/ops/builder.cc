#include "graph/ops/builder.h"

#include <algorithm>

#include "core/error.h"

namespace motley::ops {

void bad_call(const Node& node, const std::string& why) {
  throw user_error("graph", "{} cannot be called like this: {}; capture the model again", node.op,
                   why);
}

const TensorSpec& operand_spec(const Graph& graph, const Node& node, size_t i) {
  // Without Graph::inputs_of, which would make a list for every operand that is looked at.
  size_t operands = 0;
  for (const Arg& arg : node.args) {
    if (const auto* one = std::get_if<ValueId>(&arg); one && one->valid() && operands++ == i)
      return graph.spec(*one);
    if (const auto* list = std::get_if<std::vector<ValueId>>(&arg))
      for (ValueId v : *list)
        if (v.valid() && operands++ == i) return graph.spec(v);
  }
  bad_call(node, fmt::format("it has {} tensor operands", operands));
}

const TensorSpec& result_spec(const Graph& graph, const Node& node, size_t o) {
  if (o >= node.outputs.size() || !node.outputs[o].valid())
    bad_call(node, fmt::format("it has no result {}", o));
  return graph.spec(node.outputs[o]);
}

Builder::Builder(const Graph& graph, const Node& node) : node_(node) {
  for (ValueId v : graph.inputs_of(node)) {
    in_.push_back(&graph.spec(v).shape);
    signature_.operands.push_back({std::vector<std::vector<int>>(in_.back()->size())});
  }
  for (ValueId v : node.outputs) {
    out_.push_back(v.valid() ? &graph.spec(v).shape : nullptr);
    signature_.results.push_back(
        {std::vector<std::vector<int>>(v.valid() ? out_.back()->size() : 0)});
  }
}

CheckedShape Builder::in(int i) const {
  if (i < 0 || i >= operands())
    bad_call(node_, fmt::format("it has {} tensor operands", operands()));
  return {node_, *in_[i]};
}

CheckedShape Builder::out(int r) const {
  if (r < 0 || !has_result(r)) bad_call(node_, fmt::format("it has no result {}", r));
  return {node_, *out_[r]};
}

int Builder::label(int64_t size, LabelKind kind) {
  if (size == 1) return -1;
  signature_.labels.push_back({size, kind, 0});
  return static_cast<int>(signature_.labels.size()) - 1;
}

namespace {

void put(TensorLabels* tensor, int d, std::initializer_list<int> labels) {
  if (d < 0) d += static_cast<int>(tensor->dims.size());
  if (d < 0 || d >= static_cast<int>(tensor->dims.size())) return;
  tensor->dims[d].clear();
  for (int l : labels)
    if (l >= 0) tensor->dims[d].push_back(l);
}

}  // namespace

void Builder::operand(int i, int d, std::initializer_list<int> labels) {
  if (i < 0) return;
  in(i);
  put(&signature_.operands[i], d, labels);
}

void Builder::operand_list(int i, int d, std::vector<int> labels) {
  in(i)[static_cast<size_t>(d)];
  signature_.operands[i].dims[d] = std::move(labels);
}

void Builder::result_list(int r, int d, std::vector<int> labels) {
  out(r)[static_cast<size_t>(d)];
  signature_.results[r].dims[d] = std::move(labels);
}

void Builder::result(int r, int d, std::initializer_list<int> labels) {
  if (has_result(r)) put(&signature_.results[r], d, labels);
}

std::vector<int> Builder::pointwise(int r, LabelKind kind) {
  std::vector<int> labels;
  const CheckedShape shape = out(r);
  for (size_t d = 0; d < shape.size(); ++d) {
    labels.push_back(label(shape[d], kind));
    result(r, static_cast<int>(d), {labels.back()});
  }
  for (int i = 0; i < operands(); ++i) broadcast_operand(i, labels, shape);
  return labels;
}

void Builder::broadcast_operand(int i, const std::vector<int>& labels, const CheckedShape& shape) {
  const CheckedShape operand_shape = in(i);
  int offset = static_cast<int>(shape.size()) - static_cast<int>(operand_shape.size());
  for (int d = 0; d < static_cast<int>(operand_shape.size()); ++d)
    if (d + offset >= 0 && operand_shape[d] == shape[d + offset])
      operand(i, d, {labels[d + offset]});
}

int64_t int_arg(const Node& node, size_t at, int64_t otherwise) {
  if (at >= node.args.size()) return otherwise;
  auto i = std::get_if<int64_t>(&node.args[at]);
  return i ? *i : otherwise;
}

bool bool_arg(const Node& node, size_t at, bool otherwise) {
  if (at >= node.args.size()) return otherwise;
  auto b = std::get_if<bool>(&node.args[at]);
  return b ? *b : otherwise;
}

double real_arg(const Node& node, size_t at, double otherwise) {
  if (at >= node.args.size()) return otherwise;
  if (auto d = std::get_if<double>(&node.args[at])) return *d;
  if (auto i = std::get_if<int64_t>(&node.args[at])) return static_cast<double>(*i);
  if (auto b = std::get_if<bool>(&node.args[at])) return *b ? 1 : 0;
  return otherwise;
}

std::vector<int64_t> ints_arg(const Node& node, size_t at) {
  if (at >= node.args.size()) return {};
  if (auto i = std::get_if<int64_t>(&node.args[at])) return {*i};
  auto l = std::get_if<std::vector<int64_t>>(&node.args[at]);
  return l ? *l : std::vector<int64_t>{};
}

bool is_tensor_arg(const Node& node, size_t at) {
  if (at >= node.args.size()) return false;
  auto v = std::get_if<ValueId>(&node.args[at]);
  return v && v->valid();
}

int operand_index(const Graph&, const Node& node, size_t at) {
  if (!is_tensor_arg(node, at)) return -1;
  int index = 0;
  for (size_t a = 0; a < at; ++a) {
    if (auto list = std::get_if<std::vector<ValueId>>(&node.args[a])) {
      for (ValueId v : *list) index += v.valid();
    } else {
      index += is_tensor_arg(node, a);
    }
  }
  return index;
}

int64_t wrap_dim(int64_t dim, size_t rank) {
  int64_t n = std::max<int64_t>(1, static_cast<int64_t>(rank));
  if (dim < -n || dim >= n)
    throw user_error("graph", "dimension {} of a tensor of {} dimensions; capture the model again",
                     dim, rank);
  return dim < 0 ? dim + n : dim;
}

}  // namespace motley::ops
