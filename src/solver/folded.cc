#include "solver/folded.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/infinity.h"
#include "solver/frontier.h"
#include "solver/tables.h"

namespace motley::solver {
namespace {

constexpr int kBeam = 500;    // states kept once time is up
constexpr int kLookBack = 4;  // block boundaries compared with the newest

// Of the bound: how much costlier than it a state may be in the first pass, and the factor of passes
// to come.
constexpr double kSlack = 1e-7;
constexpr double kSlackGrowth = 3;

// States for each step outside of repeats that a search may expand with a tight bound in any case.
constexpr int64_t kTightByStep = 32;

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

template <int W>
class Search {
 public:
  Search(const Problem& problem, const Order& order, const KeyLayout& layout, Tables* tables,
         const Limits& limits, double start)
      : problem_(problem),
        order_(order),
        layout_(layout),
        limits_(limits),
        start_(start),
        cap_(std::max<int64_t>(1, limits.max_states)),
        tables_(*tables),
        history_(order.steps.size()) {}

  // Gives up, without an answer, once `most_states` are expanded.
  std::optional<Solution> run(const Weights& weights, int64_t most_states) {
    most_states_ = most_states;
    const double bound = tables_.dual_bounds->bound();
    if (bound == kInfinity) return finish(Solution{{}, {}, kInfinity, kInfinity});
    Solution best;
    best.price = kInfinity;
    double proven = 0;  // beyond the bound
    for (double slack = kSlack * bound;;) {
      const double cost = pass(slack);
      if (expanded_ > most_states_) return std::nullopt;
      if (cost < kInfinity) {
        Solution solution = evaluate(problem_, replay(), weights);
        // Where states were dropped, its values may be completed at less than on the way that is
        // left.
        const double costlier = bound + cost - solution.price;
        MOTLEY_CHECK(
            (lost_ < kInfinity ? -costlier : std::abs(costlier)) <= 1e-9 * solution.price + 1e-300,
            "search says {}, its program costs {}", bound + cost, solution.price);
        if (solution.price < best.price) best = std::move(solution);
      }
      const double dropped = std::min(lost_, pruned_);
      proven = std::max(proven, std::min(cost, dropped));
      best.lower_bound = std::min(best.price, bound + proven);
      if (cost <= dropped) best.lower_bound = best.price;
      const bool limited = lost_ < pruned_ && best.price < kInfinity;
      if (cost <= dropped || limited || slack == kInfinity) break;
      slack *= kSlackGrowth;
      // Whatever costs more than the best so far may go.
      const double gap = best.price - bound;
      if (gap < slack) slack = gap + 1e-12 * bound;
      if (!(slack < 1e3 * bound)) slack = kInfinity;
    }
    if (best.lower_bound < best.price) {
      best.stop = reason_;
    } else {
      best.stop = best.price < kInfinity ? StopReason::kOptimal : StopReason::kInfeasible;
    }
    return finish(std::move(best));
  }

 private:
  struct Skip {
    int at, length, times;  // before step `at + length * times`, `times` copies of the steps before
  };

  // A frontier at the end of a block in terms that do not depend on which block it is.
  struct Boundary {
    std::vector<std::vector<int>> slots;  // sorted descriptions of the live values
    std::vector<std::vector<uint32_t>> sets;
    std::vector<double> costs;
    int step;
    double offset;
  };

  Solution finish(Solution solution) const {
    solution.states = expanded_;
    solution.seconds = now_s() - start_;
    return solution;
  }

  // One search that drops states costlier than `slack`. Returns the cost of the state it ends with,
  // infinity if none is left.
  double pass(double slack) {
    frontier_ = std::make_unique<Frontier<W>>(&tables_, layout_, limits_.deadline);
    skips_.clear();
    offset_ = 0;
    lost_ = pruned_ = kInfinity;
    size_t repeat = 0;
    int block = 0;
    std::vector<Boundary> boundaries;
    for (int k = 0; k < static_cast<int>(order_.steps.size());) {
      const bool in_repeat = repeat < order_.repeats.size() && k >= order_.repeats[repeat].begin;
      expanded_ += static_cast<int64_t>(frontier_->size());
      double lost = kInfinity;
      pruned_ = std::min(pruned_,
                         offset_ + frontier_->advance(order_.steps[k], slack, &history_[k], &lost));
      lost_ = std::min(lost_, offset_ + lost);
      truncate(k++);
      if (frontier_->size() == 0 || expanded_ > most_states_) return kInfinity;
      if (!in_repeat) continue;
      const Repeat& r = order_.repeats[repeat];
      if (k != r.begin + (block + 1) * r.period) continue;
      ++block;
      // Between these boundaries the bounds of what is left are the same.
      if (lost_ == kInfinity && block > kEndBlocks && block < r.count - kEndBlocks) {
        k = boundary(r, k, &block, &boundaries);
      }
      if (block == r.count) {
        ++repeat;
        block = 0;
        boundaries.clear();
      }
    }
    MOTLEY_CHECK(frontier_->size() == 1);
    return offset_ + frontier_->costs[0];
  }

