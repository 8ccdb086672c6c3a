#include "spmd/parts_search.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>

#include "solver/folded.h"

namespace motley::spmd {

using namespace solver;

namespace {

// Communication at (1 - w) of its price, computation at w.
Problem weighed(const Problem& problem, double w) {
  Problem result = problem;
  for (FormTable& table : result.form_tables)
    for (double& seconds : table.convert) seconds *= 1 - w;
  for (OptionTable& table : result.option_tables)
    for (Option& option : table.options) {
      option.comm *= w;  // what a device waits for inside an operator
      for (double& seconds : option.compute) seconds *= w;
    }
  return result;
}

// What a program computes on the slowest type, and communicates.
std::pair<Seconds, Seconds> sums_of(const Problem& problem, const Solution& solution) {
  std::vector<Seconds> compute(problem.types, 0);
  Seconds comm = 0;
  for (size_t n = 0; n < problem.nodes.size(); ++n) {
    const Option& option =
        problem.option_tables[problem.nodes[n].table].options[solution.option[n]];
    for (int t = 0; t < problem.types; ++t) compute[t] += option.compute[t] + option.comm;
  }
  for (const Conversion& c : solution.conversions) {
    const FormTable& table = problem.form_tables[problem.value_table[c.value]];
    comm += table.convert[c.from * table.forms + c.to];
  }
  return {*std::max_element(compute.begin(), compute.end()), comm};
}

}  // namespace

DivisionProblem division_of(const Problem& problem, const Solution& solution,
                            const PartsSearch& search) {
  const int nodes = static_cast<int>(problem.nodes.size());
  std::vector<int> producer(problem.value_table.size(), -1);
  // [conversion] The first node that reads what it makes.
  const auto& conversions = solution.conversions;
  std::vector<int> reader(conversions.size(), nodes);
  for (int n = 0; n < nodes; ++n) {
    const ProblemNode& node = problem.nodes[n];
    const Option& option = problem.option_tables[node.table].options[solution.option[n]];
    for (int v : node.outputs) producer[v] = n;
    for (size_t i = 0; i < node.inputs.size(); ++i)
      for (size_t c = 0; c < conversions.size(); ++c)
        if (conversions[c].value == node.inputs[i] && conversions[c].to == option.in[i])
          reader[c] = std::min(reader[c], n);
  }
  // Those that others start from come first.
  for (size_t c = conversions.size(); c-- > 0;)
    for (size_t d = 0; d < c; ++d)
      if (conversions[d].value == conversions[c].value && conversions[d].to == conversions[c].from)
        reader[d] = std::min(reader[d], reader[c]);
  DivisionProblem result;
  result.parts = search.parts;
  result.interference = search.interference;
  std::vector<int> at(nodes + 1);
  std::vector<std::pair<int, size_t>> placed;  // step, conversion
  for (int n = 0; n <= nodes; ++n) {
    for (size_t c = 0; c < conversions.size(); ++c) {
      if (reader[c] != n) continue;
      placed.emplace_back(static_cast<int>(result.steps.size()), c);
      result.steps.emplace_back();
    }
    at[n] = static_cast<int>(result.steps.size());
    if (n == nodes) break;
    const Option& option =
        problem.option_tables[problem.nodes[n].table].options[solution.option[n]];
    DividedStep& step = result.steps.emplace_back();
    step.compute = option.compute;
    for (Seconds& seconds : step.compute) seconds += option.comm;
  }
  for (const auto& [s, c] : placed) {
    const FormTable& table = problem.form_tables[problem.value_table[conversions[c].value]];
    DividedStep& step = result.steps[s];
    step.comm = table.convert[conversions[c].from * table.forms + conversions[c].to];
    step.made = at[producer[conversions[c].value]];
    step.reader = at[reader[c]];
  }
  return result;
}

PartsProgram search_in_parts(const Problem& problem, const Order& order,
                             const PartsSearch& search) {
  PartsProgram best;
  best.divided.seconds = std::numeric_limits<Seconds>::infinity();
  int divisions = 0;
  const Weights mean{std::vector<double>(problem.types, 1.0 / problem.types), {}};
  auto attempt = [&](const Solution& solution) {
    if (solution.option.empty() || !std::isfinite(solution.price)) return false;
    ++divisions;
    Divided divided = divide(division_of(problem, solution, search));
    if (divided.seconds >= best.divided.seconds) return false;
    best.divided = std::move(divided);
    best.solution = solution;
    return true;
  };
  std::set<std::vector<int>> starts;
  std::vector<Solution> found;
  double low = 0, high = 1, w = 0.5;
  for (int i = 0; i < search.weights && high - low > 1e-3; ++i) {
    search.limits.deadline.check();
    // Every type in its turn, and all alike.
    for (int t = problem.types == 1 ? 0 : -1; t < problem.types; ++t) {
      Weights weights = mean;
      if (t >= 0)
        for (int k = 0; k < problem.types; ++k) weights.compute[k] = k == t;
      const Solution solution = solve_folded(weighed(problem, w), order, weights, search.limits);
      if (solution.option.empty()) return best;
      best.lower_bound = std::max(best.lower_bound, search.parts * solution.lower_bound);
      if (starts.insert(solution.option).second) found.push_back(solution);
      attempt(evaluate(problem, solution.option, mean));
      if (t > 0) continue;
      const auto [compute, comm] = sums_of(problem, solution);
      if (t < 0 || problem.types == 1) (compute > comm ? low : high) = w;
    }
    w = (low + high) / 2;
  }
  for (const Solution& start : found) {
    std::vector<int> option = start.option;
    Seconds now = divide(division_of(problem, evaluate(problem, option, mean), search)).seconds;
    for (bool changed = true; changed && divisions < search.polish;) {
      changed = false;
      for (size_t n = 0; n < option.size() && divisions < search.polish; ++n) {
        const auto count =
            static_cast<int>(problem.option_tables[problem.nodes[n].table].options.size());
        // Alone, or with one of the nodes behind it.
        for (size_t m = n; m < std::min(option.size(), n + 4); ++m) {
          const auto others =
              static_cast<int>(problem.option_tables[problem.nodes[m].table].options.size());
          for (int a = 0; a < count; ++a)
            for (int b = 0; b < (m == n ? 1 : others); ++b) {
              const std::vector<int> before = option;
              option[n] = a;
              if (m != n) option[m] = b;
              if (option == before) continue;
              const Solution solution = evaluate(problem, option, mean);
              Seconds seconds = std::numeric_limits<Seconds>::infinity();
              if (!solution.option.empty() && std::isfinite(solution.price)) {
                ++divisions;
                seconds = divide(division_of(problem, solution, search)).seconds;
              }
              if (seconds >= now - 1e-15) {
                option = before;
                continue;
              }
              now = seconds;
              changed = true;
              attempt(solution);
            }
        }
      }
    }
  }
  return best;
}

}  // namespace motley::spmd
