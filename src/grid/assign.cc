#include "grid/assign.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "core/error.h"

namespace motley::grid {

namespace {

constexpr Seconds kNever = std::numeric_limits<double>::infinity();

// Prefix sums, and the tests and prices of a range [i, j) on stage s.
class Ranges {
 public:
  explicit Ranges(const AssignProblem& p)
      : problem_(p), stages_(p.stages()), layers_(p.layers()), needs_block_(false) {
    MOTLEY_CHECK(stages_ >= 1 && layers_ >= 1);
    MOTLEY_CHECK(static_cast<int>(p.transfer.size()) >= stages_ - 1);
    auto sums = [&](const std::vector<std::vector<double>>& rows) {
      std::vector<std::vector<double>> out;
      for (const auto& row : rows) {
        out.emplace_back(layers_ + 1, 0.0);
        for (int l = 0; l < layers_; ++l) out.back()[l + 1] = out.back()[l] + row[l];
      }
      return out;
    };
    time_ = sums(p.time);
    if (!p.memory.empty()) memory_ = sums(p.memory);
    blocks_.assign(layers_ + 1, 0);
    for (int l = 0; l < layers_; ++l)
      blocks_[l + 1] = blocks_[l] + (p.block.empty() || p.block[l] ? 1 : 0);
    needs_block_ = blocks_[layers_] >= stages_;
  }

  int stages() const { return stages_; }
  int layers() const { return layers_; }
  bool allowed(int s, int i, int j) const {
    if (i >= j || (needs_block_ && blocks_[j] == blocks_[i])) return false;
    return !memory_over(s, i, j);
  }
  bool memory_over(int s, int i, int j) const {
    return !memory_.empty() && memory_[s][j] - memory_[s][i] > problem_.limit[s];
  }
  // Of all layers, each on its fastest stage.
  Seconds least_time() const {
    Seconds sum = 0;
    for (int l = 0; l < layers_; ++l) {
      Seconds least = kNever;
      for (int s = 0; s < stages_; ++s) least = std::min(least, problem_.time[s][l]);
      sum += least;
    }
    return sum;
  }
  // What allowed() and period() look at for ranges [., j) on stage s.
  struct Row {
    const double *time, *memory;  // sums up to a layer; no memory: no limit
    const int* blocks;            // likewise; null: none is needed
    const Seconds* into;          // behind a layer; of the stages but the first
    Seconds out;
    Bytes limit;
    bool blocking;
  };
  Row row(int s, int j) const {
    return {time_[s].data(),
            memory_.empty() ? nullptr : memory_[s].data(),
            needs_block_ ? blocks_.data() : nullptr,
            s > 0 ? problem_.transfer[s - 1].data() : nullptr,
            s + 1 < stages_ ? problem_.transfer[s][j - 1] : 0,
            memory_.empty() ? 0 : problem_.limit[s],
            problem_.blocking};
  }
  Seconds time(int s, int i, int j) const { return time_[s][j] - time_[s][i]; }
  Seconds into(int s, int i) const { return s > 0 ? problem_.transfer[s - 1][i - 1] : 0; }
  Seconds period(int s, int i, int j) const {
    const Seconds in = into(s, i), out = s + 1 < stages_ ? problem_.transfer[s][j - 1] : 0;
    // A link of its own carries one direction at a time: about half of both ways.
    return problem_.blocking ? time(s, i, j) + in + out : std::max(time(s, i, j), in / 2);
  }
  // The least period above `lo` of a range that a stage may have.
  Seconds next_period(Seconds lo) const {
    Seconds least = kNever;
    for (int s = 0; s < stages_; ++s) {
      const int last = layers_ - (stages_ - 1 - s), shortest = s + 1 == stages_ ? layers_ : s + 1;
      int above = shortest;  // of ranges that begin at i or later, none that ends before is above
      for (int i = s; i <= (s == 0 ? 0 : last - 1); ++i) {
        above = std::max(above, i + 1);
        if (into(s, i) / 2 <= lo && !problem_.blocking)
          while (above <= last && time(s, i, above) <= lo) ++above;
        // The end that is nearest; what is blocked also depends on what an end hands on.
        for (int j = problem_.blocking || into(s, i) / 2 > lo ? std::max(shortest, i + 1) : above;
             j <= last && !memory_over(s, i, j); ++j) {
          if (!allowed(s, i, j)) continue;
          const Seconds at = period(s, i, j);
          if (at > lo) least = std::min(least, at);
          if (at > lo && !problem_.blocking) break;
        }
      }
    }
    return least;
  }

