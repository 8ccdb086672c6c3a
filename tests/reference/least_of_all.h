// The brute-force reference of searches with overlap, for tests.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "cost/overlap.h"
#include "solver/folded.h"
#include "solver/order.h"
#include "spmd/build.h"

namespace motley::spmd {

using namespace solver;

// The least step of all programs, one by one: the reference of the search with overlap. Conversions
// are the cheapest of those that hide nothing and of those that hide every gradient.
inline Seconds least_of_all(const Theory& theory, const CostModel& model,
                            const Fractions& fractions) {
  const int types = model.types();
  const OverlapPricing free{{}, {std::vector<double>(types, 1)}, {0}};
  ProblemBuilder plain(theory, model, Optimizer::sgd), hidden(theory, model, Optimizer::sgd);
  plain.price(fractions);
  hidden.price(fractions, 1, &free);
  const Problem& problem = hidden.problem();
  const Weights mean{std::vector<double>(types, 1.0 / types), {}};
  std::vector<int> option(problem.nodes.size());
  Seconds least = std::numeric_limits<Seconds>::infinity();
  std::function<void(size_t)> choose = [&](size_t n) {
    if (n < problem.nodes.size()) {
      const auto& options = problem.option_tables[problem.nodes[n].table].options;
      for (size_t o = 0; o < options.size(); ++o) {
        option[n] = static_cast<int>(o);
        choose(n + 1);
      }
      return;
    }
    for (const ProblemBuilder* builder : {&hidden, &plain}) {
      const Solution solution = evaluate(builder->problem(), option, mean);
      if (solution.option.empty() || !std::isfinite(solution.price)) return;
      // It takes no less than what cannot be hidden, all types computing equally long.
      if (builder == &hidden && solution.price >= least) return;
      Program program = builder->program(solution);
      choose_forms(theory, &program, model, fractions);
      const ProgramCost cost = cost_of(theory, program, model, fractions, Optimizer::sgd, 1, false);
      least = std::min(least, cost.step - hidden_seconds(theory, program, model, fractions));
    }
  };
  choose(0);
  return least;
}

}  // namespace motley::spmd
