#include "reference/brute_force.h"

#include <coin/Cbc_C_Interface.h>
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/rng.h"

namespace motley::solver {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

Solution infeasible() {
  Solution solution;
  solution.price = solution.lower_bound = kInf;
  return solution;
}

// An integer program: columns from 0 to an upper bound, rows between two bounds.
struct Column {
  double cost, upper;
  bool binary;
};
struct Row {
  double lower, upper;
  std::vector<std::pair<int, double>> terms;  // (column, coefficient)
};
struct IntegerProgram {
  std::vector<Column> columns;
  std::vector<Row> rows;

  int add(const Column& column) {
    columns.push_back(column);
    return static_cast<int>(columns.size()) - 1;
  }
  int add(Row row) {
    rows.push_back(std::move(row));
    return static_cast<int>(rows.size()) - 1;
  }
  void put(int row, int column, double x) { rows[row].terms.emplace_back(column, x); }
};

// Hands a program over, by column.
Cbc_Model* load(const IntegerProgram& program) {
  const auto& [columns, rows] = program;
  std::vector<CoinBigIndex> start{0};
  std::vector<int> index;
  std::vector<double> element, lower(columns.size(), 0), upper, cost, row_lower, row_upper;
  std::vector<std::vector<std::pair<int, double>>> by_column(columns.size());
  for (size_t r = 0; r < rows.size(); ++r) {
    row_lower.push_back(rows[r].lower);
    row_upper.push_back(rows[r].upper == kInf ? std::numeric_limits<double>::max() : rows[r].upper);
    std::map<int, double> merged;
    for (const auto& [column, coefficient] : rows[r].terms) merged[column] += coefficient;
    for (const auto& [column, coefficient] : merged) {
      by_column[column].emplace_back(static_cast<int>(r), coefficient);
    }
  }
  for (size_t c = 0; c < columns.size(); ++c) {
    for (const auto& [row, coefficient] : by_column[c]) {
      index.push_back(row);
      element.push_back(coefficient);
    }
    start.push_back(static_cast<CoinBigIndex>(index.size()));
    upper.push_back(columns[c].upper);
    cost.push_back(columns[c].cost);
  }
  Cbc_Model* model = Cbc_newModel();
  Cbc_setLogLevel(model, 0);
  Cbc_loadProblem(model, static_cast<int>(columns.size()), static_cast<int>(rows.size()),
                  start.data(), index.data(), element.data(), lower.data(), upper.data(),
                  cost.data(), row_lower.data(), row_upper.data());
  for (size_t c = 0; c < columns.size(); ++c) {
    if (columns[c].binary) Cbc_setInteger(model, static_cast<int>(c));
  }
  return model;
}

// Solves a loaded model to a proven optimum and frees it. `choice`: [node][option] its column, -1:
// the option is not allowed; prices are in `unit`.
Solution solve(Cbc_Model* model, double unit, const std::vector<std::vector<int>>& choice,
               const Problem& problem, const Weights& weights) {
  Cbc_setAllowableGap(model, 0);
  Cbc_setAllowableFractionGap(model, 0);
  Cbc_setParameter(model, "increment", "1e-12");  // by which a better solution must be better
  Cbc_solve(model);
  if (!Cbc_isProvenOptimal(model)) {
    MOTLEY_CHECK(Cbc_isProvenInfeasible(model), "CBC stopped early");
    Cbc_deleteModel(model);
    return infeasible();
  }
  const double* x = Cbc_getColSolution(model);
  std::vector<int> option;
  for (const auto& list : choice) {
    const auto value = [&](int column) { return column < 0 ? -1 : x[column]; };
    const auto best = std::max_element(list.begin(), list.end(),
                                       [&](int a, int b) { return value(a) < value(b); });
    option.push_back(static_cast<int>(best - list.begin()));
  }
  Solution solution = evaluate(problem, option, weights);
  solution.lower_bound = std::min(solution.price, Cbc_getObjValue(model) * unit);
  Cbc_deleteModel(model);
  return solution;
}

// The highest price of an option or a conversion; 1: all are free.
double highest_price(const Problem& problem, const Weights& weights) {
  double highest = 0;
  for (const OptionTable& table : problem.option_tables) {
    for (const Option& option : table.options) {
      const double p = price(option, weights);
      if (p < kInf) highest = std::max(highest, p);
    }
  }
  for (const FormTable& table : problem.form_tables) {
    for (double p : table.convert) {
      if (p < kInf) highest = std::max(highest, p);
    }
  }
  return highest == 0 ? 1 : highest;
}

using ByForm = std::map<int, std::vector<int>>;  // form -> columns of options

// Of one value: arcs between its forms, each bought once, and a flow for each form that is required.
// `made`: options that make a form; `wanted`: form -> [consumer] its options that ask for it.
void add_flows(const FormTable& table, double unit, const ByForm& made,
               const std::map<int, std::vector<std::vector<int>>>& wanted,
               IntegerProgram* program) {
  const int n = table.forms;
  std::map<std::pair<int, int>, int> bought;
  for (int a = 0; a < n && !wanted.empty(); ++a) {
    for (int b = 0; b < n; ++b) {
      if (a == b || table.convert[a * n + b] == kInf) continue;
      bought[{a, b}] = program->add(Column{table.convert[a * n + b] / unit, 1, true});
    }
  }
  for (const auto& [form, consumers] : wanted) {
    // required >= any consumer's choice of this form; the flow carries `required` units to it.
    const int required = program->add(Column{0, 1, false});
    for (const auto& list : consumers) {
      Row row{0, kInf, {{required, 1}}};
      for (int column : list) row.terms.emplace_back(column, -1);
      program->add(std::move(row));
    }
    std::vector<Row> balance(n, Row{0, kInf, {}});  // inflow + made >= outflow + required
    balance[form].terms.emplace_back(required, -1);
    for (const auto& [from, list] : made) {
      for (int column : list) balance[from].terms.emplace_back(column, 1);
    }
    for (const auto& [arc, buy] : bought) {
      const int flow = program->add(Column{0, 1, false});
      balance[arc.first].terms.emplace_back(flow, -1);
      balance[arc.second].terms.emplace_back(flow, 1);
      program->add(Row{0, kInf, {{buy, 1}, {flow, -1}}});
    }
    for (Row& row : balance) program->add(std::move(row));
  }
}

// Of one value: a column per form made and set of forms required, at the cost of completing the one
// to the other. `made`: options that make a form; `wanted`: of each consumer, options that ask for
// a form.
void add_sets(const FormTable& table, const ByForm& made, const std::vector<ByForm>& wanted,
              IntegerProgram* program) {
  uint32_t all = 0;
  size_t most = 0;  // forms asked for at once; a node may read a value several times
  for (const ByForm& consumer : wanted) {
    std::map<int, size_t> at_once;
    for (const auto& [form, options] : consumer) {
      all |= 1u << form;
      for (int o : options) ++at_once[o];
    }
    size_t of_one = 0;
    for (const auto& [option, forms] : at_once) of_one = std::max(of_one, forms);
    most += of_one;
  }
  if (all == 0) return;
  std::map<int, int> produced;  // form -> row: sets completed from it = options that make it
  for (const auto& [form, options] : made) {
    produced[form] = program->add(Row{0, 0, {}});
    for (int column : options) program->put(produced[form], column, -1);
  }
  // Every consumer's form is in the set.
  std::vector<std::pair<int, int>> asks;  // (form, row)
  for (const ByForm& consumer : wanted) {
    for (const auto& [form, options] : consumer) {
      asks.emplace_back(form, program->add(Row{0, kInf, {}}));
      for (int column : options) program->put(asks.back().second, column, -1);
    }
  }
  for (uint32_t want = all; want != 0; want = (want - 1) & all) {
    if (static_cast<size_t>(std::popcount(want)) > most) continue;
    for (const auto& [form, row] : produced) {
      const double c = complete(table, form, want, 0, nullptr);
      if (c == kInf) continue;
      const int column = program->add(Column{c, 1, false});
      program->put(row, column, 1);
      for (const auto& [asked, ask] : asks) {
        if (want >> asked & 1) program->put(ask, column, 1);
      }
    }
  }
}

}  // namespace

