#include "trials/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "trials/statistics.h"

namespace motley::grid::trials {

Statistics print_statistics(const std::string& name, const Vector& predicted,
                            const Vector& measured) {
  std::vector<size_t> order(predicted.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return predicted[a] < predicted[b]; });
  const double best = *std::min_element(measured.begin(), measured.end());
  double top5 = measured[order[0]];
  for (size_t i = 0; i < std::min<size_t>(5, order.size()); ++i)
    top5 = std::min(top5, measured[order[i]]);
  const Statistics s = {100 * mape(predicted, measured), spearman(predicted, measured),
                        measured[order[0]] / best};
  fmt::print("{:32} {:5} {:8.2f} {:9.3f} {:8.3f} {:8.3f} {:8.3f}\n", name, predicted.size(), s.mape,
             s.spearman, kendall(predicted, measured), s.regret, top5 / best);
  return s;
}

Statistics report(const std::string& name, const Set& set, const Vector& predictions,
                  const std::function<bool(const Trial&)>& use) {
  Vector predicted, measured;
  for (size_t i = 0; i < predictions.size(); ++i) {
    const Trial& t = set.trials[i];
    if (t.measured <= 0 || !use(t) || predictions[i] <= 0) continue;
    predicted.push_back(predictions[i]);
    measured.push_back(t.measured);
  }
  return predicted.empty() ? Statistics{} : print_statistics(name, predicted, measured);
}

int report_failures(const Set& set, const Judged& judged) {
  Predictor predict(set, judged.without);
  int failed = 0, said = 0, both = 0, slow = 0;
  std::vector<std::pair<double, bool>> usable;
  for (size_t i = 0; i < set.trials.size(); ++i) {
    const Trial& t = set.trials[i];
    bool bad = !predict(t).fits;
    int at = 0;
    for (int n : t.strategy.stages) {
      const auto& layers = set.models[t.model].layers;
      bad |= std::none_of(layers.begin() + at, layers.begin() + at + n,
                          [](const Layer& l) { return l.block; });
      at += n;
    }
    const bool fails = t.measured <= 0;
    failed += fails, said += bad, both += fails && bad;
    slow += fails && !bad && judged.left_out[i] > 4.6;  // longer than the launcher waited
    if (!bad) usable.push_back({judged.left_out[i], fails});
  }
  std::sort(usable.begin(), usable.end());
  int top = 0;
  for (size_t i = 0; i < std::min<size_t>(10, usable.size()); ++i) top += usable[i].second;
  fmt::print(
      "  failures: {} of {} foreseen, {} more predicted too slow for the launcher; {} of {} "
      "said to fail did; {} failed among the ten predicted fastest\n",
      both, failed, slow, both, said, top);
  return top;
}

void print_fit(const Set& set, const Judged& judged) {
  for (const Parameter& p : set.parameters)
    fmt::print("    {:32} {:9.3g}  left out {:9.3g}  seen {:9.3g}\n", p.name, p.start,
               std::exp(judged.without.at(p.name)), std::exp(judged.with.at(p.name)));
}

void print_rows(const Set& set, const Judged& judged) {
  Predictor predict(set, judged.without);
  for (size_t i = 0; i < set.trials.size(); ++i) {
    const Trial& t = set.trials[i];
    const Estimate e = predict(t);
    fmt::print(
        "    {:70} measured {:8.4f} predicted {:8.4f} {:+6.1f}%  pipe {:.3f} tied {:.3f} "
        "grad {:.3f} opt {:.3f} mem {:.2f} ({:.2f}){}\n",
        t.name, t.measured, judged.left_out[i],
        t.measured > 0 ? 100 * (judged.left_out[i] / t.measured - 1) : 0.0, e.pipeline, e.tied,
        e.gradients, e.optimizer, *std::max_element(e.memory.begin(), e.memory.end()) / 1e9,
        t.memory / 1e9, e.fits ? "" : " OOM");
  }
}

void Bars::hold(const std::string& name, const Statistics& is, const Statistics& bar) {
  auto note = [&](const char* what, double value, double limit) {
    missed_.push_back(fmt::format("{}: {} {:.3f}, bar {:.3f}", name, what, value, limit));
  };
  if (!(is.mape <= bar.mape)) note("MAPE", is.mape, bar.mape);
  if (!(is.spearman >= bar.spearman)) note("Spearman", is.spearman, bar.spearman);
  if (!(is.regret <= bar.regret)) note("regret", is.regret, bar.regret);
}

bool Bars::held() const {
  for (const std::string& line : missed_) fmt::print("MISSED {}\n", line);
  return missed_.empty();
}

}  // namespace motley::grid::trials
