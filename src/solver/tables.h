// What the folded search looks up: the ways through each kind of step, and what sets of forms are
// worth to one another. All of it depends on the problem and the weights only.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "solver/dual_bounds.h"
#include "solver/forms.h"
#include "solver/order.h"
#include "solver/problem.h"

namespace motley::solver {

// What a state with set `b` in a slot must pay at most to do as well as one with set `a`.
class Upgrade {
 public:
  Upgrade(FormSpace* space, Role role, uint32_t made);
  double operator()(uint32_t b, uint32_t a);

 private:
  static constexpr int kDense = 7;

  double compute(uint32_t b, uint32_t a);

  FormSpace* space_;
  Role role_;
  uint32_t made_;
  std::vector<double> dense_;
};

// One way through a node: an option, and the sets of the touched values afterwards.
struct NodeTransition {
  double cost;
  int option;
  std::vector<uint32_t> sets;
};

// Ways through a node, cheapest first, as many as Limits::max_ways.
struct Ways {
  std::vector<NodeTransition> list;
  bool all = true;
};

// Tables of one kind of step.
struct Kind {
  bool ready = false;
  std::vector<int> options;  // that no other replaces
  std::map<std::vector<uint32_t>, Ways> ways;
};

class Tables {
 public:
  Tables(const Problem& the_problem, const Order& the_order, const Weights& weights,
         const SweepLimits& sweeps, size_t max_ways, std::vector<double>* warm);

  // Better bounds in place of those there are.
  void tighten(const SweepLimits& sweeps, std::vector<double>* warm);

  const Problem& problem;
  const Order& order;
  std::vector<std::vector<double>> prices;  // [option table][option]
  std::unique_ptr<DualBounds> dual_bounds;

  FormSpace& space(int value) { return spaces_[problem.value_table[value]]; }
  Upgrade* upgrade(int value, Role role);
  uint64_t full(int value) const {
    return (uint64_t{1} << problem.form_tables[problem.value_table[value]].forms) - 1;
  }

  // All undominated ways through a node from the given sets of the values it touches.
  const Ways& through(const OrderStep& step, const std::vector<uint32_t>& sets);

 private:
  // Keeps the cheapest max_ways_.
  void cut(Ways* ways) const;
  // Drops transitions that another replaces.
  void prune(const OrderStep& step, std::vector<NodeTransition>* list);
  // Sets required of the touched values, and made, by one option.
  void demands(const OrderStep& step, const Option& option, std::vector<uint32_t>* want,
               std::vector<int>* made) const;
  // Options that no other option replaces at no greater cost, conversions included.
  void prepare(const OrderStep& step, Kind* kind);

  const size_t max_ways_;
  std::vector<FormSpace> spaces_;  // [form table]
  std::vector<Kind> kinds_;
  std::map<std::tuple<int, Role, uint32_t>, std::unique_ptr<Upgrade>> upgrades_;
};

}  // namespace motley::solver