  void truncate(int k) {
    limits_.deadline.check(static_cast<int64_t>(frontier_->size()));
    if (cap_ > kBeam && (now_s() - start_ > limits_.time_limit_s || limits_.deadline.near())) {
      cap_ = kBeam;
      reason_ = StopReason::kTimeLimit;
    }
    if (static_cast<int64_t>(frontier_->size()) <= cap_) return;
    lost_ = std::min(lost_, offset_ + frontier_->truncate(static_cast<size_t>(cap_), &history_[k]));
  }

  // The live values after step k - 1 in an order that is the same at every boundary of a repeat:
  // those touched in the last block by where, then the others by value.
  std::vector<std::pair<std::vector<int>, int>> describe(const Repeat& r, int k) const {
    std::vector<std::pair<std::vector<int>, int>> slots;
    std::unordered_map<int, std::pair<int, int>> where;
    for (int s = k - r.period; s < k; ++s) {
      for (int t = order_.steps[s].touch_begin; t < order_.steps[s].touch_end; ++t) {
        where[order_.touches[t].value] = {s - (k - r.period), t - order_.steps[s].touch_begin};
      }
    }
    for (size_t i = 0; i < frontier_->live.size(); ++i) {
      const Live& live = frontier_->live[i];
      const auto it = where.find(live.value);
      std::vector<int> key = it == where.end()
                                 ? std::vector<int>{1, live.value, 0}
                                 : std::vector<int>{0, it->second.first, it->second.second};
      key.push_back(problem_.value_table[live.value]);
      key.push_back(static_cast<int>(live.role));
      key.push_back(static_cast<int>(live.need));
      slots.emplace_back(std::move(key), static_cast<int>(i));
    }
    std::sort(slots.begin(), slots.end());
    return slots;
  }

  // At the end of a block: if the frontier repeats, skips blocks. Returns the step to go on with.
  int boundary(const Repeat& r, int k, int* block, std::vector<Boundary>* boundaries) {
    const auto slots = describe(r, k);
    Boundary b;
    b.step = k;
    for (const auto& [key, at] : slots) b.slots.push_back(key);
    const double least = *std::min_element(frontier_->costs.begin(), frontier_->costs.end());
    offset_ += least;
    b.offset = offset_;
    for (double& cost : frontier_->costs) cost -= least;
    std::vector<std::pair<std::vector<uint32_t>, int>> states;
    for (size_t s = 0; s < frontier_->keys.size(); ++s) {
      std::vector<uint32_t> sets;
      for (const auto& [key, at] : slots)
        sets.push_back(frontier_->set_of(static_cast<int>(s), frontier_->live[at]));
      states.emplace_back(std::move(sets), static_cast<int>(s));
    }
    std::sort(states.begin(), states.end());
    // Number the states in this order, so that equal frontiers have equal numbers.
    StepRecord& record = history_[k - 1];
    StepRecord sorted;
    std::vector<Key<W>> sorted_keys;
    for (auto& [sets, s] : states) {
      b.sets.push_back(std::move(sets));
      b.costs.push_back(frontier_->costs[s]);
      sorted_keys.push_back(frontier_->keys[s]);
      sorted.parent.push_back(record.parent[s]);
      sorted.option.push_back(record.option[s]);
    }
    record = std::move(sorted);
    frontier_->keys = std::move(sorted_keys);
    frontier_->costs = b.costs;

    int go_on = k;
    for (size_t back = 0; back < boundaries->size() && back < kLookBack; ++back) {
      const Boundary& old = (*boundaries)[boundaries->size() - 1 - back];
      if (old.slots != b.slots || old.sets != b.sets) continue;
      const double scale = 1e-12 * tables_.dual_bounds->bound();
      bool equal = true;
      for (size_t s = 0; s < b.costs.size(); ++s) {
        equal &= std::abs(b.costs[s] - old.costs[s]) <= scale;
      }
      if (!equal) continue;
      const int cycle = static_cast<int>(back) + 1;
      const int times = (r.count - kEndBlocks - 1 - *block) / cycle;
      if (times == 0) continue;
      go_on = k + times * cycle * r.period;
      *block += times * cycle;
      offset_ += times * (b.offset - old.offset);
      skips_.push_back({k, cycle * r.period, times});
      move_to(r, slots, b, go_on);
      break;
    }
    boundaries->push_back(std::move(b));
    return go_on;
  }

