#include "reference/sample.h"

#include <cmath>
#include <limits>

#include "core/error.h"

namespace motley::spmd {

using namespace solver;

Program random_program(const ProblemBuilder& builder, Rng* rng) {
  Problem problem = builder.problem();
  for (FormTable& table : problem.form_tables)
    for (int i = 0; i < table.forms; ++i)
      for (int j = 0; j < table.forms; ++j) {
        double& cost = table.convert[i * table.forms + j];
        if (i != j && std::isfinite(cost)) cost = rng->uniform();
      }
  // Which forms each value can still reach from the one it was made in.
  auto reachable = [&](int value, int from) {
    const FormTable& table = problem.form_tables[problem.value_table[value]];
    uint32_t seen = 1u << from;
    for (bool grew = true; grew;) {
      grew = false;
      for (int i = 0; i < table.forms; ++i)
        for (int j = 0; j < table.forms; ++j)
          if ((seen >> i & 1) && !(seen >> j & 1) &&
              std::isfinite(table.convert[i * table.forms + j]))
            seen |= 1u << j, grew = true;
    }
    return seen;
  };
  Solution solution;
  std::vector<uint32_t> forms(problem.value_table.size());
  std::vector<int> made(problem.value_table.size());
  for (const ProblemNode& node : problem.nodes) {
    const auto& options = problem.option_tables[node.table].options;
    std::vector<int> possible;
    for (size_t o = 0; o < options.size(); ++o) {
      bool ok = std::isfinite(options[o].comm);
      for (size_t i = 0; i < node.inputs.size(); ++i)
        ok = ok && (forms[node.inputs[i]] >> options[o].in[i] & 1);
      if (ok) possible.push_back(static_cast<int>(o));
    }
    MOTLEY_CHECK(!possible.empty(), "a node has no reachable option");
    // More often than not go on with the forms that are there, so that chains of cuts and partial
    // sums grow long.
    std::vector<int> direct;
    for (int o : possible) {
      bool ok = true;
      for (size_t i = 0; i < node.inputs.size(); ++i)
        ok = ok && made[node.inputs[i]] == options[o].in[i];
      if (ok) direct.push_back(o);
    }
    if (!direct.empty() && rng->chance(0.6)) possible = direct;
    int choice = possible[rng->below(static_cast<int64_t>(possible.size()))];
    solution.option.push_back(choice);
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      made[node.outputs[i]] = options[choice].out[i];
      forms[node.outputs[i]] = reachable(node.outputs[i], options[choice].out[i]);
    }
  }
  Weights weights;
  weights.compute.assign(problem.types, 0);
  weights.compute[0] = 1;
  Program program = builder.program(evaluate(problem, solution.option, weights));
  program.steps.change([&](std::vector<Step>& steps) {
    for (Step& step : steps)
      if (!step.is_compute() && has_forms(step.kind) && rng->chance(0.5))
        step.form = PieceForm::grouped;
  });
  return program;
}

}  // namespace motley::spmd
