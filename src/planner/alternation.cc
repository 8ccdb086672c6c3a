#include "planner/alternation.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <numeric>

#include "core/error.h"
#include "cost/overlap.h"
#include "planner/alternation_search.h"
#include "solver/balance.h"
#include "solver/cheapest.h"
#include "solver/folded.h"
#include "spmd/program_balance.h"
#include "spmd/recompute.h"

namespace motley::planner {

std::vector<double> even_ratios(const Cluster& cluster) {
  return std::vector<double>(cluster.size(), 1.0 / cluster.size());
}

std::vector<double> proportional_ratios(const Cluster& cluster) {
  std::vector<double> ratios;
  double total = 0;
  for (int d = 0; d < cluster.size(); ++d) total += cluster.type_of(d).flops;
  for (int d = 0; d < cluster.size(); ++d) ratios.push_back(cluster.type_of(d).flops / total);
  return ratios;
}

namespace {

// Work that bounds may always take, and that is as good as any.
constexpr int64_t kLeastWork = 2'000'000;
constexpr double kMostWork = 1e18;

// Of all that is shared, moved to and fro between two types until that often nothing is gained.
constexpr double kPolish[] = {0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064};
constexpr int kPolishIdle = 2;

// Of a step: what types of devices wait for one another in turn, for programs to be searched for
// with that in mind.
constexpr double kWorthWaiting = 1e-2;

constexpr double kWorthRestart = 5e-3;  // gap for which rounds begin elsewhere too
constexpr double kHalfway[] = {0.5, 0.75};
constexpr size_t kSizesTried = 3;
constexpr int64_t kRoughStates = 8;  // of each step, of a search for a bound alone

}  // namespace

AlternationSearch::AlternationSearch(const Theory& theory, const CostModel& model,
                                     const AlternationOptions& options)
    : theory_(theory),
      model_(model),
      options_(options),
      builder_(theory, model, options.optimizer, options.restriction) {
  if (options.overlap && options.sizes) builder_.set_sizes(kLargestSizes);
  options_.limits.deadline = options.limits.deadline.counting();
  if (options.warm) warm_ = *options.warm;
  if (options.memory_limit && options.recompute) {
    block_of_ = blocks_of(theory.graph());
    for (int b : block_of_) blocks_ = std::max(blocks_, b + 1);
  }
}

Alternation AlternationSearch::run() {
  return timed([&] { search(); });
}

Alternation AlternationSearch::certify(Seconds below) {
  MOTLEY_CHECK(best_.feasible);
  options_.certify = true;
  options_.certify_below = below;
  return timed([&] { prove(); });
}

Alternation AlternationSearch::timed(const std::function<void()>& search) {
  const auto start = std::chrono::steady_clock::now();
  try {
    search();
  } catch (const TimeIsUp&) {
    if (restarted_ && beaten_.feasible && !(best_.feasible && best_.step() < beaten_.step()))
      best_ = std::move(beaten_);
    restarted_ = polishing_ = false;
    if (!best_.feasible) throw;
    best_.reason = to_string(StopReason::kTimeLimit);
  }
  if (best_.feasible && !options_.memory_limit) {
    const Shares shares(best_.ratios);
    best_.cost.memory =
        memory_of(theory_, best_.program, Fractions(model_.cluster(), shares, options_.redundancy),
                  model_.types(), options_.optimizer);
  }
  seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  best_.seconds = seconds_;
  return best_;
}

void AlternationSearch::search() {
  if (options_.memory_limit && !holds_state()) return;
  if (!worth_searching()) return;
  if (options_.known != nullptr) {
    offer(pool_.add(options_.known->program), options_.known->ratios);
  }
  if (!options_.ratios.empty()) {
    round(everywhere(options_.ratios), false);
  } else {
    const std::vector<double> proportional = proportional_ratios(model_.cluster()),
                              even = even_ratios(model_.cluster());
    const int segments = theory_.segments();
    tied_ = segments > 1;
    for (const auto& from : {proportional, even}) {
      if (!seen_.empty() && close(everywhere(from), seen_.front())) break;
      alternate(everywhere(from), {});
    }
    tied_ = false;
    if (segments > 1) {
      if (best_.feasible) {
        const Balance restart = balance_of(best_.cost, options_.memory_limit);
        if (restart.feasible) alternate(by_device(restart.ratio), restart.weights);
      }
      for (int s = 0; s < segments; ++s)
        for (const bool mostly : {true, false}) {
          Ratios from = everywhere(mostly ? proportional : even);
          from[s] = mostly ? even : proportional;
          alternate(std::move(from), {});
        }
    }
  }
  const bool free = options_.restriction == Restriction::none || options_.ratios.empty();
  if (!fits_plain_ && options_.memory_limit && no_program_.empty() && free) limit_memory();
  if (best_.feasible) {
    finish();
    stop_ = worst_stop_;
    prove();
  }
  if (!best_.feasible && best_.reason.empty()) {
    best_.reason = no_program_.empty() ? lack_ : no_program_;
    if (no_program_.empty()) best_.excess = least_excess_;
  }
  if (options_.warm) *options_.warm = warm_;
}

bool AlternationSearch::worth_searching() {
  if (std::isinf(options_.worth)) return true;
  const solver::Limits limits = options_.limits;
  options_.limits.max_states = kRoughStates;
  options_.limits.rough_states = std::numeric_limits<int64_t>::max();
  const Weights weights = slowest();
  const Solution rough = solve(
      everywhere(options_.ratios.empty() ? proportional_ratios(model_.cluster()) : options_.ratios),
      weights);
  options_.limits = limits;
  const Seconds least = rough.lower_bound + fixed_seconds(weights);
  if (rough.option.empty() || least <= options_.worth) return true;
  best_.slow = true;
  best_.reason =
      fmt::format("takes {:.3g} s a step even with more memory", least * options_.micro_batches);
  return false;
}

void AlternationSearch::prove() {
  const Deadline& deadline = options_.limits.deadline;
  const double most = options_.certify_work * static_cast<double>(deadline.work());
  most_work_ = most < kMostWork ? deadline.work() + std::max(kLeastWork, static_cast<int64_t>(most))
                                : std::numeric_limits<int64_t>::max();
  bound();
  if (model_.types() > 1 && options_.ratios.empty() && gap() > kWorthRestart &&
      best_.step() <= kNearly * options_.certify_below) {
    const Seconds before = best_.step();
    worst_stop_ = stop_;
    restart([&] { leave_out(); });
    restart([&] { price_alternating_types(); });
    if (options_.overlap && options_.certify && gap() > kWideGap)
      for (const double way : kHalfway) restart([&] { halfway(way); });
    stop_ = worst_stop_;
    if (best_.step() < before) bound();
  }
  best_.reason = to_string(stop_);
}

bool AlternationSearch::close(const std::vector<double>& a, const std::vector<double>& b) {
  for (size_t i = 0; i < a.size(); ++i)
    if (std::abs(a[i] - b[i]) > 1e-4 * (a[i] + b[i])) return false;
  return true;
}

bool AlternationSearch::close(const Ratios& a, const Ratios& b) {
  for (size_t s = 0; s < a.size(); ++s)
    if (!close(a[s], b[s])) return false;
  return true;
}

Ratios AlternationSearch::everywhere(const std::vector<double>& ratios) const {
  return Ratios(theory_.segments(), ratios);
}

void AlternationSearch::alternate(Ratios ratios, Weights weights) {
  weights_ = std::move(weights);
  for (int i = 0; i < 6; ++i) {
    const Seconds before = best_.cost.step;
    Ratios next = round(ratios, true);
    if (next.empty() || close(next, ratios)) break;
    // Converged but for the last digits of the shares.
    if (i > 0 && before > 0 && best_.cost.step > before * (1 - kRoundGain)) break;
    ratios = next;
    if (std::find_if(seen_.begin(), seen_.end(), [&](const auto& r) { return close(r, ratios); }) !=
        seen_.end())
      break;
  }
}

void AlternationSearch::finish() {
  if (options_.polish && options_.ratios.empty()) {
    polishing_ = true;
    polish();
    polishing_ = false;
  }
  if (!options_.overlap) return;
  hide();
  if (options_.sizes) choose_sizes();
}

void AlternationSearch::restart(const std::function<void()>& rounds) {
  beaten_ = std::move(best_);
  restarted_ = true;
  const Program* program = best_program_;
  const ValueId first = first_;
  const std::vector<bool> blocks = best_blocks_;
  best_ = {};
  best_blocks_.clear();
  best_.rounds = beaten_.rounds;
  best_.solves = beaten_.solves;
  best_.states = beaten_.states;
  rounds();
  if (best_.feasible) finish();
  restarted_ = false;
  if (best_.feasible && best_.step() < beaten_.step()) return;
  beaten_.rounds = best_.rounds;
  beaten_.solves = best_.solves;
  beaten_.states = best_.states;
  best_ = std::move(beaten_);
  best_program_ = program;
  first_ = first;
  best_blocks_ = blocks;
  sizes_ = best_.program.sizes;
}

void AlternationSearch::leave_out() {
  for (int t = 0; t < model_.types(); ++t)
    if (const std::vector<double> others = without(t); !others.empty())
      alternate(everywhere(others), {});
}

std::vector<double> AlternationSearch::without(int type) const {
  std::vector<double> others = proportional_ratios(model_.cluster());
  for (int d = 0; d < model_.cluster().size(); ++d)
    if (model_.cluster().devices[d].type == type) others[d] = 0;
  const double part = std::accumulate(others.begin(), others.end(), 0.0);
  if (beaten_.cost.step - beaten_.cost.comm >= part * beaten_.cost.step) return {};
  for (double& share : others) share /= part;
  return others;
}

void AlternationSearch::halfway(double way) {
  const std::vector<double> all = proportional_ratios(model_.cluster());
  for (int t = 0; t < model_.types(); ++t) {
    const std::vector<double> others = without(t);
    if (others.empty()) continue;
    std::vector<double> between(all.size());
    for (size_t d = 0; d < all.size(); ++d) between[d] = all[d] + way * (others[d] - all[d]);
    weights_ = {};
    round(everywhere(between), false);
  }
  if (!best_.feasible) return;
  hide();
  if (bound_overlapped(options_.certify_states) < (1 - kWideGap) * best_.step())
    bound_synchronised(true);
}

void AlternationSearch::price_alternating_types() {
  Seconds stages = 0;
  std::vector<Seconds> all(model_.types(), 0);
  for (const StageCost& s : beaten_.cost.stages) {
    stages += *std::max_element(s.compute.begin(), s.compute.end());
    for (int t = 0; t < model_.types(); ++t) all[t] += s.compute[t];
  }
  const Seconds waiting = stages - *std::max_element(all.begin(), all.end());
  if (waiting < kWorthWaiting * beaten_.cost.step) return;
  price_at_slowest_ = true;
  alternate(beaten_.ratios, {});
  price_at_slowest_ = false;
}

Balance AlternationSearch::balance_of(const ProgramCost& cost, bool memory_limit) const {
  Balance b = balance(balance_problem(cost, model_, theory_.segments(), tied_, memory_limit));
  if (tied_ && b.feasible) b.ratio.resize(theory_.segments(), b.ratio[0]);
  return b;
}

void AlternationSearch::polish() {
  const int segments = theory_.segments();
  for (int a = 0; a < model_.types(); ++a)
    for (int b = a + 1; b < model_.types(); ++b) {
      polish(0, segments, a, b);
      for (int s = 0; s < segments && segments > 1; ++s) polish(s, s + 1, a, b);
    }
}

void AlternationSearch::polish(int first, int end, int a, int b) {
  const std::vector<int> count = model_.cluster().count_by_type();
  const Program& program = *best_program_;
  const Ratios from = best_.ratios;
  for (const double sign : {1.0, -1.0}) {
    int idle = 0;
    for (const double part : kPolish) {
      if (idle == kPolishIdle) break;
      Ratios all = from;
      double least = 0;
      for (int s = first; s < end; ++s)
        for (size_t d = 0; d < all[s].size(); ++d) {
          const int type = model_.cluster().devices[d].type;
          if (type == a) all[s][d] += sign * part / count[a];
          if (type == b) all[s][d] -= sign * part / count[b];
          least = std::min(least, all[s][d]);
        }
      const Seconds before = best_.step();
      if (least >= 0) offer(program, all);
      idle = best_.step() < before ? 0 : idle + 1;
    }
  }
}

void AlternationSearch::hide() {
  if (best_.cost.comm < kWorthOverlapping * best_.cost.step) return;
  // As if all gradients before the one from which on messages queue were hidden, and all
  // computation after it hid some.
  OverlapPricing pricing;
  const std::vector<double> all(model_.types(), 1), none(model_.types(), 0);
  if (first_.valid()) {
    pricing.from = {builder_.ready(first_)};
    pricing.compute = {all, none};
    pricing.gradients = {0, 1};
  } else {
    pricing.compute = {all};
    pricing.gradients = {0};
  }
  pricing_ = &pricing;
  Ratios ratios = best_.ratios;
  for (int i = 0; i < 2; ++i) {
    const Ratios next = round(ratios, options_.ratios.empty(), byte_prices_);
    if (next.empty() || close(next, ratios)) break;
    ratios = next;
  }
  pricing_ = nullptr;
}

void AlternationSearch::choose_sizes() {
  const Shares shares(best_.ratios);
  const Fractions fractions(model_.cluster(), shares, options_.redundancy);
  const std::vector<SizesTried> tried =
      try_sizes(theory_, best_.program, model_, fractions, kWorthOtherSizes * best_.step());
  // Longer messages need more memory.
  const Program& program = *best_program_;
  const Ratios ratios = best_.ratios;
  for (size_t i = 0; i < tried.size() && i < kSizesTried; ++i) {
    sizes_ = tried[i].sizes;
    offer(program, ratios);
    if (best_.program.sizes == sizes_) break;
  }
  sizes_ = best_.program.sizes;
}

Solution AlternationSearch::solve(const Ratios& ratios, const Weights& weights) {
  Shares shares(ratios);
  Fractions fractions(model_.cluster(), shares, options_.redundancy);
  builder_.price(fractions, options_.micro_batches, pricing_);
  if (price_at_slowest_) builder_.price_at_slowest_type();
  std::optional<Solution> plain = cheapest(builder_.problem(), weights);
  Solution solution =
      plain ? *std::move(plain)
            : solve_folded(builder_.problem(), order(), weights, options_.limits, &warm_);
  ++best_.solves;
  best_.states += solution.states;
  if (solution.stop != StopReason::kOptimal && solution.stop != StopReason::kInfeasible)
    worst_stop_ = solution.stop;
  return solution;
}

const Order& AlternationSearch::order() {
  if (order_ == nullptr)
    order_ = &(options_.orders ? *options_.orders : own_orders_).of(builder_.problem());
  return *order_;
}

Weights AlternationSearch::slowest() const {
  Weights weights;
  weights.compute.assign(model_.types(), 0);
  size_t slow = 0;
  for (size_t t = 1; t < weights.compute.size(); ++t)
    if (model_.cluster().types[t].flops < model_.cluster().types[slow].flops) slow = t;
  weights.compute[slow] = 1;
  return weights;
}

Ratios AlternationSearch::by_device(const std::vector<std::vector<double>>& by_type) const {
  Ratios all;
  for (const std::vector<double>& of_segment : by_type) {
    std::vector<double> ratios;
    for (int d = 0; d < model_.cluster().size(); ++d)
      ratios.push_back(std::max(0.0, of_segment[model_.cluster().devices[d].type]));
    double total = std::accumulate(ratios.begin(), ratios.end(), 0.0);
    for (double& r : ratios) r /= total;
    // Segments whose ratios differ by their last digits share them: then nothing moves.
    for (const std::vector<double>& other : all)
      if (close(ratios, other)) ratios = other;
    all.push_back(std::move(ratios));
  }
  return all;
}

Ratios AlternationSearch::round(const Ratios& ratios, bool rebalance,
                                std::vector<double> memory_price) {
  seen_.push_back(ratios);
  ++best_.rounds;
  if (weights_.compute.empty()) weights_ = slowest();
  const bool dear_bytes = !memory_price.empty();
  weights_.memory = std::move(memory_price);
  Solution solution = solve(ratios, weights_);
  if (solution.option.empty()) {
    no_program_ = "no program satisfies the theory under this restriction";
    return {};
  }
  const Program& program = pool_.of(builder_, solution);
  const Offer& offered = offer(program, ratios);
  if (weights_.memory.empty() && pricing_ == nullptr && !price_at_slowest_)
    proven_.push_back({ratios, solution.lower_bound + fixed_seconds(weights_)});
  last_ = priced(solution, weights_);
  last_.fits = offered.fits;
  weights_ = deciding_weights(offered.cost);
  if (!rebalance) return ratios;
  Balance b = balance_of(offered.cost, options_.memory_limit);
  // What does not fit may fit with blocks computed again.
  if (!b.feasible && blocks_ > 0 && !dear_bytes) b = balance_of(offered.cost, false);
  if (!b.feasible) return {};
  Ratios next = by_device(b.ratio);
  const Offer& balanced = offer(program, next);
  last_.fits = last_.fits || balanced.fits;
  weights_ = b.weights.compute.empty() ? deciding_weights(balanced.cost) : b.weights;
  weights_.memory.clear();
  return next;
}

Seconds AlternationSearch::fixed_seconds(const Weights& weights) const {
  Seconds seconds = 0;
  for (int t = 0; t < model_.types(); ++t)
    seconds += weights.compute[t] * model_.per_step(t, theory_.graph());
  return seconds / options_.micro_batches;
}

Alternation alternate(const Theory& theory, const CostModel& model,
                      const AlternationOptions& options) {
  return AlternationSearch(theory, model, options).run();
}

Alternator::Alternator(const Theory& theory, const CostModel& model,
                       const AlternationOptions& options)
    : search_(std::make_unique<AlternationSearch>(theory, model, options)) {}
Alternator::~Alternator() = default;
Alternation Alternator::run() { return search_->run(); }
Alternation Alternator::certify(Seconds below) { return search_->certify(below); }

}  // namespace motley::planner
