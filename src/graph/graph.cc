#include "graph/graph.h"

#include <algorithm>
#include <array>

#include "core/error.h"
#include "core/rng.h"
#include "graph/segment.h"

namespace motley {

namespace {

struct DTypeInfo {
  const char* name;
  int64_t size;
  bool is_float;
};
constexpr std::array<DTypeInfo, 10> kDTypes = {{{"f64", 8, true},
                                                {"f32", 4, true},
                                                {"f16", 2, true},
                                                {"bf16", 2, true},
                                                {"i64", 8, false},
                                                {"i32", 4, false},
                                                {"i16", 2, false},
                                                {"i8", 1, false},
                                                {"u8", 1, false},
                                                {"b8", 1, false}}};

}  // namespace

int64_t size_of(DType dtype) { return kDTypes[static_cast<size_t>(dtype)].size; }
const char* to_string(DType dtype) { return kDTypes[static_cast<size_t>(dtype)].name; }
bool is_float(DType dtype) { return kDTypes[static_cast<size_t>(dtype)].is_float; }

bool is_half(DType dtype) { return dtype == DType::f16 || dtype == DType::bf16; }

bool parse_dtype(const std::string& text, DType* dtype) {
  for (size_t i = 0; i < kDTypes.size(); ++i)
    if (text == kDTypes[i].name) {
      *dtype = static_cast<DType>(i);
      return true;
    }
  return false;
}

int64_t TensorSpec::numel() const {
  int64_t n = 1;
  for (int64_t d : shape) n *= d;
  return n;
}

NodeId Graph::add(OpName op, std::vector<Arg> args, const std::vector<TensorSpec>& specs,
                  Phase phase) {
  NodeId id(static_cast<int64_t>(nodes.size()));
  Node node{std::move(op), std::move(args), {}, phase};
  for (const TensorSpec& spec : specs) {
    if (spec.shape == Shape{-1}) {
      node.outputs.push_back(ValueId());
      continue;
    }
    node.outputs.push_back(ValueId(static_cast<int64_t>(values.size())));
    values.push_back({spec, id, static_cast<int>(node.outputs.size()) - 1});
  }
  nodes.push_back(std::move(node));
  return id;
}

ValueId Graph::add_parameter(const std::string& name, const TensorSpec& spec) {
  ValueId value = node(add("motley::parameter", {name}, {spec})).outputs[0];
  parameters.push_back({name, value, {}});
  return value;
}

ValueId Graph::add_buffer(const std::string& name, const TensorSpec& spec) {
  ValueId value = node(add("motley::buffer", {name}, {spec})).outputs[0];
  buffers.push_back({name, value, {}});
  return value;
}

ValueId Graph::add_input(const std::string& name, const TensorSpec& spec) {
  ValueId value = node(add("motley::input", {name}, {spec})).outputs[0];
  inputs.push_back({name, value});
  return value;
}

ValueId Graph::add_constant(const TensorSpec& spec, std::vector<double> data) {
  MOTLEY_CHECK(spec.numel() == static_cast<int64_t>(data.size()));
  return node(add("motley::constant", {std::move(data)}, {spec})).outputs[0];
}

ValueList Graph::inputs_of(const Node& node) const {
  ValueList result;
  for (const Arg& arg : node.args) {
    if (auto one = std::get_if<ValueId>(&arg)) {
      if (one->valid()) result.push_back(*one);
    } else if (auto list = std::get_if<std::vector<ValueId>>(&arg)) {
      for (ValueId v : *list)
        if (v.valid()) result.push_back(v);
    }
  }
  return result;
}

std::vector<std::vector<NodeId>> Graph::consumers() const {
  std::vector<std::vector<NodeId>> result(values.size());
  for (size_t n = 0; n < nodes.size(); ++n)
    for (ValueId v : inputs_of(nodes[n])) {
      auto& list = result[v.index];
      if (list.empty() || list.back() != NodeId(n)) list.push_back(NodeId(n));
    }
  return result;
}

int64_t Graph::parameter_bytes() const {
  int64_t bytes = 0;
  for (const Parameter& p : parameters) bytes += spec(p.value).bytes();
  return bytes;
}

bool same_but_for_names(const Graph& a, const Graph& b) {
  const auto all = [](const auto& of_a, const auto& of_b, auto same) {
    return std::equal(of_a.begin(), of_a.end(), of_b.begin(), of_b.end(), same);
  };
  const auto node = [](const Node& x, const Node& y) {
    if (x.op != y.op || x.phase != y.phase || x.outputs != y.outputs) return false;
    return (is_source(x) && x.op != "motley::constant") || x.args == y.args;
  };
  const auto value = [](const Value& x, const Value& y) {
    return x.spec == y.spec && x.producer == y.producer && x.output == y.output;
  };
  const auto parameter = [](const Parameter& x, const Parameter& y) {
    return x.value == y.value && x.gradient == y.gradient && x.frozen == y.frozen &&
           x.custom == y.custom;
  };
  const auto buffer = [](const Buffer& x, const Buffer& y) {
    return x.value == y.value && x.update == y.update;
  };
  const auto input = [](const Input& x, const Input& y) { return x.value == y.value; };
  return a.loss == b.loss && a.outputs == b.outputs && all(a.nodes, b.nodes, node) &&
         all(a.values, b.values, value) && all(a.parameters, b.parameters, parameter) &&
         all(a.buffers, b.buffers, buffer) && all(a.inputs, b.inputs, input);
}

std::vector<std::string> verify(const Graph& graph) {
  std::vector<std::string> problems;
  auto problem = [&](std::string text) { problems.push_back(std::move(text)); };
  const int64_t count = static_cast<int64_t>(graph.values.size());
  std::vector<bool> made(graph.values.size());
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    const Node& node = graph.nodes[n];
    for (ValueId v : graph.inputs_of(node)) {
      if (v.index >= count)
        problem(fmt::format("node {} ({}) reads %{}, which does not exist", n, node.op, v.index));
      else if (!made[v.index])
        problem(fmt::format("node {} ({}) reads %{} before it is made", n, node.op, v.index));
    }
    for (size_t o = 0; o < node.outputs.size(); ++o) {
      ValueId v = node.outputs[o];
      if (!v.valid()) continue;
      if (v.index >= count) {
        problem(fmt::format("node {} ({}) makes %{}, which does not exist", n, node.op, v.index));
        continue;
      }
      if (made[v.index]) problem(fmt::format("%{} is made twice", v.index));
      made[v.index] = true;
      const Value& value = graph.value(v);
      if (value.producer != NodeId(n) || value.output != static_cast<int>(o))
        problem(fmt::format("%{} does not know its producer, node {}", v.index, n));
      for (int64_t d : value.spec.shape)
        if (d < 0) problem(fmt::format("%{} has a negative dimension", v.index));
    }
  }
  auto exists = [&](ValueId v, const std::string& role) {
    if (v.index >= count || !v.valid() || !made[v.index]) {
      problem(fmt::format("{} is %{}, which nothing makes", role, v.index));
      return false;
    }
    return true;
  };
  if (graph.loss.valid() && exists(graph.loss, "the loss") && graph.spec(graph.loss).numel() != 1)
    problem(fmt::format("the loss %{} is not a scalar", graph.loss.index));
  for (const Parameter& p : graph.parameters) {
    bool ok = exists(p.value, "parameter " + p.name);
    if (p.gradient.valid() && exists(p.gradient, "the gradient of " + p.name) && ok &&
        graph.spec(p.gradient).shape != graph.spec(p.value).shape)
      problem(fmt::format("the gradient of {} has another shape", p.name));
  }
  for (const Buffer& b : graph.buffers) {
    exists(b.value, "buffer " + b.name);
    if (b.update.valid()) exists(b.update, "the update of " + b.name);
  }
  for (const Input& i : graph.inputs) exists(i.value, "input " + i.name);
  for (ValueId v : graph.outputs) exists(v, "an output");
  if (problems.empty()) return check_segments(graph);
  return problems;
}