 private:
  const AssignProblem& problem_;
  int stages_, layers_;
  bool needs_block_;
  std::vector<std::vector<double>> time_, memory_;
  std::vector<int> blocks_;
};

// One DP over (stage, end of its range). Minimax: least largest period. Sum: least sum of times and
// transfers with periods at most `threshold`.
struct Solved {
  Seconds value = kNever, period = kNever;
  std::vector<int> cuts;  // end of each stage
};

class Solver {
 public:
  explicit Solver(const Ranges& ranges)
      : r_(ranges),
        width_(r_.layers() + 1),
        best_(static_cast<size_t>(r_.stages()) * width_),
        key_(width_),
        queue_(width_),
        from_(best_.size()) {}

  Solved operator()(bool minimax, Seconds threshold) {
    const int stages = r_.stages(), layers = r_.layers();
    std::fill(best_.begin(), best_.end(), kNever);
    for (int s = 0; s < stages; ++s) {
      const int first = s + 1 == stages ? layers : s + 1, last = layers - (stages - 1 - s);
      if (s > 0 && !minimax && !r_.row(s, first).blocking) {
        end_stage(s, first, last, threshold);
        continue;
      }
      for (int j = first; j <= last; ++j)
        minimax ? end_stage<true>(s, j, threshold) : end_stage<false>(s, j, threshold);
    }
    Solved solved;
    solved.value = best_[at(stages - 1, layers)];
    if (solved.value == kNever) return solved;
    solved.cuts.resize(stages);
    solved.period = 0;
    for (int s = stages - 1, j = layers; s >= 0; --s) {
      solved.cuts[s] = j;
      const int i = from_[at(s, j)];
      solved.period = std::max(solved.period, r_.period(s, i, j));
      j = i;
    }
    return solved;
  }

 private:
  size_t at(int s, int j) const { return static_cast<size_t>(s) * width_ + j; }

  // The best beginning of stage s that ends in front of layer j.
  template <bool minimax>
  void end_stage(int s, int j, Seconds threshold) {
    const Ranges::Row row = r_.row(s, j);
    const Seconds* before = s == 0 ? nullptr : &best_[at(s - 1, 0)];
    Seconds best = kNever;
    int from = -1;
    const int longest = s == 0 ? 0 : s;
    for (int i = s == 0 ? 0 : j - 1; i >= longest; --i) {
      const Seconds time = row.time[j] - row.time[i];
      // Longer ranges only take more time and memory.
      if (time > (minimax ? best : threshold)) break;
      if (row.memory && row.memory[j] - row.memory[i] > row.limit) break;
      const Seconds so_far = before ? before[i] : 0;
      if (so_far == kNever || (row.blocks && row.blocks[j] == row.blocks[i])) continue;
      const Seconds into = before ? row.into[i - 1] : 0;
      const Seconds period = row.blocking ? time + into + row.out : std::max(time, into / 2);
      if (period > threshold) continue;
      const Seconds value = minimax ? std::max(so_far, period) : so_far + time + into;
      if (value < best) {
        best = value;
        from = i;
      }
    }
    best_[at(s, j)] = best;
    from_[at(s, j)] = from;
  }

  // The same for all ends from `first` to `last`, of sums, where links have no part in periods. Which
  // of two beginnings is better does not depend on the end. So they wait in a queue, in their order,
  // each worse than those before it: the first that is not too far from an end is its best. O(ends).
  void end_stage(int s, int first, int last, Seconds threshold) {
    const Ranges::Row row = r_.row(s, first);
    const Seconds *time = row.time, *into = row.into, *before = &best_[at(s - 1, 0)];
    // Ranges that are too long are so for later ends too; `next`: the first that is too short.
    int longest = s, next = s, head = 0, tail = 0;
    for (int j = first; j <= last; ++j) {
      for (; next < j && !(row.blocks && row.blocks[j] == row.blocks[next]); ++next) {
        if (before[next] == kNever || into[next - 1] / 2 > threshold) continue;
        key_[next] = before[next] - time[next] + into[next - 1];
        while (tail > head && key_[queue_[tail - 1]] >= key_[next]) --tail;
        queue_[tail++] = next;
      }
      while (longest < j && (time[j] - time[longest] > threshold ||
                             (row.memory && row.memory[j] - row.memory[longest] > row.limit)))
        ++longest;
      while (head < tail && queue_[head] < longest) ++head;
      const int from = head < tail ? queue_[head] : -1;
      best_[at(s, j)] = from < 0 ? kNever : before[from] + (time[j] - time[from]) + into[from - 1];
      from_[at(s, j)] = from;
    }
  }

