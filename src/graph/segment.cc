#include "graph/segment.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "core/error.h"
#include "graph/op.h"
#include "graph/owner.h"

namespace motley {

namespace {

constexpr size_t kListed = 24;  // modules that an error lists

// The segments a boundary says it leads from and to; false if it says none.
bool read_boundary(const Graph& graph, const Node& node, int* from, int* to) {
  if (node.args.size() != 3 || node.outputs.size() != 1 || !node.outputs[0].valid()) return false;
  const auto* value = std::get_if<ValueId>(&node.args[0]);
  const auto* a = std::get_if<int64_t>(&node.args[1]);
  const auto* b = std::get_if<int64_t>(&node.args[2]);
  if (!value || !value->valid() || !a || !b || *a < 0 || *b < 0 || *a >= kMaxSegments ||
      *b >= kMaxSegments || *a == *b)
    return false;
  if (graph.spec(*value) != graph.spec(node.outputs[0])) return false;
  *from = static_cast<int>(*a);
  *to = static_cast<int>(*b);
  return true;
}

// Sets of values that no boundary parts, and what boundaries say of them.
class Parts {
 public:
  explicit Parts(const Graph& graph) : parent_(graph.values.size()), segment_(parent_.size(), -1) {
    std::iota(parent_.begin(), parent_.end(), 0);
    for (const Node& node : graph.nodes) {
      if (is_boundary(node)) continue;
      ValueId first;
      auto join = [&](ValueId v) {
        if (!v.valid()) return;
        if (first.valid()) parent_[find(v.index)] = find(first.index);
        first = v;
      };
      for (ValueId v : graph.inputs_of(node)) join(v);
      for (ValueId v : node.outputs) join(v);
    }
    auto tie = [&](ValueId a, ValueId b) {
      if (b.valid()) parent_[find(b.index)] = find(a.index);
    };
    for (const Parameter& p : graph.parameters) tie(p.value, p.gradient);
    for (const Buffer& b : graph.buffers) tie(b.value, b.update);
  }

  // False if the value is known to lie in another segment.
  bool put(ValueId v, int segment) {
    int& known = segment_[find(v.index)];
    if (known < 0) known = segment;
    return known == segment;
  }
  int segment(ValueId v) { return std::max(0, segment_[find(v.index)]); }

 private:
  int find(int x) {
    while (parent_[x] != x) x = parent_[x] = parent_[parent_[x]];
    return x;
  }
  std::vector<int> parent_, segment_;
};

}  // namespace

bool is_boundary(const Node& node) { return node.op == kBoundary; }

Segments segments_of(const Graph& graph) {
  Segments result;
  result.of_value.assign(graph.values.size(), 0);
  result.of_node.assign(graph.nodes.size(), 0);
  if (std::none_of(graph.nodes.begin(), graph.nodes.end(), is_boundary)) return result;
  Parts parts(graph);
  for (const Node& node : graph.nodes) {
    int from, to;
    if (!is_boundary(node) || !read_boundary(graph, node, &from, &to)) continue;
    parts.put(std::get<ValueId>(node.args[0]), from);
    parts.put(node.outputs[0], to);
  }
  for (size_t v = 0; v < graph.values.size(); ++v) {
    result.of_value[v] = parts.segment(ValueId(v));
    result.count = std::max(result.count, result.of_value[v] + 1);
  }
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    const Node& node = graph.nodes[n];
    for (ValueId v : graph.inputs_of(node)) result.of_node[n] = result.of_value[v.index];
    for (ValueId v : node.outputs)
      if (v.valid()) result.of_node[n] = result.of_value[v.index];
  }
  return result;
}

std::vector<std::string> check_segments(const Graph& graph) {
  std::vector<std::string> problems;
  if (std::none_of(graph.nodes.begin(), graph.nodes.end(), is_boundary)) return problems;
  Parts parts(graph);
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    const Node& node = graph.nodes[n];
    if (!is_boundary(node)) continue;
    int from, to;
    if (!read_boundary(graph, node, &from, &to)) {
      problems.push_back(fmt::format(
          "node {} ({}) is not a tensor and two different segments below {}, or changes "
          "its shape",
          n, node.op, kMaxSegments));
      continue;
    }
    const ValueId in = std::get<ValueId>(node.args[0]), out = node.outputs[0];
    for (const auto& [v, segment] : {std::pair(in, from), std::pair(out, to)})
      if (!parts.put(v, segment))
        problems.push_back(fmt::format("%{} is in segment {} and, by node {}, in segment {}",
                                       v.index, parts.segment(v), n, segment));
  }
  return problems;
}

