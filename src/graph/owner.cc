#include "graph/owner.h"

#include "graph/op.h"

namespace motley {

std::vector<int> owners(const Graph& graph) {
  // The parameter that a value is, or is a view or conversion of.
  std::vector<int> parameter(graph.values.size(), -1);
  for (size_t p = 0; p < graph.parameters.size(); ++p)
    parameter[graph.parameters[p].value.index] = static_cast<int>(p);
  std::vector<int> owner(graph.nodes.size(), -1);
  int now = -1;
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    const Node& node = graph.nodes[n];
    if (node.phase == Phase::backward) continue;
    if (is_source(node)) {
      owner[n] = parameter[node.outputs[0].index];
      continue;
    }
    const std::vector<ValueId> inputs = graph.inputs_of(node);
    const OpDef* op = find_op(node.op);
    if (inputs.size() == 1 && parameter[inputs[0].index] >= 0 && node.outputs.size() == 1 &&
        node.outputs[0].valid() && ((op && op->alias) || node.op == "aten::_to_copy")) {
      owner[n] = parameter[node.outputs[0].index] = parameter[inputs[0].index];
      continue;
    }
    for (ValueId v : inputs)
      if (parameter[v.index] >= 0) now = parameter[v.index];
    owner[n] = now;
  }
  return owner;
}

}  // namespace motley
