#include "bounds/compute_bound.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "graph/op.h"

namespace motley::bounds {

namespace {

constexpr int kSteps = 400;

// The bound at prices; with `load`, how much of the work each type takes there, in seconds.
Seconds bound_at(const std::vector<std::vector<Seconds>>& a, const std::vector<double>& prices,
                 std::vector<Seconds>* load) {
  Seconds sum = 0;
  if (load) load->assign(prices.size(), 0);
  for (const std::vector<Seconds>& op : a) {
    size_t least = 0;
    for (size_t t = 1; t < prices.size(); ++t)
      if (prices[t] * op[t] < prices[least] * op[least]) least = t;
    sum += prices[least] * op[least];
    if (load) (*load)[least] += op[least];
  }
  return sum;
}

}  // namespace

Seconds assignment_bound(const std::vector<std::vector<Seconds>>& a,
                         const std::vector<int>& count) {
  const size_t types = count.size();
  if (std::find(count.begin(), count.end(), 0) != count.end()) {  // types that are not there
    std::vector<int> present;
    for (int c : count)
      if (c > 0) present.push_back(c);
    std::vector<std::vector<Seconds>> work;
    for (const std::vector<Seconds>& op : a) {
      work.emplace_back();
      for (size_t t = 0; t < types; ++t)
        if (count[t] > 0) work.back().push_back(op[t]);
    }
    return assignment_bound(work, present);
  }
  // Prices in proportion to speed at all of the work, to begin with.
  std::vector<double> prices(types, 0);
  for (const std::vector<Seconds>& op : a)
    for (size_t t = 0; t < types; ++t) prices[t] += op[t];
  auto normalise = [&] {
    double total = 0;
    for (size_t t = 0; t < types; ++t) total += prices[t] * count[t];
    for (double& p : prices) p /= total;
  };
  for (double& p : prices) p = p > 0 ? 1 / p : 1;
  normalise();
  Seconds best = 0;
  std::vector<Seconds> load;
  for (int step = 0; step < kSteps; ++step) {
    const Seconds bound = bound_at(a, prices, &load);
    best = std::max(best, bound);
    if (types == 1 || bound <= 0) break;
    // A type that would be busy for longer than the bound is costlier next time.
    const double rate = 0.5 / (1 + 0.05 * step);
    for (size_t t = 0; t < types; ++t) {
      const double excess = load[t] / count[t] / bound - 1;
      prices[t] *= std::exp(rate * std::clamp(excess, -1.0, 1.0));
    }
    normalise();
  }
  return best;
}

std::vector<std::vector<Seconds>> compute_work(const Theory& theory, const CostModel& model,
                                               int times) {
  const Graph& graph = theory.graph();
  // Calls that look alike share a table of triples, but not their shapes; sum up equal rows.
  std::map<std::vector<Seconds>, double> rows;
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    const NodeId id(static_cast<int64_t>(n));
    const std::vector<Triple>& triples = theory.triples(id);
    // What kernels of extra rules do need not be parts of the op's own work.
    if (triples.empty() || std::any_of(triples.begin(), triples.end(),
                                       [](const Triple& t) { return !t.kernel.empty(); }))
      continue;
    Work work = work_of(theory, id, triples[0]);
    if (work.free) continue;
    work.cut_bytes += work.whole_bytes;
    work.whole_bytes = 0;
    work.cut = std::numeric_limits<int64_t>::max();
    std::vector<Seconds> row(static_cast<size_t>(model.types()));
    for (int t = 0; t < model.types(); ++t) model.compute(t, work, 1, &row[t]);
    rows[row] += times;
  }
  std::vector<std::vector<Seconds>> a;
  for (const auto& [row, often] : rows) {
    a.push_back(row);
    for (Seconds& s : a.back()) s *= often;
  }
  return a;
}

Seconds compute_bound(const Theory& theory, const CostModel& model, int times) {
  return assignment_bound(compute_work(theory, model, times), model.cluster().count_by_type());
}

}  // namespace motley::bounds