  // Makes the frontier described by `b` the one after step k - 1.
  void move_to(const Repeat& r, const std::vector<std::pair<std::vector<int>, int>>& slots,
               const Boundary& b, int k) {
    const int shift = k - b.step;
    std::vector<Live> live(frontier_->live.size());
    for (size_t i = 0; i < slots.size(); ++i) {
      const auto& key = slots[i].first;
      live[i] = frontier_->live[slots[i].second];
      if (key[0] == 1) continue;
      const int t = order_.steps[b.step - r.period + key[1] + shift].touch_begin + key[2];
      const Touch& touch = order_.touches[t];
      MOTLEY_CHECK(touch.after == live[i].role && touch.need == live[i].need);
      live[i].value = touch.value;
      live[i].touch = t;
      live[i].place = layout_.place[t];
    }
    frontier_->live = std::move(live);
    for (size_t s = 0; s < frontier_->keys.size(); ++s) {
      frontier_->keys[s] = Key<W>{};
      for (size_t i = 0; i < frontier_->live.size(); ++i) {
        frontier_->keys[s].word[frontier_->live[i].place.word] |= uint64_t{b.sets[s][i]}
                                                                  << frontier_->live[i].place.shift;
      }
    }
  }

  // The option of every node on the way to the only state that is left.
  std::vector<int> replay() const {
    std::vector<int> option(problem_.nodes.size(), -1);
    int state = 0;
    size_t skip = skips_.size();
    const auto back = [&](int k, int shift) {
      option[order_.steps[k + shift].node] = history_[k].option[state];
      state = history_[k].parent[state];
    };
    for (int k = static_cast<int>(order_.steps.size()); k > 0;) {
      if (skip > 0 && k == skips_[skip - 1].at + skips_[skip - 1].length * skips_[skip - 1].times) {
        const Skip& s = skips_[--skip];
        for (int times = s.times; times > 0; --times) {
          for (int i = 1; i <= s.length; ++i) back(s.at - i, s.length * times);
        }
        k = s.at;
      } else {
        back(--k, 0);
      }
    }
    return option;
  }

  const Problem& problem_;
  const Order& order_;
  const KeyLayout& layout_;
  const Limits& limits_;
  const double start_;
  int64_t cap_;
  StopReason reason_ = StopReason::kStateLimit;
  double lost_ = kInfinity;    // least cost of the states dropped by a limit
  double pruned_ = kInfinity;  // likewise by the slack
  double offset_ = 0;          // subtracted from all costs
  int64_t expanded_ = 0;
  int64_t most_states_ = 0;

  Tables& tables_;
  std::unique_ptr<Frontier<W>> frontier_;
  std::vector<StepRecord> history_;  // [step]
  std::vector<Skip> skips_;
};

// Steps, one block in the place of the middle of each repeat.
int64_t steps_of(const Order& order) {
  auto steps = static_cast<int64_t>(order.steps.size());
  for (const Repeat& r : order.repeats)
    steps -= static_cast<int64_t>(std::max(0, r.count - 2 * kEndBlocks - 1)) * r.period;
  return steps;
}

template <int W>
Solution search(const Problem& problem, const Order& order, const KeyLayout& layout,
                const Weights& weights, const Limits& limits, double start, WarmStart* warm) {
  // A rough bound is enough where few states are near the best; where they are many, a tight one
  // pays.
  Tables tables(problem, order, weights, {limits.rough, 1, limits.sweeps, limits.deadline},
                limits.max_ways, warm);
  const auto run = [&](int64_t most_states) {
    return Search<W>(problem, order, layout, &tables, limits, start).run(weights, most_states);
  };
  if (auto solution = run(limits.rough_states)) return *solution;
  tables.tighten({limits.tight, 2, limits.sweeps, limits.deadline}, warm);
  if (limits.max_sweeps > limits.sweeps) {
    if (auto solution = run(std::max(limits.tight_states, kTightByStep * steps_of(order))))
      return *solution;
    tables.tighten({limits.tight, 2, limits.max_sweeps, limits.deadline}, warm);
  }
  return *run(std::numeric_limits<int64_t>::max());
}

}  // namespace

Solution solve_folded(const Problem& problem, const Order& order, const Weights& weights,
                      const Limits& limits, WarmStart* warm) {
  MOTLEY_CHECK(order.steps.size() == problem.nodes.size());
  MOTLEY_CHECK(static_cast<int>(weights.compute.size()) == problem.types);
  const double start = now_s();
  const KeyLayout layout(problem, order);
  WarmStart cold;
  if (warm == nullptr) warm = &cold;
  if (layout.words <= 1) return search<1>(problem, order, layout, weights, limits, start, warm);
  if (layout.words <= 2) return search<2>(problem, order, layout, weights, limits, start, warm);
  if (layout.words <= 8) return search<8>(problem, order, layout, weights, limits, start, warm);
  MOTLEY_CHECK(layout.words <= 64, "{} words of live values", layout.words);
  return search<64>(problem, order, layout, weights, limits, start, warm);
}

}  // namespace motley::solver