Graph with_segments(const Graph& from, const std::vector<int>& segment_of) {
  MOTLEY_CHECK(segment_of.size() == from.nodes.size());
  // Numbers without gaps, in their order.
  std::map<int, int> number;
  for (int s : segment_of) number[s] = 0;
  MOTLEY_CHECK(number.empty() ||
               (number.begin()->first >= 0 && static_cast<int>(number.size()) <= kMaxSegments));
  int next = 0;
  for (auto& [segment, n] : number) n = next++;

  Graph to;
  to.model = from.model;
  std::vector<ValueId> value(from.values.size());
  std::vector<int> segment(from.values.size());
  std::map<std::pair<ValueId, int>, ValueId> crossed;
  auto as = [&](ValueId v, int s, Phase phase) {
    if (segment[v.index] == s) return value[v.index];
    auto [it, fresh] = crossed.try_emplace({v, s});
    if (fresh) {
      const NodeId node = to.add(kBoundary, {value[v.index], int64_t{segment[v.index]}, int64_t{s}},
                                 {from.spec(v)}, phase);
      it->second = to.node(node).outputs[0];
    }
    return it->second;
  };
  for (size_t n = 0; n < from.nodes.size(); ++n) {
    const Node& node = from.nodes[n];
    const int s = number.at(segment_of[n]);
    std::vector<TensorSpec> specs;
    for (ValueId v : node.outputs)
      specs.push_back(v.valid() ? from.spec(v) : TensorSpec{DType::f32, {-1}});
    std::vector<Arg> args = node.args;
    for (Arg& arg : args) {
      if (auto v = std::get_if<ValueId>(&arg); v && v->valid()) *v = as(*v, s, node.phase);
      if (auto list = std::get_if<std::vector<ValueId>>(&arg))
        for (ValueId& v : *list)
          if (v.valid()) v = as(v, s, node.phase);
    }
    const NodeId id = to.add(node.op, std::move(args), specs, node.phase);
    for (size_t o = 0; o < node.outputs.size(); ++o) {
      const ValueId v = node.outputs[o];
      if (!v.valid()) continue;
      value[v.index] = to.node(id).outputs[o];
      segment[v.index] = s;
    }
  }
  auto role = [&](ValueId v) { return v.valid() ? value[v.index] : v; };
  auto result = [&](ValueId v, ValueId source, Phase phase) {
    return v.valid() ? as(v, segment[source.index], phase) : v;
  };
  for (const Parameter& p : from.parameters)
    to.parameters.push_back(
        {p.name, role(p.value), result(p.gradient, p.value, Phase::backward), p.frozen, p.custom});
  for (const Buffer& b : from.buffers)
    to.buffers.push_back({b.name, role(b.value),
                          result(b.update, b.value,
                                 b.update.valid() ? from.node(from.value(b.update).producer).phase
                                                  : Phase::forward)});
  for (const Input& i : from.inputs) to.inputs.push_back({i.name, role(i.value)});
  to.loss = role(from.loss);
  for (ValueId v : from.outputs) to.outputs.push_back(role(v));
  return to;
}

std::vector<int> original_segments(const Graph& graph) {
  const Segments segments = segments_of(graph);
  std::vector<int> result;
  for (size_t n = 0; n < graph.nodes.size(); ++n)
    if (!is_boundary(graph.nodes[n])) result.push_back(segments.of_node[n]);
  return result;
}

