#include "solver/greedy.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <unordered_map>
#include <utility>

namespace motley::solver {

namespace {

// A stretch of items and its values, both numbered from 0, while it is eliminated again and again.
class Stretch {
 public:
  // `left`: [value of the wiring] items yet to be eliminated.
  Stretch(const Wiring& wiring, const std::vector<int>& left, const std::vector<int>& items,
          int from, int to) {
    std::unordered_map<int, int> number;
    for (int k = from; k < to; ++k) {
      for (int at = wiring.begin[items[k]]; at < wiring.begin[items[k] + 1]; ++at) {
        const int value = wiring.list[at];
        const auto [it, fresh] = number.try_emplace(value, static_cast<int>(number.size()));
        list_.push_back(it->second);
        if (!fresh) continue;
        uses_.push_back(wiring.uses[value]);
        weight_.push_back(wiring.weight[value]);
        all_left_.push_back(left[value]);
      }
      begin_.push_back(static_cast<int>(list_.size()));
    }
    user_begin_.resize(weight_.size() + 1);
    for (int value : list_) ++user_begin_[value + 1];
    std::partial_sum(user_begin_.begin(), user_begin_.end(), user_begin_.begin());
    std::vector<int> end = user_begin_;
    users_.resize(list_.size());
    for (int k = 0; k < size(); ++k)
      for (int at = begin_[k]; at < begin_[k + 1]; ++at) users_[end[list_[at]]++] = k;
    left_ = all_left_;
    for (int k = 0; k < size(); ++k) all_deltas_.push_back(delta_of(k));
    restart();
  }

  int size() const { return static_cast<int>(begin_.size()) - 1; }

  // Nothing is eliminated.
  void restart() {
    left_ = all_left_;
    delta_ = all_deltas_;
    stale_.assign(size(), false);
    width_ = 0;  // whatever is live already counts as often in every sequence
  }

  // What eliminating an item would change of the width.
  double delta(int item) {
    if (stale_[item]) [[unlikely]]
      delta_[item] = delta_of(item), stale_[item] = false;
    return delta_[item];
  }

  // Returns what the step costs.
  double eliminate(int item) {
    for (int at = begin_[item]; at < begin_[item + 1]; ++at) {
      const int value = list_[at];
      const bool first = left_[value] == uses_[value];
      if (first) width_ += weight_[value];
      if (--left_[value] == 0) width_ -= weight_[value];
      if (first || left_[value] == 1)
        for (int u = user_begin_[value]; u < user_begin_[value + 1]; ++u) stale_[users_[u]] = true;
    }
    return std::exp2(width_);
  }

 private:
  double delta_of(int item) const {
    double sum = 0;
    for (int at = begin_[item]; at < begin_[item + 1]; ++at) {
      const int value = list_[at];
      if (left_[value] == uses_[value]) sum += weight_[value];
      if (left_[value] == 1) sum -= weight_[value];
    }
    return sum;
  }