void remove_dead(Graph* graph) {
  std::vector<bool> live(graph->nodes.size());
  std::vector<NodeId> stack;
  auto need = [&](ValueId v) {
    if (!v.valid()) return;
    NodeId n = graph->value(v).producer;
    if (!live[n.index]) {
      live[n.index] = true;
      stack.push_back(n);
    }
  };
  need(graph->loss);
  for (const Parameter& p : graph->parameters) need(p.value), need(p.gradient);
  for (const Buffer& b : graph->buffers) need(b.value), need(b.update);
  for (const Input& i : graph->inputs) need(i.value);
  for (ValueId v : graph->outputs) need(v);
  while (!stack.empty()) {
    NodeId n = stack.back();
    stack.pop_back();
    for (ValueId v : graph->inputs_of(graph->node(n))) need(v);
  }
  std::vector<int32_t> new_value(graph->values.size(), -1);
  std::vector<Node> nodes;
  std::vector<Value> values;
  nodes.reserve(graph->nodes.size());
  values.reserve(graph->values.size());
  auto renumber = [&](ValueId* v) {
    if (v->valid()) *v = ValueId(new_value[v->index]);
  };
  for (size_t n = 0; n < graph->nodes.size(); ++n) {
    if (!live[n]) continue;
    Node node = std::move(graph->nodes[n]);
    for (Arg& arg : node.args) {
      if (auto v = std::get_if<ValueId>(&arg)) renumber(v);
      if (auto list = std::get_if<std::vector<ValueId>>(&arg))
        for (ValueId& v : *list) renumber(&v);
    }
    for (ValueId& v : node.outputs) {
      if (!v.valid()) continue;
      Value value = std::move(graph->values[v.index]);
      value.producer = NodeId(static_cast<int64_t>(nodes.size()));
      new_value[v.index] = static_cast<int32_t>(values.size());
      v = ValueId(static_cast<int64_t>(values.size()));
      values.push_back(std::move(value));
    }
    nodes.push_back(std::move(node));
  }
  graph->nodes = std::move(nodes);
  graph->values = std::move(values);
  renumber(&graph->loss);
  for (Parameter& p : graph->parameters) renumber(&p.value), renumber(&p.gradient);
  for (Buffer& b : graph->buffers) renumber(&b.value), renumber(&b.update);
  for (Input& i : graph->inputs) renumber(&i.value);
  for (ValueId& v : graph->outputs) renumber(&v);
}

std::vector<ValueId> saved_activations(const Graph& graph) {
  std::vector<bool> saved(graph.values.size());
  std::vector<ValueId> list;
  for (const Node& node : graph.nodes) {
    if (node.phase != Phase::backward) continue;
    for (ValueId v : graph.inputs_of(node)) {
      const Node& producer = graph.node(graph.value(v).producer);
      if (producer.phase != Phase::forward || is_source(producer) || saved[v.index]) continue;
      saved[v.index] = true;
      list.push_back(v);
    }
  }
  return list;
}

uint64_t fingerprint(const Graph& graph) {
  uint64_t hash = 0x6d6f746c6579ull;
  for (char c : to_text(graph)) hash = mix64(hash ^ static_cast<unsigned char>(c));
  return hash;
}

}  // namespace motley