  const Ranges& r_;
  const int width_;
  std::vector<Seconds> best_;  // [stage, end]
  std::vector<Seconds> key_;   // [beginning] of the stage at hand: the order of its sums
  std::vector<int> queue_;     // beginnings
  std::vector<int> from_;
};

}  // namespace

Assignment price_assignment(const AssignProblem& problem, const std::vector<int>& stages) {
  Ranges r(problem);
  Assignment a;
  a.stages = stages;
  if (static_cast<int>(stages.size()) != r.stages()) return a;
  Seconds sum = 0;
  int at = 0;
  for (int s = 0; s < r.stages(); ++s) {
    const int end = at + stages[s];
    if (end > r.layers() || !r.allowed(s, at, end)) return a;
    sum += r.time(s, at, end) + r.into(s, at);
    a.period = std::max(a.period, r.period(s, at, end));
    at = end;
  }
  if (at != r.layers()) return a;
  a.feasible = true;
  a.cost = (problem.micro_batches - 1) * a.period + sum;
  return a;
}

Assignment assign_layers(const AssignProblem& problem) {
  Ranges r(problem);
  const double repeats = problem.micro_batches - 1;
  Assignment best;
  best.cost = kNever;
  auto keep = [&](const Solved& s, Seconds sum) {
    ++best.solves;
    if (s.value == kNever) return;
    const Seconds cost = repeats * s.period + sum;
    if (cost >= best.cost) return;
    best.feasible = true;
    best.cost = cost;
    best.period = s.period;
    best.stages.clear();
    int at = 0;
    for (int end : s.cuts) {
      best.stages.push_back(end - at);
      at = end;
    }
  };
  if (r.stages() > r.layers()) return {};
  Solver solve(r);
  const Solved least = solve(true, kNever);
  ++best.solves;
  if (least.value == kNever) return {};
  const Solved low = solve(false, least.period);
  keep(low, low.value);
  // Longer periods cannot pay for themselves.
  const Seconds longest =
      repeats > 0 ? std::max(least.period, (best.cost - r.least_time()) / repeats * (1 + 1e-12))
                  : kNever;
  const Solved high = solve(false, longest);
  keep(high, high.value);
  // Open intervals of periods (lo, hi) whose best sum is at least `sum`.
  struct Interval {
    Seconds lo, hi, sum;
  };
  std::vector<Interval> open = {{low.period, high.period, high.value}};
  while (!open.empty()) {
    const Interval at = open.back();
    open.pop_back();
    if (at.lo >= at.hi || repeats * at.lo + at.sum >= best.cost * (1 - 1e-12)) continue;
    const Seconds next = r.next_period(at.lo);
    if (next >= at.hi || repeats * next + at.sum >= best.cost * (1 - 1e-12)) continue;
    Seconds middle = at.lo + (at.hi - at.lo) / 2;
    while (middle < next) middle += (at.hi - middle) / 2;
    const Solved s = solve(false, middle);
    keep(s, s.value);
    open.push_back({middle, at.hi, at.sum});
    if (s.value != kNever) open.push_back({at.lo, std::min(middle, s.period), s.value});
  }
  return best;
}

std::vector<int> uniform_layers(const std::vector<bool>& block, int stages) {
  const int layers = static_cast<int>(block.size());
  std::vector<int> at;
  for (int l = 0; l < layers; ++l)
    if (block[l]) at.push_back(l);
  const int blocks = static_cast<int>(at.size());
  std::vector<int> counts;
  if (blocks < stages) {  // no blocks to count: all layers are
    for (int s = 0; s < stages; ++s)
      counts.push_back(layers * (s + 1) / stages - layers * s / stages);
    return counts;
  }
  int start = 0;
  for (int s = 0; s < stages; ++s) {
    const int end = s + 1 == stages ? layers : at[static_cast<size_t>(blocks) * (s + 1) / stages];
    counts.push_back(end - start);
    start = end;
  }
  return counts;
}

}  // namespace motley::grid
