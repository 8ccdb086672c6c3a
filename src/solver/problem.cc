#include "solver/problem.h"

#include <algorithm>
#include <bit>
#include <unordered_map>

#include "core/error.h"
#include "core/infinity.h"

namespace motley::solver {
namespace {

// Least costs between all forms of a table by chains of conversions, with the first hop of each.
// One more node, the source, reaches the forms of `have` for nothing.
struct Closure {
  Closure(const FormTable& table, uint32_t have) : n(table.forms + 1) {
    for (int a = 0; a < n; ++a) {
      for (int b = 0; b < n; ++b) {
        if (a == b) {
          cost[a][b] = 0;
        } else if (a < n - 1 && b < n - 1) {
          cost[a][b] = table.convert[a * table.forms + b];
        } else {
          cost[a][b] = a == n - 1 && (have >> b & 1) ? 0 : kInfinity;
        }
        hop[a][b] = static_cast<uint8_t>(b);
      }
    }
    for (int k = 0; k < n; ++k) {
      for (int a = 0; a < n; ++a) {
        for (int b = 0; b < n; ++b) {
          if (cost[a][k] + cost[k][b] < cost[a][b]) {
            cost[a][b] = cost[a][k] + cost[k][b];
            hop[a][b] = hop[a][k];
          }
        }
      }
    }
  }

  int n;
  double cost[kMaxForms + 1][kMaxForms + 1];
  uint8_t hop[kMaxForms + 1][kMaxForms + 1];
};

std::vector<int> members(uint32_t set) {
  std::vector<int> list;
  for (; set != 0; set &= set - 1) list.push_back(std::countr_zero(set));
  return list;
}

// tree[set * n + root]: least cost of an arborescence from `root` to a set of terminals. It is
// either a path to another root (via), or two arborescences from one root (split != 0).
class Arborescence {
 public:
  Arborescence(const Closure& closure, std::vector<int> terminals)
      : closure_(closure), terminals_(std::move(terminals)) {
    const int n = closure_.n;
    const uint32_t sets = 1u << terminals_.size();
    cell_.assign(static_cast<size_t>(sets) * n, Cell{});
    std::vector<Cell> joined(n);
    for (uint32_t set = 1; set < sets; ++set) {
      for (int root = 0; root < n; ++root) {
        Cell best;
        if (std::has_single_bit(set)) {
          best.cost = root == terminals_[std::countr_zero(set)] ? 0 : kInfinity;
        } else {
          for (uint32_t part = (set - 1) & set; part > (set ^ part); part = (part - 1) & set) {
            const double cost = at(part, root).cost + at(set ^ part, root).cost;
            if (cost < best.cost) best = {cost, root, part};
          }
        }
        best.via = root;
        joined[root] = best;
      }
      for (int root = 0; root < n; ++root) {
        Cell best = joined[root];
        for (int via = 0; via < n; ++via) {
          const double cost = closure_.cost[root][via] + joined[via].cost;
          if (cost < best.cost) best = {cost, via, joined[via].split};
        }
        at(set, root) = best;
      }
    }
  }

  double cost(int root) const { return cell_[cell_.size() - closure_.n + root].cost; }

  // Calls arc(from, to) for the arcs of the best arborescence, an arc into a form before those out.
  template <typename F>
  void arcs(uint32_t set, int root, F&& arc) const {
    const Cell& cell = cell_[static_cast<size_t>(set) * closure_.n + root];
    for (int at = root; at != cell.via;) {
      const int next = closure_.hop[at][cell.via];
      arc(at, next);
      at = next;
    }
    if (cell.split != 0) {
      arcs(cell.split, cell.via, arc);
      arcs(set ^ cell.split, cell.via, arc);
    }
  }

 private:
  struct Cell {
    double cost = kInfinity;
    int via = 0;
    uint32_t split = 0;
  };
  Cell& at(uint32_t set, int root) { return cell_[static_cast<size_t>(set) * closure_.n + root]; }

