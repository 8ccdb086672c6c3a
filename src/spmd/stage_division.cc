#include "spmd/stage_division.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>
#include <set>

#include "core/error.h"

namespace motley::spmd {

namespace {

constexpr Seconds kNever = std::numeric_limits<Seconds>::infinity();

// Seconds of a step for all parts at once.
Seconds of_all(const DivisionProblem& problem, const DividedStep& step, size_t type) {
  if (!step.all.empty()) return step.all[type];
  return step.compute.empty() ? 0 : (step.once ? 1 : problem.parts) * step.compute[type];
}

// Sums over stretches of steps.
class Sums {
 public:
  explicit Sums(const DivisionProblem& problem)
      : problem_(problem), types_(problem.interference.size()) {
    const size_t n = problem.steps.size();
    for (bool all : {false, true}) {
      compute_[all].assign((n + 1) * types_, 0);
      comm_[all].assign(n + 2, 0);
    }
    all_.assign((n + 1) * types_, 0);
    limit_.assign(n + 1, static_cast<int>(n));
    std::vector<int> readers(n + 1, static_cast<int>(n));  // by what makes it
    for (size_t i = 0; i < n; ++i) {
      const DividedStep& step = problem.steps[i];
      for (size_t t = 0; t < types_; ++t)
        all_[(i + 1) * types_ + t] = all_[i * types_ + t] + of_all(problem, step, t);
      for (bool all : {false, true}) {
        const bool counts = all || !step.once;
        for (size_t t = 0; t < types_; ++t)
          compute_[all][(i + 1) * types_ + t] =
              compute_[all][i * types_ + t] +
              (counts && !step.compute.empty() ? step.compute[t] : 0);
        if (counts && step.comm > 0)
          comm_[all][std::min<size_t>(static_cast<size_t>(step.reader), n) + 1] += step.comm;
      }
      if (step.comm > 0 && step.made >= 0)
        readers[step.made] = std::min(readers[step.made], step.reader);
    }
    for (bool all : {false, true})
      for (size_t i = 1; i < comm_[all].size(); ++i) comm_[all][i] += comm_[all][i - 1];
    // What is made from `begin` on is not read in the same stage.
    for (size_t i = n; i-- > 0;) limit_[i] = std::min(limit_[i + 1], readers[i]);
  }

  // First step behind `begin` that cannot be in its stage.
  int limit(int begin) const { return limit_[begin]; }
  Seconds comm(int begin, int end, bool first) const {
    // What only the end of the step reads counts in the last stage.
    const int last = static_cast<int>(problem_.steps.size());
    return comm_[first][end == last ? end + 1 : end] - comm_[first][begin];
  }
  // Of all parts at once.
  Seconds all(int begin, int end) const {
    Seconds most = 0;
    for (size_t t = 0; t < types_; ++t)
      most = std::max(most, all_[end * types_ + t] - all_[begin * types_ + t]);
    return most;
  }
  // c of a part (+) m.
  Seconds beside(int begin, int end, bool first, Seconds comm) const {
    Seconds most = 0;
    for (size_t t = 0; t < types_; ++t) {
      const Seconds c = compute_[first][end * types_ + t] - compute_[first][begin * types_ + t];
      const double a = problem_.interference[t];
      most = std::max(most, comm >= (1 + a) * c ? comm : c + comm * a / (1 + a));
    }
    return most;
  }

