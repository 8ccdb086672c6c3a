#include "planner/narrow_inputs.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "graph/op.h"

namespace motley::planner {

void narrow_inputs(Plan* plan) {
  const Graph& graph = *plan->graph;
  const Theory& theory = *plan->theory;
  std::vector<Step>& steps = plan->program.steps;
  const auto whole = Placement::replicated();
  for (bool changed = true; changed;) {
    changed = false;
    std::vector<bool> from_input(graph.values.size());
    for (const Input& i : graph.inputs) from_input[i.value.index] = true;
    for (size_t s = 0; s < steps.size() && !changed; ++s) {
      if (!steps[s].is_compute()) continue;
      const Node& node = graph.node(steps[s].node);
      const std::vector<ValueId> operands = graph.inputs_of(node);
      const OpDef* op = is_source(node) ? nullptr : find_op(node.op);
      const bool view = op != nullptr && op->alias && operands.size() == 1 &&
                        node.outputs.size() == 1 && from_input[operands[0].index];
      if (view) from_input[node.outputs[0].index] = true;
      if (node.outputs.empty() || !from_input[node.outputs[0].index]) continue;
      const ValueId value = node.outputs[0];
      const auto& triples = theory.triples(steps[s].node);
      if (!triples[steps[s].triple].out[0].is_replicated()) continue;
      std::optional<Placement> piece;
      bool one = true;
      for (const Step& use : steps) {
        if (use.is_compute()) {
          const std::vector<ValueId> inputs = graph.inputs_of(graph.node(use.node));
          for (size_t i = 0; i < inputs.size(); ++i)
            one =
                one && !(inputs[i] == value && theory.triples(use.node)[use.triple].in[i] == whole);
        } else if (use.value == value && use.from == whole) {
          one = one && use.kind == Collective::slice && piece.value_or(use.to) == use.to;
          piece = use.to;
        }
      }
      if (!one || !piece) continue;
      for (size_t t = 0; t < triples.size() && !changed; ++t) {
        if (triples[t].out[0] != *piece || !triples[t].kernel.empty() ||
            (view && Theory::conversion(whole, triples[t].in[0]) != Collective::slice))
          continue;
        steps[s].triple = static_cast<int>(t);
        std::erase_if(steps, [&](const Step& use) {
          return !use.is_compute() && use.value == value && use.from == whole;
        });
        if (view) {
          Step slice;
          slice.value = operands[0];
          slice.from = whole;
          slice.to = triples[t].in[0];
          slice.kind = Collective::slice;
          if (std::find(steps.begin(), steps.end(), slice) == steps.end()) {
            const auto at = std::find_if(steps.begin(), steps.end(), [&](const Step& step) {
              return step.is_compute() && step.node == graph.value(value).producer;
            });
            steps.insert(at, slice);
          }
        }
        changed = true;
      }
    }
  }
}

}  // namespace motley::planner