Solution brute_force(const Problem& problem, const Weights& weights) {
  const size_t nodes = problem.nodes.size();
  Solution best = infeasible();
  std::vector<int> option(nodes, 0);
  const auto options = [&](size_t i) {
    return static_cast<int>(problem.option_tables[problem.nodes[i].table].options.size());
  };
  for (size_t i = 0; i < nodes; ++i) {
    if (options(i) == 0) return best;
  }
  while (true) {
    Solution solution = evaluate(problem, option, weights);
    if (solution.price < best.price) best = std::move(solution);
    size_t i = 0;
    while (i < nodes && ++option[i] == options(i)) option[i++] = 0;
    if (i == nodes) return best;
  }
}

// One "choice" variable per option; per value, arcs of positive cost bought once and one flow per
// required form.
Solution integer_program(const Problem& problem, const Weights& weights) {
  IntegerProgram program;
  const double unit = highest_price(problem, weights);  // prices are scaled to about 1
  std::vector<std::vector<int>> choice(problem.nodes.size());
  const size_t values = problem.value_table.size();
  std::vector<ByForm> made(values);  // [value]
  std::vector<std::map<int, std::vector<std::vector<int>>>> wanted(values);
  for (size_t i = 0; i < problem.nodes.size(); ++i) {
    const ProblemNode& node = problem.nodes[i];
    Row one{1, 1, {}};
    std::map<std::pair<int, int>, std::vector<int>> wants;  // (value, form) -> choices of this node
    for (const Option& option : problem.option_tables[node.table].options) {
      const double p = price(option, weights);
      const int column = program.add(Column{p < kInf ? p / unit : 0, p < kInf ? 1.0 : 0.0, true});
      choice[i].push_back(column);
      one.terms.emplace_back(column, 1);
      for (size_t k = 0; k < node.inputs.size(); ++k) {
        auto& list = wants[{node.inputs[k], option.in[k]}];
        if (list.empty() || list.back() != column) list.push_back(column);
      }
      for (size_t k = 0; k < node.outputs.size(); ++k) {
        made[node.outputs[k]][option.out[k]].push_back(column);
      }
    }
    program.add(std::move(one));
    for (auto& [key, list] : wants) wanted[key.first][key.second].push_back(std::move(list));
  }
  for (size_t v = 0; v < values; ++v)
    add_flows(problem.form_tables[problem.value_table[v]], unit, made[v], wanted[v], &program);
  return solve(load(program), unit, choice, problem, weights);
}