 private:
  const DivisionProblem& problem_;
  const size_t types_;
  std::vector<Seconds> compute_[2], comm_[2];  // [of the first part]
  std::vector<Seconds> all_;
  std::vector<int> limit_;  // [step]
};

// The half-stages from the last of the stage [i, j) to the one before the last of [j, l).
Seconds pair_seconds(const Sums& sums, int parts, int i, int j, int l) {
  Seconds seconds = sums.beside(i, j, parts == 1, sums.comm(j, l, true));
  for (int p = 0; p + 1 < parts; ++p) seconds += sums.beside(j, l, p == 0, sums.comm(j, l, false));
  return seconds;
}
Seconds first_seconds(const Sums& sums, int parts, int l) {
  Seconds seconds = sums.comm(0, l, true);
  for (int p = 0; p + 1 < parts; ++p) seconds += sums.beside(0, l, p == 0, sums.comm(0, l, false));
  return seconds;
}
Seconds last_seconds(const Sums& sums, int parts, int i, int j) {
  return sums.beside(i, j, parts == 1, 0);
}

// About how many pairs of stages there are between these positions.
double pairs_of(const std::set<int>& positions, const Sums& sums) {
  const std::vector<int> list(positions.begin(), positions.end());
  double pairs = 0;
  for (size_t a = 0; a + 1 < list.size(); ++a) {
    const auto end = std::upper_bound(list.begin(), list.end(), sums.limit(list[a]));
    const auto width = static_cast<double>(end - list.begin() - static_cast<std::ptrdiff_t>(a));
    pairs += width * width;
  }
  return pairs;
}

// Steps where stages may begin, ascending, from 0 to the end.
std::vector<int> positions_of(const DivisionProblem& problem, const Sums& sums, double most) {
  const int n = static_cast<int>(problem.steps.size());
  double work = 0;
  for (int i = 0; i < n; ++i) work += static_cast<double>(sums.limit(i) - i) * (sums.limit(i) - i);
  if (work <= most) {
    std::vector<int> all(n + 1);
    std::iota(all.begin(), all.end(), 0);
    return all;
  }
  // Stages as long as they may be: a division that there is in any case.
  std::set<int> chosen = {n};
  for (int i = 0; i < n; i = sums.limit(i)) chosen.insert(i);
  std::set<int> at_messages;
  for (const DividedStep& step : problem.steps)
    if (step.comm > 0) {
      if (step.made >= 0) at_messages.insert(step.made + 1);
      at_messages.insert(std::min(step.reader, n));
    }
  // Some of those, and then of the rest evenly, while it is not too much.
  const std::vector<int> messages(at_messages.begin(), at_messages.end());
  const auto add = [&](size_t count, size_t stride, auto at) {
    std::set<int> more = chosen;
    for (size_t k = 0; k < count; k += stride) more.insert(at(k));
    if (pairs_of(more, sums) > most) return false;
    chosen = std::move(more);
    return true;
  };
  bool all = true;
  for (size_t stride = std::bit_ceil(messages.size()); stride > 0 && all; stride /= 2)
    all = add(messages.size(), stride, [&](size_t k) { return messages[k]; });
  for (auto stride = static_cast<size_t>(n); stride > 1 && all; stride /= 2)
    all = add(static_cast<size_t>(n), stride, [](size_t k) { return static_cast<int>(k); });
  return {chosen.begin(), chosen.end()};
}

}  // namespace

Seconds beside(const std::vector<Seconds>& compute, Seconds comm,
               const std::vector<double>& interference) {
  Seconds most = comm;
  for (size_t t = 0; t < compute.size(); ++t) {
    const double a = interference[t];
    most = std::max(most, comm >= (1 + a) * compute[t] ? comm : compute[t] + comm * a / (1 + a));
  }
  return most;
}

Seconds division_seconds(const DivisionProblem& problem, const std::vector<int>& begin,
                         const std::vector<bool>& whole) {
  MOTLEY_CHECK(!begin.empty() && begin[0] == 0);
  const int n = static_cast<int>(problem.steps.size()), stages = static_cast<int>(begin.size()),
            types = static_cast<int>(problem.interference.size());
  auto stage_of = [&](int step) {
    return static_cast<int>(std::upper_bound(begin.begin(), begin.end(), step) - begin.begin()) - 1;
  };
  const auto at_once = [&](int stage) { return !whole.empty() && whole[stage]; };
  std::vector<Seconds> comm[2] = {std::vector<Seconds>(stages, 0), std::vector<Seconds>(stages, 0)},
                       inside(stages, 0);
  std::vector<std::vector<Seconds>> compute[2], all(stages, std::vector<Seconds>(types, 0));
  for (auto& c : compute) c.assign(stages, std::vector<Seconds>(types, 0));
  for (int i = 0; i < n; ++i) {
    const DividedStep& step = problem.steps[i];
    if (step.comm > 0) {
      const int stage = stage_of(std::min(step.reader, n - 1));
      if (at_once(stage) && step.made >= begin[stage]) {
        inside[stage] += (step.once ? 1 : problem.parts) * step.comm;
      } else {
        if (step.made >= 0 && step.reader < n && stage_of(step.made) >= stage) return kNever;
        comm[0][stage] += step.comm;
        if (!step.once) comm[1][stage] += step.comm;
      }
    }
    for (int t = 0; t < types && !step.compute.empty(); ++t) {
      compute[0][stage_of(i)][t] += step.compute[t];
      if (!step.once) compute[1][stage_of(i)][t] += step.compute[t];
    }
    for (int t = 0; t < types; ++t) all[stage_of(i)][t] += of_all(problem, step, t);
  }
  Seconds seconds = comm[0][0];
  for (int k = 0; k < stages; ++k) {
    const Seconds behind = k + 1 < stages ? comm[0][k + 1] : 0;
    if (at_once(k)) {
      seconds += (problem.parts - 1) * comm[1][k] + inside[k] +
                 *std::max_element(all[k].begin(), all[k].end()) + behind;
      continue;
    }
    for (int p = 0; p < problem.parts; ++p)
      seconds += beside(compute[p > 0][k], p + 1 < problem.parts ? comm[1][k] : behind,
                        problem.interference);
  }
  return seconds;
}

namespace {

// Dynamic programming over positions where stages begin and end.
class Divider {
 public:
  Divider(const DivisionProblem& problem, double most)
      : problem_(problem),
        sums_(problem),
        at_(positions_of(problem, sums_, most)),
        count_(static_cast<int>(at_.size())),
        best_(count_) {
    if (!problem.whole || problem.parts < 2) return;
    const int every = std::max(1, (count_ + kWholeAt - 1) / kWholeAt);
    for (int j = 0; j < count_; j += every) whole_at_.push_back(j);
    if (whole_at_.back() != count_ - 1) whole_at_.push_back(count_ - 1);
  }