std::vector<int> with_backward(const Graph& graph, std::vector<int> segment) {
  const std::vector<std::vector<NodeId>> consumers = graph.consumers();
  // Sources, and views of nothing but them, that nothing has decided yet: where they are first
  // read.
  for (size_t n = graph.nodes.size(); n-- > 0;) {
    const Node& node = graph.nodes[n];
    if (!is_source(node) || segment[n] >= 0) continue;
    for (ValueId v : node.outputs)
      for (NodeId reader : consumers[v.index])
        if (segment[n] < 0 && graph.node(reader).phase == Phase::forward)
          segment[n] = segment[reader.index];
  }
  // The parameter that nodes and values lead to the gradient of, and nothing else.
  std::vector<int> leads(graph.values.size(), -1);
  for (const Parameter& p : graph.parameters)
    if (p.gradient.valid()) leads[p.gradient.index] = graph.value(p.value).producer.index;
  auto views_forward = [&](ValueId v) {
    for (;;) {
      const Node& maker = graph.node(graph.value(v).producer);
      if (maker.phase == Phase::forward || is_source(maker)) return true;
      const OpDef* op = find_op(maker.op);
      const ValueList inputs = graph.inputs_of(maker);
      if (inputs.size() != 1 || !op || !op->alias) return false;
      v = inputs[0];
    }
  };
  std::vector<bool> decided(graph.nodes.size());
  for (size_t n = graph.nodes.size(); n-- > 0;) {
    const Node& node = graph.nodes[n];
    if (node.phase != Phase::backward || is_source(node)) continue;
    int to = -1;
    bool only = true;
    for (ValueId v : node.outputs) {
      if (!v.valid()) continue;
      only = only && leads[v.index] >= 0 && (to < 0 || leads[v.index] == to);
      to = leads[v.index];
    }
    if (!only || to < 0) continue;
    segment[n] = segment[to];
    decided[n] = true;
    // What only this node reads leads there too, if it is all that the node reads, or a view of
    // what the forward pass made; but not the gradient of the layer's result.
    const ValueList inputs = graph.inputs_of(node);
    for (ValueId v : inputs) {
      const Node& maker = graph.node(graph.value(v).producer);
      if (maker.phase == Phase::backward && !is_source(maker) && leads[v.index] < 0 &&
          consumers[v.index].size() == 1 && (inputs.size() == 1 || views_forward(v)))
        leads[v.index] = to;
    }
  }
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    const Node& node = graph.nodes[n];
    if (decided[n] || segment[n] >= 0) continue;
    int last = -1, past = -1;
    for (ValueId v : graph.inputs_of(node)) {
      const NodeId maker = graph.value(v).producer;
      const Node& made = graph.node(maker);
      if (made.phase == Phase::backward && !is_source(made)) {
        if (segment[maker.index] >= 0) past = std::max<int>(past, maker.index);
        continue;
      }
      // A parameter stands for the first node that reads it.
      int at = maker.index;
      if (is_source(made)) {
        at = -1;
        for (NodeId reader : consumers[v.index])
          if (at < 0 && graph.node(reader).phase == Phase::forward) at = reader.index;
      }
      last = std::max(last, at);
    }
    if (const int of = last >= 0 ? last : past; of >= 0) segment[n] = segment[of];
  }
  // What is made of nothing, and sources that only the backward pass reads: where they are first
  // read.
  for (size_t n = segment.size(); n-- > 0;)
    for (ValueId v : graph.nodes[n].outputs)
      if (v.valid() && segment[n] < 0 && !consumers[v.index].empty())
        segment[n] = segment[consumers[v.index][0].index];
  for (int& s : segment) s = std::max(s, 0);
  return segment;
}

std::vector<int> segments_by_module(const Graph& graph, const std::vector<std::string>& modules) {
  std::set<std::string> known;
  for (const Parameter& p : graph.parameters)
    for (size_t dot = p.name.find('.'); dot != std::string::npos; dot = p.name.find('.', dot + 1))
      known.insert(p.name.substr(0, dot));
  for (const std::string& module : modules) {
    if (known.count(module)) continue;
    std::vector<std::string> list(known.begin(), known.end());
    // The outer ones first.
    std::stable_sort(list.begin(), list.end(), [](const std::string& a, const std::string& b) {
      return std::count(a.begin(), a.end(), '.') < std::count(b.begin(), b.end(), '.');
    });
    const bool more = list.size() > kListed;
    if (more) list.resize(kListed);
    throw user_error("segments",
                     "--segments names '{}', which is no module of {}; give some of {}{}", module,
                     graph.model, fmt::join(list, ", "), more ? ", ..." : "");
  }
  auto of = [&](const std::string& parameter) {
    int found = 0;
    size_t longest = 0;
    for (size_t m = 0; m < modules.size(); ++m)
      if (parameter.starts_with(modules[m] + ".") && modules[m].size() >= longest) {
        longest = modules[m].size();
        found = static_cast<int>(m) + 1;
      }
    return found;
  };
  const std::vector<int> owner = owners(graph);
  std::vector<int> segment(graph.nodes.size(), -1);
  for (size_t n = 0; n < graph.nodes.size(); ++n)
    if (owner[n] >= 0) segment[n] = of(graph.parameters[owner[n]].name);
  // What comes before the first parameter is read belongs to what follows it.
  int following = 0;
  for (size_t n = segment.size(); n-- > 0;) {
    const Node& node = graph.nodes[n];
    if (node.phase == Phase::backward || is_source(node)) continue;
    if (segment[n] < 0)
      segment[n] = following;
    else
      following = segment[n];
  }
  return with_backward(graph, std::move(segment));
}

}  // namespace motley
