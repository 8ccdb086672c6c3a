#include "solver/tables.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "core/infinity.h"

namespace motley::solver {
namespace {}  // namespace

Upgrade::Upgrade(FormSpace* space, Role role, uint32_t made)
    : space_(space), role_(role), made_(made) {
  if (space->forms() <= kDense) {
    dense_.assign(size_t{1} << (2 * space->forms()), std::numeric_limits<double>::quiet_NaN());
  }
}

double Upgrade::operator()(uint32_t b, uint32_t a) {
  if (dense_.empty()) return compute(b, a);
  double& memo = dense_[(b << space_->forms()) | a];
  if (std::isnan(memo)) memo = compute(b, a);
  return memo;
}

double Upgrade::compute(uint32_t b, uint32_t a) {
  if (role_ == Role::kHave) return space_->steiner(b, a);
  // Whatever the producer makes, having met a's requirements it can go on to meet b's.
  double most = 0;
  for (uint32_t made = made_; made != 0; made &= made - 1) {
    most = std::max(most, space_->steiner((made & -made) | a, b));
  }
  return most;
}

Tables::Tables(const Problem& the_problem, const Order& the_order, const Weights& weights,
               const SweepLimits& sweeps, size_t max_ways, std::vector<double>* warm)
    : problem(the_problem), order(the_order), max_ways_(max_ways), kinds_(order.kinds) {
  spaces_.reserve(problem.form_tables.size());
  for (const FormTable& table : problem.form_tables) spaces_.emplace_back(table);
  prices.resize(problem.option_tables.size());
  for (size_t t = 0; t < prices.size(); ++t) {
    for (const Option& option : problem.option_tables[t].options) {
      prices[t].push_back(price(option, weights));
    }
  }
  tighten(sweeps, warm);
}

void Tables::tighten(const SweepLimits& sweeps, std::vector<double>* warm) {
  dual_bounds = std::make_unique<DualBounds>(problem, order, &spaces_, prices, sweeps, warm);
}

Upgrade* Tables::upgrade(int value, Role role) {
  auto& found =
      upgrades_[{problem.value_table[value], role, role == Role::kNeed ? order.made[value] : 0}];
  if (!found) found = std::make_unique<Upgrade>(&space(value), role, order.made[value]);
  return found.get();
}

const Ways& Tables::through(const OrderStep& step, const std::vector<uint32_t>& sets) {
  Kind& kind = kinds_[step.kind];
  if (!kind.ready) prepare(step, &kind);
  const auto [it, fresh] = kind.ways.try_emplace(sets);
  Ways& result = it->second;
  if (!fresh) return result;
  const int table = problem.nodes[step.node].table;
  std::vector<uint32_t> want;
  std::vector<int> made;
  for (int o : kind.options) {
    demands(step, problem.option_tables[table].options[o], &want, &made);
    Ways partial{{{prices[table][o], o, {}}}};
    std::vector<NodeTransition> next;
    for (size_t t = 0; t < sets.size() && !partial.list.empty(); ++t) {
      const Touch& touch = order.touches[step.touch_begin + t];
      FormSpace& forms = space(touch.value);
      std::vector<Grown> ways;
      if (touch.before == Role::kHave) {
        ways = forms.grow(sets[t], want[t], touch.need);
      } else if (made[t] >= 0) {
        ways = forms.grow(1u << made[t], sets[t], touch.need);
      } else {
        ways.push_back({forms.required(sets[t] | want[t]), 0});
      }
      next.clear();
      for (const NodeTransition& head : partial.list) {
        for (const Grown& way : ways) {
          next.push_back(head);
          next.back().cost += way.cost;
          next.back().sets.push_back(touch.after == Role::kAbsent ? 0 : way.forms);
        }
      }
      partial.list.swap(next);
      cut(&partial);
    }
    result.list.insert(result.list.end(), partial.list.begin(), partial.list.end());
    result.all = result.all && partial.all;
    cut(&result);
  }
  prune(step, &result.list);
  return result;
}

void Tables::cut(Ways* ways) const {
  if (ways->list.size() <= max_ways_) return;
  std::stable_sort(
      ways->list.begin(), ways->list.end(),
      [](const NodeTransition& a, const NodeTransition& b) { return a.cost < b.cost; });
  ways->list.resize(max_ways_);
  ways->all = false;
}

void Tables::prune(const OrderStep& step, std::vector<NodeTransition>* list) {
  std::stable_sort(
      list->begin(), list->end(),
      [](const NodeTransition& a, const NodeTransition& b) { return a.cost < b.cost; });
  std::vector<NodeTransition> kept;
  for (NodeTransition& a : *list) {
    bool dominated = false;
    for (const NodeTransition& b : kept) {
      double cost = b.cost;
      for (size_t t = 0; t < a.sets.size(); ++t) {
        const Touch& touch = order.touches[step.touch_begin + t];
        if (touch.after == Role::kAbsent || a.sets[t] == b.sets[t]) continue;
        cost += (*upgrade(touch.value, touch.after))(b.sets[t], a.sets[t]);
      }
      if (cost <= a.cost) {
        dominated = true;
        break;
      }
    }
    if (!dominated) kept.push_back(std::move(a));
  }
  *list = std::move(kept);
}

void Tables::demands(const OrderStep& step, const Option& option, std::vector<uint32_t>* want,
                     std::vector<int>* made) const {
  const ProblemNode& node = problem.nodes[step.node];
  const int touches = step.touch_end - step.touch_begin;
  want->assign(touches, 0);
  made->assign(touches, -1);
  for (int t = 0; t < touches; ++t) {
    const int value = order.touches[step.touch_begin + t].value;
    for (size_t i = 0; i < node.inputs.size(); ++i) {
      if (node.inputs[i] == value) (*want)[t] |= 1u << option.in[i];
    }
    for (size_t o = 0; o < node.outputs.size(); ++o) {
      if (node.outputs[o] == value) (*made)[t] = option.out[o];
    }
  }
}

void Tables::prepare(const OrderStep& step, Kind* kind) {
  kind->ready = true;
  const int table = problem.nodes[step.node].table;
  const auto& options = problem.option_tables[table].options;
  std::vector<int> by_price;
  for (size_t o = 0; o < options.size(); ++o) {
    if (prices[table][o] < kInfinity) by_price.push_back(static_cast<int>(o));
  }
  std::stable_sort(by_price.begin(), by_price.end(),
                   [&](int a, int b) { return prices[table][a] < prices[table][b]; });
  std::vector<uint32_t> want_a, want_b;
  std::vector<int> made_a, made_b;
  for (int a : by_price) {
    demands(step, options[a], &want_a, &made_a);
    bool dominated = false;
    for (int b : kind->options) {
      demands(step, options[b], &want_b, &made_b);
      double cost = prices[table][b];
      for (size_t t = 0; t < want_a.size(); ++t) {
        const Touch& touch = order.touches[step.touch_begin + t];
        if (want_b[t] != 0) cost += space(touch.value).steiner(want_a[t], want_b[t]);
        const bool used = touch.before != Role::kAbsent || touch.after != Role::kAbsent;
        if (made_a[t] >= 0 && used) {
          cost += space(touch.value).steiner(1u << made_b[t], 1u << made_a[t]);
        }
      }
      if (cost <= prices[table][a]) {
        dominated = true;
        break;
      }
    }
    if (!dominated) kind->options.push_back(a);
  }
}

}  // namespace motley::solver
