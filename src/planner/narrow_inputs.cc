#include "planner/narrow_inputs.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "graph/op.h"

namespace motley::planner {

namespace {

// Whether a value that is held whole may be sliced to a placement: nothing else makes that.
bool can_slice(const std::vector<Step>& steps, ValueId value, Placement to) {
  if (Theory::conversion(Placement::replicated(), to) != Collective::slice) return false;
  return std::all_of(steps.begin(), steps.end(), [&](const Step& step) {
    return step.is_compute() || step.value != value || step.to != to ||
           (step.kind == Collective::slice && step.from.is_replicated());
  });
}

}  // namespace

void narrow_inputs(Plan* plan) {
  const Theory& theory = plan->running();
  const Graph& graph = theory.graph();
  std::vector<Step> steps = plan->program.steps;
  const auto whole = Placement::replicated();
  for (bool changed = true; changed;) {
    changed = false;
    std::vector<bool> from_input(graph.values.size());
    for (const Input& i : graph.inputs) from_input[i.value.index] = true;
    for (size_t s = 0; s < steps.size() && !changed; ++s) {
      if (!steps[s].is_compute()) continue;
      const Node& node = graph.node(steps[s].node);
      const ValueList operands = graph.inputs_of(node);
      const OpDef* op = is_source(node) ? nullptr : find_op(node.op);
      if (node.outputs.empty() || !node.outputs[0].valid()) continue;
      const bool view = op != nullptr && op->alias && operands.size() == 1 &&
                        node.outputs.size() == 1 && from_input[operands[0].index];
      if (view) from_input[node.outputs[0].index] = true;
      if (!from_input[node.outputs[0].index]) continue;
      const ValueId value = node.outputs[0];
      const auto& triples = theory.triples(steps[s].node);
      if (!triples[steps[s].triple].out[0].is_replicated()) continue;
      std::optional<Placement> piece;
      bool one = true;
      for (const Step& use : steps) {
        if (use.is_compute()) {
          const ValueList inputs = graph.inputs_of(graph.node(use.node));
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
            (view && !can_slice(steps, operands[0], triples[t].in[0])))
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
          const auto view_step = std::find_if(steps.begin(), steps.end(), [&](const Step& step) {
            return step.is_compute() && step.node == graph.value(value).producer;
          });
          const auto view_at = view_step - steps.begin();
          if (std::find(steps.begin(), view_step, slice) == view_step) {
            std::erase(steps, slice);  // made later, for others
            steps.insert(steps.begin() + view_at, slice);
          }
        }
        changed = true;
      }
    }
  }
  plan->program.steps = std::move(steps);
}

}  // namespace motley::planner