  std::vector<int> begin_ = {0}, list_;  // values of item k: list_[begin_[k] .. begin_[k + 1])
  std::vector<int> user_begin_, users_;  // items of every value, likewise
  std::vector<int> uses_, all_left_;     // [value]
  std::vector<double> weight_;           // [value]
  std::vector<double> all_deltas_;       // [item]
  std::vector<int> left_;                // [value] now
  std::vector<double> delta_;            // [item] as last worked out
  std::vector<char> stale_;              // [item]
  double width_ = 0;
};

}  // namespace

std::vector<TableForms> forms_of_tables(const Problem& problem) {
  std::vector<TableForms> forms(problem.option_tables.size());
  for (size_t t = 0; t < forms.size(); ++t) {
    for (const Option& option : problem.option_tables[t].options) {
      forms[t].in.resize(option.in.size());
      forms[t].out.resize(option.out.size());
      for (size_t k = 0; k < option.in.size(); ++k) forms[t].in[k] |= 1u << option.in[k];
      for (size_t k = 0; k < option.out.size(); ++k) forms[t].out[k] |= 1u << option.out[k];
    }
  }
  return forms;
}

Wiring::Wiring(const Problem& problem, const std::vector<Item>& items) {
  const auto forms = forms_of_tables(problem);
  const size_t values = problem.value_table.size();
  made.assign(values, 0);
  need.assign(values, 0);
  uses.assign(values, 0);
  weight.assign(values, 0);
  std::vector<int> seen(values, -1);
  for (size_t i = 0; i < items.size(); ++i) {
    for (int n : items[i]) {
      const ProblemNode& node = problem.nodes[n];
      const TableForms& table = forms[node.table];
      for (size_t k = 0; k < table.in.size(); ++k) need[node.inputs[k]] |= table.in[k];
      for (size_t k = 0; k < table.out.size(); ++k) made[node.outputs[k]] |= table.out[k];
      for (const auto* values_of : {&node.inputs, &node.outputs}) {
        for (int value : *values_of) {
          if (seen[value] != static_cast<int>(i)) ++uses[value];
          seen[value] = static_cast<int>(i);
        }
      }
    }
  }
  seen.assign(values, -1);
  begin.push_back(0);
  for (size_t i = 0; i < items.size(); ++i) {
    for (int n : items[i]) {
      const ProblemNode& node = problem.nodes[n];
      for (const auto* values_of : {&node.inputs, &node.outputs}) {
        for (int value : *values_of) {
          if (seen[value] == static_cast<int>(i)) continue;
          seen[value] = static_cast<int>(i);
          if (uses[value] > 1 || items[i].size() == 1) list.push_back(value);
        }
      }
    }
    begin.push_back(static_cast<int>(list.size()));
  }
  for (size_t v = 0; v < values; ++v) {
    weight[v] = std::log2(1.0 + std::popcount(made[v] | need[v]));
  }
}

std::vector<int> Greedy::improve(const std::vector<int>& items, int from, int to,
                                 StretchMemo* memo) const {
  return memo ? memo->of(look_of(items, from, to), [&] { return improve(items, from, to); })
              : improve(items, from, to);
}

std::vector<int> Greedy::improve(const std::vector<int>& items, int from, int to) const {
  Stretch stretch(wiring_, left_, items, from, to);
  const int count = to - from;
  std::vector<int> best(count), window, chosen;
  std::iota(best.begin(), best.end(), 0);
  double best_cost = 0;
  for (int k = 0; k < count; ++k) best_cost += stretch.eliminate(k);
  Rng rng(options_.seed);
  for (int restart = 0, idle = 0; restart < options_.restarts && idle < options_.idle;
       ++restart, ++idle) {
    stretch.restart();
    const double noise = restart == 0 ? 0 : 0.5 * (1 + restart % 6);
    int next = std::min(options_.window, count);  // to come into the window
    window.resize(next);
    std::iota(window.begin(), window.end(), 0);
    chosen.clear();
    double cost = 0;
    while (!window.empty() && cost < best_cost) {
      size_t pick = 0;
      double least = std::numeric_limits<double>::infinity();
      for (size_t c = 0; c < window.size(); ++c) {
        const double score = stretch.delta(window[c]) + 0.02 * static_cast<double>(c) +
                             (noise > 0 ? noise * rng.uniform() : 0);
        const bool less = score < least;  // as often as not: without a branch
        least = less ? score : least;
        pick = less ? c : pick;
      }
      chosen.push_back(window[pick]);
      cost += stretch.eliminate(window[pick]);
      window.erase(window.begin() + static_cast<int64_t>(pick));
      if (next < count) window.push_back(next++);
    }
    if (window.empty() && cost < best_cost) {
      best_cost = cost;
      best = chosen;
      idle = 0;
    }
  }
  return best;
}

// All that improve() looks at.
std::vector<int> Greedy::look_of(const std::vector<int>& items, int from, int to) const {
  std::vector<int> look;
  std::unordered_map<int, int> number;
  for (int k = from; k < to; ++k) {
    for (int at = wiring_.begin[items[k]]; at < wiring_.begin[items[k] + 1]; ++at) {
      const int value = wiring_.list[at];
      const auto [it, fresh] = number.try_emplace(value, static_cast<int>(number.size()));
      look.push_back(it->second);
      if (fresh)
        look.insert(look.end(), {left_[value], left_[value] == wiring_.uses[value],
                                 std::popcount(wiring_.made[value] | wiring_.need[value])});
    }
    look.push_back(-1);
  }
  return look;
}

std::vector<int> StretchMemo::of(std::vector<int> key,
                                 const std::function<std::vector<int>()>& improve) {
  std::unique_lock lock(mutex_);
  if (const auto it = known_.find(key); it != known_.end()) return ++reused_, it->second;
  lock.unlock();
  std::vector<int> sequence = improve();
  lock.lock();
  return known_.try_emplace(std::move(key), std::move(sequence)).first->second;
}

}  // namespace motley::solver
