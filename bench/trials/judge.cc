#include "trials/judge.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <numeric>
#include <utility>
#include <vector>

#include "core/rng.h"

namespace motley::grid::trials {

std::vector<int> rows_of(const Set& set) {
  std::vector<int> rows;
  for (size_t i = 0; i < set.trials.size(); ++i)
    if (set.trials[i].measured > 0) rows.push_back(static_cast<int>(i));
  return rows;
}

namespace {

// All rows of the other sets, and these of this one.
Constants fit_with(const Set& set, std::vector<int> rows, const std::vector<const Set*>& sets) {
  std::vector<Seen> seen;
  for (const Set* other : sets)
    if (other != &set) seen.push_back({other, rows_of(*other)});
  if (!rows.empty()) seen.push_back({&set, std::move(rows)});
  return fit(seen, sets);
}

void predict_rows(const Set& set, const std::vector<int>& rows, const Constants& constants,
                  Vector* predicted) {
  Predictor predict(set, constants);
  for (int row : rows) (*predicted)[row] = predict(set.trials[row]).step;
}

}  // namespace

Judged judge(const Set& set, const std::vector<const Set*>& sets, int folds) {
  const std::vector<int> rows = rows_of(set);
  std::vector<int> all(set.trials.size());
  std::iota(all.begin(), all.end(), 0);
  Judged judged;
  judged.left_out = judged.ten_fold = judged.unfitted = Vector(set.trials.size(), 0.0);
  predict_rows(set, all, {}, &judged.unfitted);
  judged.without = fit_with(set, {}, sets);
  predict_rows(set, all, judged.without, &judged.left_out);
  judged.with = fit_with(set, rows, sets);
  Rng rng(1);
  std::vector<int> order = rows;
  for (size_t i = order.size(); i > 1; --i)
    std::swap(order[i - 1], order[rng.below(static_cast<int64_t>(i))]);
  for (int fold = 0; fold < folds; ++fold) {
    std::vector<int> seen, judged_on;
    for (size_t i = 0; i < order.size(); ++i)
      (static_cast<int>(i) % folds == fold ? judged_on : seen).push_back(order[i]);
    predict_rows(set, judged_on, fit({{&set, seen}}, {&set}), &judged.ten_fold);
  }
  return judged;
}

Vector leave_out_by(const Set& set, const std::vector<const Set*>& sets,
                    const std::function<int(const Trial&)>& kind) {
  Vector predicted(set.trials.size(), 0.0);
  std::map<int, std::vector<int>> kinds;
  const std::vector<int> rows = rows_of(set);
  for (int row : rows) kinds[kind(set.trials[row])].push_back(row);
  for (const auto& [k, left_out] : kinds) {
    std::vector<int> seen;
    for (int row : rows)
      if (kind(set.trials[row]) != k) seen.push_back(row);
    predict_rows(set, left_out, fit_with(set, seen, sets), &predicted);
  }
  return predicted;
}

double memory_error(const Set& set, MemoryParts* shares) {
  double error = 0, rows = 0;
  *shares = {};
  for (const Trial& t : set.trials) {
    if (t.memory <= 0) continue;
    Predictor predict(set, {});
    const Estimate e = predict(t);
    const size_t most = std::max_element(e.memory.begin(), e.memory.end()) - e.memory.begin();
    error += std::abs(e.memory[most] / t.memory - 1);
    const auto add = [&](Bytes MemoryParts::*part) {
      shares->*part += e.parts[most].*part / e.memory[most];
    };
    for (Bytes MemoryParts::*part :
         {&MemoryParts::state, &MemoryParts::activations, &MemoryParts::slack,
          &MemoryParts::transient, &MemoryParts::context, &MemoryParts::buffers})
      add(part);
    ++rows;
  }
  for (Bytes MemoryParts::*part :
       {&MemoryParts::state, &MemoryParts::activations, &MemoryParts::slack,
        &MemoryParts::transient, &MemoryParts::context, &MemoryParts::buffers})
    shares->*part /= rows;
  return error / rows;
}

}  // namespace motley::grid::trials