  Divided run() {
    for (int j = 0; j + 1 < count_; ++j) {
      in_parts(j);
      if (std::binary_search(whole_at_.begin(), whole_at_.end(), j)) at_once(j);
    }
    Divided result{kNever, {}, {}};
    int end = count_ - 1, last = -1;
    for (size_t b = 0; b < best_[end].size(); ++b) {
      const Best& of = best_[end][b];
      const Seconds seconds =
          of.seconds +
          (of.whole ? 0 : last_seconds(sums_, problem_.parts, at_[of.begin], at_[end]));
      if (seconds < result.seconds) result.seconds = seconds, last = static_cast<int>(b);
    }
    MOTLEY_CHECK(last >= 0, "no division");
    bool any = false;
    while (last >= 0) {
      const Best& of = best_[end][last];
      result.begin.insert(result.begin.begin(), at_[of.begin]);
      result.whole.insert(result.whole.begin(), of.whole);
      any = any || of.whole;
      end = of.begin;
      last = of.before;
    }
    if (!any) result.whole.clear();
    return result;
  }

 private:
  static constexpr int kWholeAt = 40;  // positions for stages of all parts at once

  // [end] Of the best division up to `end` whose last stage begins there: its time, but for what the
  // last part computes in that stage if it is in parts, and of which the stage before is the last.
  struct Best {
    int begin;
    bool whole;
    Seconds seconds;
    int before;  // in best_[begin]
  };

  // Stages in parts that begin there.
  void in_parts(int j) {
    const int parts = problem_.parts, begin = at_[j];
    for (int l = j + 1; l < count_ && at_[l] <= sums_.limit(begin); ++l) {
      const int end = at_[l];
      Best found{j, false, j == 0 ? first_seconds(sums_, parts, end) : kNever, -1};
      for (size_t b = 0; b < best_[j].size(); ++b) {
        const Best& of = best_[j][b];
        const Seconds seconds =
            of.seconds + (of.whole ? behind_whole(begin, end)
                                   : pair_seconds(sums_, parts, at_[of.begin], begin, end));
        if (seconds < found.seconds) found.seconds = seconds, found.before = static_cast<int>(b);
      }
      if (found.seconds < kNever) best_[l].push_back(found);
    }
  }

  Seconds behind_whole(int begin, int end) const {
    Seconds seconds = sums_.comm(begin, end, true);
    for (int p = 0; p + 1 < problem_.parts; ++p)
      seconds += sums_.beside(begin, end, p == 0, sums_.comm(begin, end, false));
    return seconds;
  }

  // Stages of all parts at once that begin there. Two of them are one.
  void at_once(int j) {
    const int begin = at_[j];
    Seconds inside[2] = {0, 0};  // [of the first part] collectives of operands made inside
    int next = begin;
    std::vector<std::vector<const DividedStep*>> read_at;
    const auto first = std::upper_bound(whole_at_.begin(), whole_at_.end(), j);
    if (first == whole_at_.end()) return;
    const int n = static_cast<int>(problem_.steps.size());
    read_at.resize(n + 1 - begin);
    for (int i = begin; i < n; ++i) {
      const DividedStep& step = problem_.steps[i];
      if (step.comm > 0 && step.made >= begin)
        read_at[std::min(step.reader, n) - begin].push_back(&step);
    }
    for (auto l = first; l != whole_at_.end(); ++l) {
      const int end = at_[*l];
      for (; next < (end == n ? n + 1 : end); ++next)
        for (const DividedStep* step : read_at[next - begin]) {
          inside[true] += step->comm;
          if (!step->once) inside[false] += step->comm;
        }
      const Seconds outside = std::max(0.0, sums_.comm(begin, end, true) - inside[true]),
                    own = inside[true] + (problem_.parts - 1) * sums_.comm(begin, end, false) +
                          sums_.all(begin, end);
      Best found{j, true, j == 0 ? outside + own : kNever, -1};
      for (size_t b = 0; b < best_[j].size(); ++b) {
        const Best& of = best_[j][b];
        if (of.whole) continue;
        const Seconds seconds =
            of.seconds + own + sums_.beside(at_[of.begin], begin, problem_.parts == 1, outside);
        if (seconds < found.seconds) found.seconds = seconds, found.before = static_cast<int>(b);
      }
      if (found.seconds == kNever) continue;
      // What comes behind it does not depend on where it began.
      std::vector<Best>& others = best_[*l];
      const auto other =
          std::find_if(others.begin(), others.end(), [](const Best& of) { return of.whole; });
      if (other == others.end())
        others.push_back(found);
      else if (found.seconds < other->seconds)
        *other = found;
    }
  }

  const DivisionProblem& problem_;
  const Sums sums_;
  const std::vector<int> at_;
  const int count_;
  std::vector<std::vector<Best>> best_;  // [end]
  std::vector<int> whole_at_;            // ascending
};

}  // namespace

Divided divide(const DivisionProblem& problem, double most) {
  if (problem.steps.empty()) return {0, {0}, {}};
  return Divider(problem, most).run();
}

}  // namespace motley::spmd