  const Closure& closure_;
  std::vector<int> terminals_;
  std::vector<Cell> cell_;
};

}  // namespace

const char* to_string(StopReason reason) {
  switch (reason) {
    case StopReason::kOptimal:
      return "optimal";
    case StopReason::kTimeLimit:
      return "time limit";
    case StopReason::kStateLimit:
      return "state limit";
    case StopReason::kInfeasible:
      return "infeasible";
  }
  return "?";
}

void validate(const Problem& problem) {
  MOTLEY_CHECK(problem.types >= 1, "{} device types", problem.types);
  for (const FormTable& table : problem.form_tables) {
    MOTLEY_CHECK(table.forms >= 1 && table.forms <= kMaxForms, "{} forms", table.forms);
    MOTLEY_CHECK(static_cast<int>(table.convert.size()) == table.forms * table.forms);
    for (int a = 0; a < table.forms; ++a) {
      MOTLEY_CHECK(table.convert[a * table.forms + a] == 0);
      for (int b = 0; b < table.forms; ++b) MOTLEY_CHECK(table.convert[a * table.forms + b] >= 0);
    }
  }
  const int values = static_cast<int>(problem.value_table.size());
  for (int table : problem.value_table) {
    MOTLEY_CHECK(table >= 0 && table < static_cast<int>(problem.form_tables.size()));
  }
  for (const OptionTable& table : problem.option_tables) {
    for (const Option& option : table.options) {
      MOTLEY_CHECK(option.comm >= 0);
      MOTLEY_CHECK(static_cast<int>(option.compute.size()) == problem.types);
      MOTLEY_CHECK(static_cast<int>(option.memory.size()) == problem.types);
      for (double seconds : option.compute) MOTLEY_CHECK(seconds >= 0);
      for (double bytes : option.memory) MOTLEY_CHECK(bytes >= 0);
    }
  }
  std::vector<char> produced(values, 0);
  for (size_t i = 0; i < problem.nodes.size(); ++i) {
    const ProblemNode& node = problem.nodes[i];
    MOTLEY_CHECK(node.table >= 0 && node.table < static_cast<int>(problem.option_tables.size()),
                 "node {} names table {}", i, node.table);
    for (int value : node.inputs) {
      MOTLEY_CHECK(value >= 0 && value < values, "node {} reads value {}", i, value);
      MOTLEY_CHECK(produced[value], "node {} reads value {} before its producer", i, value);
    }
    for (int value : node.outputs) {
      MOTLEY_CHECK(value >= 0 && value < values, "node {} writes value {}", i, value);
      MOTLEY_CHECK(!produced[value], "value {} has two producers", value);
      produced[value] = 1;
    }
    for (const Option& option : problem.option_tables[node.table].options) {
      MOTLEY_CHECK(option.in.size() == node.inputs.size(), "node {}: arity", i);
      MOTLEY_CHECK(option.out.size() == node.outputs.size(), "node {}: arity", i);
      for (size_t k = 0; k < option.in.size(); ++k) {
        MOTLEY_CHECK(option.in[k] < problem.form_tables[problem.value_table[node.inputs[k]]].forms);
      }
      for (size_t k = 0; k < option.out.size(); ++k) {
        MOTLEY_CHECK(option.out[k] <
                     problem.form_tables[problem.value_table[node.outputs[k]]].forms);
      }
    }
  }
  for (int value = 0; value < values; ++value) {
    MOTLEY_CHECK(produced[value], "value {} has no producer", value);
  }
}

double price(const Option& option, const Weights& weights) {
  double sum = option.comm;
  for (size_t j = 0; j < option.compute.size(); ++j) {
    sum += weights.compute[j] * option.compute[j];
    if (!weights.memory.empty()) sum += weights.memory[j] * option.memory[j];
  }
  return sum;
}

double complete(const FormTable& table, int have, uint32_t want, int value,
                std::vector<Conversion>* out) {
  if ((want & ~(1u << have)) == 0) return 0;
  const std::vector<int> terminals = members(want & ~(1u << have));
  const Closure closure(table, 1u << have);
  const Arborescence tree(closure, terminals);
  const double cost = tree.cost(table.forms);
  if (out == nullptr || cost == kInfinity) return cost;
  uint32_t available = 1u << have;
  tree.arcs((1u << terminals.size()) - 1, table.forms, [&](int from, int to) {
    if (available >> to & 1) return;
    available |= 1u << to;
    out->push_back({value, static_cast<uint8_t>(from), static_cast<uint8_t>(to)});
  });
  return cost;
}

double complete_from_set(const FormTable& table, uint32_t have, uint32_t want) {
  if ((want & ~have) == 0) return 0;
  const Closure closure(table, have);
  return Arborescence(closure, members(want & ~have)).cost(table.forms);
}

Solution evaluate(const Problem& problem, const std::vector<int>& option, const Weights& weights) {
  MOTLEY_CHECK(option.size() == problem.nodes.size());
  std::vector<uint8_t> have(problem.value_table.size(), 0);
  std::vector<uint32_t> want(problem.value_table.size(), 0);
  Solution solution;
  for (size_t i = 0; i < problem.nodes.size(); ++i) {
    const ProblemNode& node = problem.nodes[i];
    const Option& chosen = problem.option_tables[node.table].options.at(option[i]);
    solution.price += price(chosen, weights);
    for (size_t k = 0; k < node.inputs.size(); ++k) want[node.inputs[k]] |= 1u << chosen.in[k];
    for (size_t k = 0; k < node.outputs.size(); ++k) have[node.outputs[k]] = chosen.out[k];
  }
  // Values of one table with the same forms are completed alike.
  struct Completion {
    double cost;
    std::vector<Conversion> conversions;
  };
  std::unordered_map<uint64_t, Completion> known;
  static_assert(kMaxForms <= 32);
  for (size_t value = 0; value < have.size(); ++value) {
    if ((want[value] & ~(1u << have[value])) == 0) continue;
    const int table = problem.value_table[value];
    const uint64_t key = (static_cast<uint64_t>(table) * 32 + have[value]) << 32 | want[value];
    auto [it, fresh] = known.try_emplace(key);
    Completion& completion = it->second;
    if (fresh)
      completion.cost = complete(problem.form_tables[table], have[value], want[value],
                                 static_cast<int>(value), &completion.conversions);
    solution.price += completion.cost;
    for (Conversion& c : completion.conversions) {
      c.value = static_cast<int>(value);
      solution.conversions.push_back(c);
    }
  }
  solution.lower_bound = solution.price;
  if (solution.price == kInfinity) {
    solution.conversions.clear();
    return solution;
  }
  solution.option = option;
  solution.stop = StopReason::kOptimal;
  return solution;
}

std::string to_text(const Problem& problem) {
  std::string text = fmt::format("types {}\n", problem.types);
  for (size_t t = 0; t < problem.form_tables.size(); ++t) {
    const FormTable& table = problem.form_tables[t];
    text += fmt::format("form_table {}\n", t);
    for (int a = 0; a < table.forms; ++a) {
      const auto row = table.convert.begin() + a * table.forms;
      text += fmt::format("  {:g}\n", fmt::join(row, row + table.forms, " "));
    }
  }
  for (size_t t = 0; t < problem.option_tables.size(); ++t) {
    text += fmt::format("option_table {}\n", t);
    for (const Option& option : problem.option_tables[t].options) {
      text += fmt::format("  [{}] -> [{}] comm {:g} compute {:g} memory {:g}\n",
                          fmt::join(option.in, " "), fmt::join(option.out, " "), option.comm,
                          fmt::join(option.compute, " "), fmt::join(option.memory, " "));
    }
  }
  for (size_t i = 0; i < problem.nodes.size(); ++i) {
    const ProblemNode& node = problem.nodes[i];
    text += fmt::format("node {}{} table {}", i, node.backward ? " backward" : "", node.table);
    const auto list = [&](const char* name, const std::vector<int>& values) {
      text += fmt::format(" {}", name);
      for (int value : values) text += fmt::format(" {}:f{}", value, problem.value_table[value]);
    };
    list("in", node.inputs);
    list("out", node.outputs);
    text += '\n';
  }
  return text;
}

}  // namespace motley::solver
