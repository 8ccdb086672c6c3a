#include "trials/judge.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <utility>
#include <vector>

#include "core/rng.h"

namespace motley::grid::trials {

Judged judge(const Set& set) {
  constexpr int kFolds = 10;
  std::vector<int> rows;
  for (size_t i = 0; i < set.trials.size(); ++i)
    if (set.trials[i].measured > 0) rows.push_back(static_cast<int>(i));
  Rng rng(1);
  std::vector<int> order = rows;
  for (size_t i = order.size(); i > 1; --i)
    std::swap(order[i - 1], order[rng.below(static_cast<int64_t>(i))]);
  Judged judged;
  judged.predicted.assign(set.trials.size(), 0.0);
  judged.without_time_scales = judged.predicted;
  for (int fold = 0; fold < kFolds; ++fold) {
    std::vector<int> seen;
    for (size_t i = 0; i < order.size(); ++i)
      if (static_cast<int>(i) % kFolds != fold) seen.push_back(order[i]);
    const Fitted fitted = fit(set, seen);
    Predictor predict(set, fitted), without(set, {fitted.logs, {}});
    for (size_t i = 0; i < order.size(); ++i) {
      if (static_cast<int>(i) % kFolds != fold) continue;
      judged.predicted[order[i]] = predict(set.trials[order[i]]).step;
      judged.without_time_scales[order[i]] = without(set.trials[order[i]]).step;
    }
  }
  if (set.models.size() > 1) judged.other_models.assign(set.trials.size(), 0.0);
  for (size_t model = 0; set.models.size() > 1 && model < set.models.size(); ++model) {
    auto of_model = [&](int row) { return set.trials[row].model == static_cast<int>(model); };
    std::vector<int> seen;
    std::copy_if(rows.begin(), rows.end(), std::back_inserter(seen), std::not_fn(of_model));
    Predictor predict(set, fit(set, seen));
    for (int row : rows)
      if (of_model(row)) judged.other_models[row] = predict(set.trials[row]).step;
  }
  judged.fitted = fit(set, rows);
  Predictor predict(set, judged.fitted);
  for (size_t i = 0; i < set.trials.size(); ++i)  // failed trials were in no fold
    if (set.trials[i].measured <= 0) judged.predicted[i] = predict(set.trials[i]).step;
  return judged;
}

double memory_error(const Set& set) {
  Vector base, activations, measured;
  for (const Trial& t : set.trials) {
    if (t.memory <= 0) continue;
    auto most = [&](double fragmentation) {
      Calibration c = default_calibration(set.clusters[t.cluster], set.models[t.model].precision);
      c.context = 0;
      c.fragmentation = fragmentation;
      const Estimate e =
          Estimator(set.models[t.model], set.clusters[t.cluster], c).estimate(t.strategy);
      return *std::max_element(e.memory.begin(), e.memory.end());
    };
    base.push_back(most(0));
    activations.push_back(most(1) - base.back());
    measured.push_back(t.memory);
  }
  double error = 0;
  for (size_t out = 0; out < base.size(); ++out) {
    std::vector<Vector> normal(2, Vector(2, 0.0));
    Vector right(2, 0.0);
    for (size_t i = 0; i < base.size(); ++i) {
      if (i == out) continue;
      const double x[2] = {1 / measured[i], activations[i] / measured[i]};
      const double y = 1 - base[i] / measured[i];
      for (int a = 0; a < 2; ++a) {
        right[a] += x[a] * y;
        for (int b = 0; b < 2; ++b) normal[a][b] += x[a] * x[b];
      }
    }
    const Vector fitted = solve(normal, right, 0);
    const double predicted = base[out] + fitted[0] + fitted[1] * activations[out];
    error += std::abs(predicted / measured[out] - 1) / static_cast<double>(base.size());
  }
  return error;
}

}  // namespace motley::grid::trials
