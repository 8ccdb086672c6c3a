#include <algorithm>

#include "cost/cost.h"

namespace motley {

namespace {

Seconds launch_of_calls(const Theory& theory, const Program& program, const CostModel& model,
                        int type, int begin, int end) {
  Seconds sum = 0;
  for (int s = begin; s < end && model.launches(type); ++s)
    if (const Step& step = program.steps[s]; step.is_compute())
      sum += model.launch(type, work_of(theory, step.node, theory.triples(step.node)[step.triple]));
  return sum;
}

}  // namespace

Seconds launch_seconds(const Theory& theory, const Program& program, const CostModel& model,
                       int begin, int end) {
  Seconds most = 0;
  for (int t = 0; t < model.types(); ++t)
    most = std::max(most, launch_of_calls(theory, program, model, t, begin, end));
  return most;
}

Seconds launch_seconds(const Theory& theory, const Program& program, const CostModel& model,
                       Optimizer optimizer) {
  const auto& parameters = theory.graph().parameters;
  const auto updated = std::count_if(parameters.begin(), parameters.end(),
                                     [](const Parameter& p) { return p.gradient.valid(); });
  Seconds most = 0;
  for (int t = 0; t < model.types(); ++t)
    if (model.launches(t))
      most = std::max(
          most,
          launch_of_calls(theory, program, model, t, 0, static_cast<int>(program.steps.size())) +
              static_cast<double>(updated) * model.launch_of_update(t, optimizer) +
              model.per_step(t, theory.graph()));
  return most;
}

}  // namespace motley