// One column per option and one per (value, produced form, set of forms its consumers ask for), at
// the cost of completing the form to the set. Fewer rows than flows and a tighter relaxation, so
// that captured models are within reach.
Solution integer_program_by_sets(const Problem& problem, const Weights& weights) {
  IntegerProgram program;
  const size_t values = problem.value_table.size();
  std::vector<ByForm> made(values);                 // [value]
  std::vector<std::vector<ByForm>> wanted(values);  // [value][consumer]
  std::vector<std::vector<int>> choice(problem.nodes.size());
  for (size_t i = 0; i < problem.nodes.size(); ++i) {
    const ProblemNode& node = problem.nodes[i];
    const int one = program.add(Row{1, 1, {}});
    std::map<int, ByForm> wants;  // value -> form -> options
    for (const Option& option : problem.option_tables[node.table].options) {
      const double p = price(option, weights);
      const int column = p < kInf ? program.add(Column{p, 1, true}) : -1;
      choice[i].push_back(column);
      if (column < 0) continue;
      program.put(one, column, 1);
      std::set<std::pair<int, int>> asked;
      for (size_t k = 0; k < node.inputs.size(); ++k) asked.emplace(node.inputs[k], option.in[k]);
      for (const auto& [value, form] : asked) wants[value][form].push_back(column);
      for (size_t k = 0; k < node.outputs.size(); ++k)
        made[node.outputs[k]][option.out[k]].push_back(column);
    }
    for (auto& [value, forms] : wants) wanted[value].push_back(std::move(forms));
  }
  for (size_t v = 0; v < values; ++v)
    add_sets(problem.form_tables[problem.value_table[v]], made[v], wanted[v], &program);
  double unit = 1e-300;
  for (const Column& column : program.columns) unit = std::max(unit, column.cost);
  for (Column& column : program.columns) column.cost /= unit;
  return solve(load(program), unit, choice, problem, weights);
}

std::string check_solution(const Problem& problem, const Solution& solution,
                           const Weights& weights) {
  if (solution.option.size() != problem.nodes.size()) return "not one option per node";
  double paid = 0;
  std::vector<uint32_t> there(problem.value_table.size(), 0);
  std::vector<std::vector<Conversion>> of_value(problem.value_table.size());
  for (const Conversion& c : solution.conversions) of_value[c.value].push_back(c);
  for (size_t i = 0; i < problem.nodes.size(); ++i) {
    const ProblemNode& node = problem.nodes[i];
    const auto& options = problem.option_tables[node.table].options;
    if (solution.option[i] < 0 || solution.option[i] >= static_cast<int>(options.size())) {
      return fmt::format("node {} has no option {}", i, solution.option[i]);
    }
    const Option& option = options[solution.option[i]];
    for (size_t k = 0; k < node.inputs.size(); ++k) {
      if ((there[node.inputs[k]] >> option.in[k] & 1) == 0) {
        return fmt::format("node {} lacks value {} in form {}", i, node.inputs[k], option.in[k]);
      }
    }
    paid += price(option, weights);
    for (size_t k = 0; k < node.outputs.size(); ++k) {
      const int value = node.outputs[k];
      const FormTable& table = problem.form_tables[problem.value_table[value]];
      there[value] = 1u << option.out[k];
      for (const Conversion& c : of_value[value]) {
        if ((there[value] >> c.from & 1) == 0) return fmt::format("value {} from nothing", value);
        there[value] |= 1u << c.to;
        paid += table.convert[c.from * table.forms + c.to];
      }
    }
  }
  if (!(std::abs(paid - solution.price) <= 1e-9 * paid)) {
    return fmt::format("price {} but paid {}", solution.price, paid);
  }
  if (!(solution.lower_bound <= solution.price)) return "lower bound above the price";
  return "";
}

