#include "spmd/least_memory.h"

#include <algorithm>
#include <vector>

#include "graph/op.h"

namespace motley::spmd {

Bytes least_memory(const Graph& graph, Optimizer optimizer) {
  Bytes state = 0, gradients = 0;
  for (const Parameter& p : graph.parameters) {
    state += state_bytes(graph, p, optimizer);
    if (p.gradient.valid()) gradients += static_cast<Bytes>(graph.spec(p.gradient).bytes());
  }
  // [value] What it is a view of; views and it are one tensor.
  std::vector<ValueId> root(graph.values.size());
  for (size_t v = 0; v < graph.values.size(); ++v) {
    root[v] = ValueId(v);
    const Node& maker = graph.node(graph.values[v].producer);
    const OpDef* op = is_source(maker) ? nullptr : find_op(maker.op);
    if (op && op->alias) root[v] = root[graph.inputs_of(maker)[0].index];
  }
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
  return state + std::max(0.0, activations - gradients);
}

}  // namespace motley::spmd
