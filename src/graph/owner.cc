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
    const ValueList inputs = graph.inputs_of(node);
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

std::vector<bool> made_by_readers(const Graph& graph) {
  std::vector<bool> own(graph.nodes.size());
  std::vector<bool> constant(graph.nodes.size());  // follows from constants alone
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    const Node& node = graph.nodes[n];
    if (is_source(node)) {
      own[n] = true;
      constant[n] = node.op == "motley::constant";
      continue;
    }
    const OpDef* op = find_op(node.op);
    if (op && op->random) continue;
    bool views = node.op == "aten::_to_copy" || (op && op->alias), follows = true;
    for (ValueId v : graph.inputs_of(node)) {
      views = views && own[graph.value(v).producer.index];
      follows = follows && constant[graph.value(v).producer.index];
    }
    constant[n] = follows;
    own[n] = views || follows;
  }
  for (const Parameter& p : graph.parameters)
    if (p.gradient.valid()) own[graph.value(p.gradient).producer.index] = false;
  if (graph.loss.valid()) own[graph.value(graph.loss).producer.index] = false;
  return own;
}

}  // namespace motley
