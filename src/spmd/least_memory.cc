#include "spmd/least_memory.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "graph/op.h"

namespace motley::spmd {

namespace {

struct State {
  Bytes all = 0, gradients = 0;
};

State state_of(const Graph& graph, Optimizer optimizer) {
  State state;
  for (const Parameter& p : graph.parameters) {
    state.all += state_bytes(graph, p, optimizer);
    if (p.gradient.valid()) state.gradients += static_cast<Bytes>(graph.spec(p.gradient).bytes());
  }
  return state;
}

// [value] What it is a view of; views and it are one tensor.
std::vector<ValueId> roots(const Graph& graph) {
  std::vector<ValueId> root(graph.values.size());
  for (size_t v = 0; v < graph.values.size(); ++v) {
    root[v] = ValueId(v);
    const Node& maker = graph.node(graph.values[v].producer);
    const OpDef* op = is_source(maker) ? nullptr : find_op(maker.op);
    if (op && op->alias) root[v] = root[graph.inputs_of(maker)[0].index];
  }
  return root;
}

}  // namespace

Bytes least_memory(const Graph& graph, Optimizer optimizer) {
  const State state = state_of(graph, optimizer);
  const std::vector<ValueId> root = roots(graph);
  std::vector<Bytes> held(graph.values.size(), 0);  // [value] that is the root of others
  for (const Node& node : graph.nodes) {
    if (node.phase != Phase::backward) continue;
    for (ValueId v : graph.inputs_of(node)) {
      const ValueId r = root[v.index];
      const Node& maker = graph.node(graph.value(r).producer);
      if (is_source(maker) || maker.phase != Phase::forward) continue;
      // Of a view that repeats elements the tensor itself, of one of a part that.
      held[r.index] =
          std::max(held[r.index],
                   static_cast<Bytes>(std::min(graph.spec(v).bytes(), graph.spec(r).bytes())));
    }
  }
  Bytes activations = 0;
  for (Bytes bytes : held) activations += bytes;
  return state.all + std::max(0.0, activations - state.gradients);
}

Bytes least_memory_again(const Graph& graph, Optimizer optimizer) {
  const State state = state_of(graph, optimizer);
  const std::vector<ValueId> root = roots(graph);
  Bytes most = 0;
  std::vector<std::pair<ValueId, Bytes>> own;  // that a node reads and makes, by their roots
  for (const Node& node : graph.nodes) {
    const OpDef* op = is_source(node) ? nullptr : find_op(node.op);
    if (op == nullptr || op->alias) continue;
    own.clear();
    const auto add = [&](ValueId v) {
      const ValueId r = root[v.index];
      if (is_source(graph.node(graph.value(r).producer))) return;
      const auto bytes = static_cast<Bytes>(std::min(graph.spec(v).bytes(), graph.spec(r).bytes()));
      const auto it =
          std::find_if(own.begin(), own.end(), [&](const auto& o) { return o.first == r; });
      if (it == own.end())
        own.emplace_back(r, bytes);
      else
        it->second = std::max(it->second, bytes);
    };
    for (ValueId v : graph.inputs_of(node)) add(v);
    for (ValueId v : node.outputs)
      if (v.valid()) add(v);
    Bytes sum = 0;
    for (const auto& [value, bytes] : own) sum += bytes;
    most = std::max(most, sum);
  }
  return state.all + std::max(0.0, most - state.gradients);
}

}  // namespace motley::spmd
