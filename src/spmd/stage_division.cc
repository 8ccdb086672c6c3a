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
    limit_.assign(n + 1, static_cast<int>(n));
    std::vector<int> readers(n + 1, static_cast<int>(n));  // by what makes it
    for (size_t i = 0; i < n; ++i) {
      const DividedStep& step = problem.steps[i];
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
  std::vector<int> limit_;                     // [step]
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

Seconds division_seconds(const DivisionProblem& problem, const std::vector<int>& begin) {
  MOTLEY_CHECK(!begin.empty() && begin[0] == 0);
  const int n = static_cast<int>(problem.steps.size()), stages = static_cast<int>(begin.size()),
            types = static_cast<int>(problem.interference.size());
  auto stage_of = [&](int step) {
    return static_cast<int>(std::upper_bound(begin.begin(), begin.end(), step) - begin.begin()) - 1;
  };
  std::vector<Seconds> comm[2] = {std::vector<Seconds>(stages, 0), std::vector<Seconds>(stages, 0)};
  std::vector<std::vector<Seconds>> compute[2];
  for (auto& c : compute) c.assign(stages, std::vector<Seconds>(types, 0));
  for (int i = 0; i < n; ++i) {
    const DividedStep& step = problem.steps[i];
    if (step.comm > 0) {
      const int stage = stage_of(std::min(step.reader, n - 1));
      if (step.made >= 0 && step.reader < n && stage_of(step.made) >= stage) return kNever;
      comm[0][stage] += step.comm;
      if (!step.once) comm[1][stage] += step.comm;
    }
    for (int t = 0; t < types && !step.compute.empty(); ++t) {
      compute[0][stage_of(i)][t] += step.compute[t];
      if (!step.once) compute[1][stage_of(i)][t] += step.compute[t];
    }
  }
  Seconds seconds = comm[0][0];
  for (int k = 0; k < stages; ++k)
    for (int p = 0; p < problem.parts; ++p) {
      const bool last = p + 1 == problem.parts;
      const Seconds next = !last ? comm[1][k] : k + 1 < stages ? comm[0][k + 1] : 0;
      seconds += beside(compute[p > 0][k], next, problem.interference);
    }
  return seconds;
}

Divided divide(const DivisionProblem& problem, double most) {
  const int n = static_cast<int>(problem.steps.size());
  if (n == 0) return {0, {0}};
  const Sums sums(problem);
  const std::vector<int> at = positions_of(problem, sums, most);
  const int count = static_cast<int>(at.size());
  // [end][begin] Of the best division up to `end` whose last stage begins there: its time but for
  // what the last part computes in that stage, and where the stage before begins.
  struct Best {
    int begin;
    Seconds seconds;
    int before;
  };
  std::vector<std::vector<Best>> best(count);
  for (int j = 1; j < count && at[j] <= sums.limit(0); ++j)
    best[j].push_back({0, first_seconds(sums, problem.parts, at[j]), -1});
  for (int j = 1; j + 1 < count; ++j)
    for (int l = j + 1; l < count && at[l] <= sums.limit(at[j]); ++l) {
      Best found{j, kNever, -1};
      for (const Best& b : best[j]) {
        const Seconds seconds =
            b.seconds + pair_seconds(sums, problem.parts, at[b.begin], at[j], at[l]);
        if (seconds < found.seconds) found.seconds = seconds, found.before = b.begin;
      }
      if (found.seconds < kNever) best[l].push_back(found);
    }
  Divided result{kNever, {}};
  int end = count - 1, begin = -1;
  for (const Best& b : best[end]) {
    const Seconds seconds = b.seconds + last_seconds(sums, problem.parts, at[b.begin], n);
    if (seconds < result.seconds) result.seconds = seconds, begin = b.begin;
  }
  MOTLEY_CHECK(begin >= 0, "no division");
  while (begin >= 0) {
    result.begin.insert(result.begin.begin(), at[begin]);
    int before = -1;
    for (const Best& b : best[end])
      if (b.begin == begin) before = b.before;
    end = begin;
    begin = before;
  }
  return result;
}

}  // namespace motley::spmd
