// Lower bounds of an alternation's best pair.
#include <algorithm>
#include <limits>
#include <utility>

#include "bounds/cutting_planes.h"
#include "bounds/memory_bound.h"
#include "planner/alternation_search.h"

namespace motley::planner {

namespace {

// Program searches for the lower bound, and what another could gain, of the step, for it to be
// made.
constexpr int kCertifySolves = 6;
constexpr int kCertifyLimited = 2;  // of them that may stop at their limit of states
constexpr double kCertifyGain = 1e-3;

// Of that bound where none is asked for: of programs that take the same while
// nothing overlaps some hide all gradients and some none.
constexpr int64_t kSearchStates = 20'000;
constexpr int kSearchDivisions = 1;

}  // namespace

bool AlternationSearch::bounded_enough() const {
  return options_.limits.deadline.work() > most_work_;
}

void AlternationSearch::bound() {
  const auto worth = [&] { return options_.certify && best_.step() <= options_.certify_below; };
  if (!options_.overlap) {
    best_.lower_bound = bound_synchronised(worth());
    if (worth() && gap() > kWideGap)
      best_.lower_bound = std::max(best_.lower_bound, bound_limited(false));
    return;
  }
  if (!worth() && options_.restriction == Restriction::none &&
      best_.cost.comm - best_.hidden > kWorthOverlapping * best_.step()) {
    // All programs so far at the best ratios: the search for the bound needs others than these.
    const Ratios ratios = best_.ratios;
    for (const ProgramPool::Found& f : pool_.found()) offer(*f.program, ratios);
    bound_overlapped(kSearchStates, kSearchDivisions);
  }
  if (!worth()) return;
  best_.lower_bound = bound_overlapped(options_.certify_states);
  if (gap() <= kWideGap) return;
  best_.synchronised_bound = bound_synchronised(true);
  auto loose = [&] { return best_.synchronised_bound < (1 - kWideGap) * best_.cost.step; };
  // Bounds that are loose even if nothing overlaps may have to know of memory.
  if (!loose()) return;
  best_.lower_bound = std::max(best_.lower_bound, bound_limited(true));
  if (gap() <= kWideGap)
    best_.synchronised_bound = 0;
  else if (loose())
    best_.synchronised_bound = std::max(best_.synchronised_bound, bound_limited(false));
}

Seconds AlternationSearch::bound_synchronised(bool search) {
  const Ratios ratios = best_.ratios;
  const auto step = [&] { return best_.cost.step; };
  CuttingPlanes planes;
  // What rounds at these ratios have proven.
  for (const Proven& p : proven_)
    if (p.ratios == ratios) planes.bound = std::max(planes.bound, p.bound);
  if (!search || step() - planes.bound <= kCertifyGain * step())
    return std::min(planes.bound, step());
  planes.lines.push_back({best_.cost.comm, best_.cost.compute});
  for (const Offer& o : offers_)
    if (o.ratios == ratios) planes.lines.push_back({o.cost.comm, o.cost.compute});
  const PlaneRules rules{.step = step,
                         .gap = kCertifyGain,
                         .gain = kCertifyGain,
                         .searches = kCertifySolves,
                         .limited = kCertifyLimited};
  bool first = true;
  raise_bound(
      rules,
      [&] { return std::exchange(first, false) || (best_.ratios == ratios && !bounded_enough()); },
      [&](const MaxMin& at) -> PlaneSearch {
        const Weights weights{at.weights, {}};
        const Solution solution = solve(ratios, weights);
        if (solution.option.empty()) return {};
        const ProgramCost& cost = offer(pool_.of(builder_, solution), ratios).cost;
        PriceLine line{solution.price + fixed_seconds(weights), cost.compute};
        for (int t = 0; t < model_.types(); ++t) line.comm -= weights.compute[t] * line.compute[t];
        return {.bound = solution.lower_bound + fixed_seconds(weights),
                .line = std::move(line),
                .limited = solution.stop != StopReason::kOptimal};
      },
      &planes);
  return std::min(planes.bound, step());
}

Seconds AlternationSearch::bound_overlapped(int64_t states, int divisions) {
  const Ratios ratios = best_.ratios;
  const Shares shares(ratios);
  const Fractions fractions(model_.cluster(), shares, options_.redundancy);
  Certifier certifier(theory_, model_, options_.optimizer, options_.restriction, options_.limits,
                      &builder_, &order(), &warm_, &pool_);
  const Seconds bound = certifier.bound(
      {&fractions, [&] { return best_.step(); }, best_program_, first_,
       [&](const Program& program) { offer(program, ratios); },
       [&](const Effort& effort) { return effort.states >= states || bounded_enough(); }},
      divisions);
  best_.solves += certifier.effort().solves;
  best_.states += certifier.effort().states;
  if (certifier.effort().worst_stop != StopReason::kOptimal)
    worst_stop_ = certifier.effort().worst_stop;
  return bound;
}

Seconds AlternationSearch::bound_limited(bool overlap) {
  const bool limited =
      options_.memory_limit && options_.micro_batches == 1 &&
      std::any_of(offers_.begin(), offers_.end(), [](const Offer& o) { return !o.fits; });
  if (!limited) return 0;
  const Ratios ratios = best_.ratios;
  const Shares shares(ratios);
  const Fractions fractions(model_.cluster(), shares, options_.redundancy);
  const std::vector<int> none(theory_.graph().nodes.size(), -1);
  const MemoryBound bound =
      memory_bound(theory_, model_, options_.optimizer, options_.restriction, options_.limits,
                   {&fractions, options_.recompute ? &block_of_ : &none, overlap, first_,
                    [&] { return overlap ? best_.step() : best_.cost.step; },
                    [&](const Solution& solution) { offer(pool_.of(builder_, solution), ratios); },
                    [&](const Effort& effort) {
                      return effort.states >= options_.certify_states || bounded_enough();
                    }});
  best_.solves += bound.effort.solves;
  best_.states += bound.effort.states;
  if (bound.effort.worst_stop != StopReason::kOptimal) worst_stop_ = bound.effort.worst_stop;
  return bound.bound;
}

}  // namespace motley::planner
