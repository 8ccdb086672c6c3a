#include "solver/cheapest.h"

#include <algorithm>
#include <vector>

#include "core/infinity.h"

namespace motley::solver {

namespace {

// Options that cost no more than others; of those whose cost is infinite, none.
std::vector<int> cheapest_of(const OptionTable& table, const Weights& weights) {
  std::vector<int> cheapest;
  double least = kInfinity;
  for (size_t o = 0; o < table.options.size(); ++o) {
    const double cost = price(table.options[o], weights);
    if (cost > least || cost == kInfinity) continue;
    if (cost < least) cheapest.clear();
    least = cost;
    cheapest.push_back(static_cast<int>(o));
  }
  return cheapest;
}

}  // namespace

std::optional<Solution> cheapest(const Problem& problem, const Weights& weights) {
  std::vector<std::optional<std::vector<int>>> of_table(problem.option_tables.size());
  std::vector<uint8_t> made(problem.value_table.size());  // [value] form
  std::vector<int> option;
  option.reserve(problem.nodes.size());
  for (const ProblemNode& node : problem.nodes) {
    const std::vector<Option>& options = problem.option_tables[node.table].options;
    std::optional<std::vector<int>>& known = of_table[node.table];
    if (!known) known = cheapest_of(problem.option_tables[node.table], weights);
    const auto chosen = std::find_if(known->begin(), known->end(), [&](int o) {
      for (size_t k = 0; k < node.inputs.size(); ++k)
        if (options[o].in[k] != made[node.inputs[k]]) return false;
      return true;
    });
    if (chosen == known->end()) return std::nullopt;
    for (size_t k = 0; k < node.outputs.size(); ++k)
      made[node.outputs[k]] = options[*chosen].out[k];
    option.push_back(*chosen);
  }
  return evaluate(problem, option, weights);
}

}  // namespace motley::solver