Problem random_problem(uint64_t seed, const RandomShape& shape) {
  Rng rng(seed);
  Problem problem;
  problem.types = shape.types;
  const auto cost = [&] { return static_cast<double>(rng.between(0, 20)) + rng.uniform(); };
  const int form_tables = static_cast<int>(rng.between(1, 3));
  for (int t = 0; t < form_tables; ++t) {
    FormTable table;
    table.forms = static_cast<int>(rng.between(2, shape.max_forms));
    const bool token = rng.chance(0.2) && shape.gaps;
    for (int a = 0; a < table.forms; ++a) {
      for (int b = 0; b < table.forms; ++b) {
        double c = cost();
        if (token || (shape.gaps && rng.chance(0.15))) c = kInf;
        if (!token && rng.chance(0.15)) c = 0;
        table.convert.push_back(a == b ? 0 : c);
      }
    }
    problem.form_tables.push_back(std::move(table));
  }
  // Nodes of one signature (form tables of inputs and outputs) may share a table.
  std::map<std::vector<int>, std::vector<int>> tables;
  for (int i = 0; i < shape.nodes; ++i) {
    ProblemNode node;
    const int values = static_cast<int>(problem.value_table.size());
    const int inputs = values == 0 || rng.chance(0.2) ? 0 : static_cast<int>(rng.between(1, 3));
    for (int k = 0; k < inputs; ++k) {
      // Mostly recent values, sometimes any.
      const int64_t reach = rng.chance(0.6) ? std::min(values, 3) : values;
      node.inputs.push_back(values - 1 - static_cast<int>(rng.below(reach)));
    }
    const int outputs = static_cast<int>(rng.chance(0.15) ? 0 : rng.chance(0.2) ? 2 : 1);
    for (int k = 0; k < outputs; ++k) {
      node.outputs.push_back(static_cast<int>(problem.value_table.size()));
      problem.value_table.push_back(static_cast<int>(rng.below(form_tables)));
    }
    node.backward = i >= shape.nodes / 2 && rng.chance(0.8);
    std::vector<int> signature{inputs};
    for (int v : node.inputs) signature.push_back(problem.value_table[v]);
    for (int v : node.outputs) signature.push_back(problem.value_table[v]);
    auto& known = tables[signature];
    if (!known.empty() && rng.chance(0.5)) {
      node.table = known[rng.below(static_cast<int64_t>(known.size()))];
    } else {
      OptionTable table;
      const int64_t options =
          rng.between(shape.gaps && rng.chance(0.02) ? 0 : 1, shape.max_options);
      for (int64_t o = 0; o < options; ++o) {
        Option option;
        const auto form = [&](int v) {
          return static_cast<uint8_t>(rng.below(problem.form_tables[problem.value_table[v]].forms));
        };
        for (int v : node.inputs) option.in.push_back(form(v));
        for (int v : node.outputs) option.out.push_back(form(v));
        option.comm = rng.chance(0.7) ? 0 : shape.gaps && rng.chance(0.05) ? kInf : cost();
        for (int j = 0; j < shape.types; ++j) {
          option.compute.push_back(cost());
          option.memory.push_back(0);
        }
        table.options.push_back(std::move(option));
      }
      node.table = static_cast<int>(problem.option_tables.size());
      known.push_back(node.table);
      problem.option_tables.push_back(std::move(table));
    }
    problem.nodes.push_back(std::move(node));
  }
  return problem;
}

Weights random_weights(uint64_t seed, int types) {
  Rng rng(mix64(seed));
  Weights weights;
  double sum = 0;
  for (int j = 0; j < types; ++j) {
    weights.compute.push_back(rng.uniform());
    sum += weights.compute.back();
  }
  for (double& w : weights.compute) w /= sum;
  return weights;
}

}  // namespace motley::solver
