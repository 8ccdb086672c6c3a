#include "planner/alternation.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <optional>

#include "bounds/certify.h"
#include "bounds/memory_bound.h"
#include "core/error.h"
#include "cost/overlap.h"
#include "solver/balance.h"
#include "solver/folded.h"
#include "solver/order.h"
#include "spmd/program_balance.h"
#include "spmd/recompute.h"

namespace motley::planner {

using namespace bounds;
using namespace solver;
using namespace spmd;

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

constexpr double kRoundGain = 1e-3;  // that a round has to gain for another to follow

// Program searches for the lower bound, and what another could gain, of the step, for it to be
// made.
constexpr int kCertifySolves = 6;
constexpr int kCertifyLimited = 2;  // of them that may stop at their limit of states
constexpr double kCertifyGain = 1e-3;

// Of all that is shared, moved to and fro between two types until that often nothing is gained.
constexpr double kPolish[] = {0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064};
constexpr int kPolishIdle = 2;

// Of a step: what types of devices wait for one another in turn, for programs to be searched for
// with that in mind.
constexpr double kWorthWaiting = 1e-2;

constexpr double kWorthRestart = 5e-3;  // gap for which rounds begin elsewhere too
constexpr double kHalfway[] = {0.5, 0.75};
constexpr double kNearly = 1.1;  // times the step that matters, for which rounds begin elsewhere

// Of a step that communicates less, overlapping does not decide.
constexpr double kWorthOverlapping = 0.02;
// Where no bound is asked for, that its games are played for: of programs that take the same while
// nothing overlaps some hide all gradients and some none.
constexpr int64_t kPlayStates = 20'000;
constexpr int kPlayDivisions = 1;

// Tries of the secant method for the price of a byte.
constexpr int kMemorySolves = 5, kHintedMemorySolves = 2;

std::string lacking(const ProgramCost& cost, const Cluster& cluster) {
  std::string reason;
  for (size_t t = 0; t < cluster.types.size(); ++t) {
    double lack = cost.memory.peak[t] - cluster.types[t].memory;
    if (lack > 0)
      reason +=
          fmt::format("{}{} lacks {} (needs {}, has {})", reason.empty() ? "" : "; ",
                      cluster.types[t].name, format_bytes(lack), format_bytes(cost.memory.peak[t]),
                      format_bytes(cluster.types[t].memory));
  }
  return reason;
}

class Search {
 public:
  Search(const Theory& theory, const CostModel& model, const AlternationOptions& options)
      : theory_(theory),
        model_(model),
        options_(options),
        builder_(theory, model, options.optimizer, options.restriction) {
    if (options.warm) warm_ = *options.warm;
    // The order looks at which conversions exist; any shares will do for that.
    Shares shares(everywhere(even_ratios(model.cluster())));
    builder_.price(Fractions(model.cluster(), shares));
    order_ = options.orders ? &options.orders->of(builder_.problem())
                            : &own_orders_.of(builder_.problem());
    if (options.memory_limit && options.recompute) {
      block_of_ = blocks_of(theory.graph());
      for (int b : block_of_) blocks_ = std::max(blocks_, b + 1);
    }
  }

  Alternation run() {
    const auto start = std::chrono::steady_clock::now();
    try {
      search();
    } catch (const TimeIsUp&) {
      if (restarted_ && beaten_.feasible && !(best_.feasible && best_.step() < beaten_.step()))
        best_ = std::move(beaten_);
      if (!best_.feasible) throw;
      best_.reason = to_string(StopReason::kTimeLimit);
    }
    if (best_.feasible && !options_.memory_limit) {
      const Shares shares(best_.ratios);
      best_.cost.memory = memory_of(theory_, best_.program, Fractions(model_.cluster(), shares),
                                    model_.types(), options_.optimizer);
    }
    best_.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return std::move(best_);
  }

 private:
  void search() {
    if (options_.memory_limit && !holds_state()) return;
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
          const Balance apart = balance_of(best_.cost, options_.memory_limit);
          if (apart.feasible) alternate(by_device(apart.ratio), apart.weights);
        }
        for (int s = 0; s < segments; ++s)
          for (const bool mostly : {true, false}) {
            Ratios from = everywhere(mostly ? proportional : even);
            from[s] = mostly ? even : proportional;
            alternate(std::move(from), {});
          }
      }
    }
    if (!fits_plain_ && options_.memory_limit && no_program_.empty()) limit_memory();
    if (best_.feasible) {
      finish();
      StopReason stop = worst_stop_;  // of plans, not of bounds
      certify();
      if (model_.types() > 1 && options_.ratios.empty() && gap() > kWorthRestart &&
          best_.step() <= kNearly * options_.certify_below) {
        const Seconds before = best_.step();
        worst_stop_ = stop;
        restart([&] { leave_out(); });
        restart([&] { price_alternating_types(); });
        if (options_.overlap && options_.certify && gap() > kWideGap)
          for (const double way : kHalfway) restart([&] { halfway(way); });
        stop = worst_stop_;
        if (best_.step() < before) certify();
      }
      best_.reason = to_string(stop);
    }
    if (!best_.feasible && best_.reason.empty())
      best_.reason = no_program_.empty() ? lack_ : no_program_;
    if (options_.warm) *options_.warm = std::move(warm_);
  }

  static bool close(const std::vector<double>& a, const std::vector<double>& b) {
    for (size_t i = 0; i < a.size(); ++i)
      if (std::abs(a[i] - b[i]) > 1e-4 * (a[i] + b[i])) return false;
    return true;
  }
  static bool close(const Ratios& a, const Ratios& b) {
    for (size_t s = 0; s < a.size(); ++s)
      if (!close(a[s], b[s])) return false;
    return true;
  }

  // The same ratios in all segments.
  Ratios everywhere(const std::vector<double>& ratios) const {
    return Ratios(theory_.segments(), ratios);
  }

  // Rounds until they repeat or gain nothing.
  void alternate(Ratios ratios, Weights weights) {
    weights_ = std::move(weights);
    for (int i = 0; i < 6; ++i) {
      const Seconds before = best_.cost.step;
      Ratios next = round(ratios, true);
      if (next.empty() || close(next, ratios)) break;
      // Converged but for the last digits of the shares.
      if (i > 0 && before > 0 && best_.cost.step > before * (1 - kRoundGain)) break;
      ratios = next;
      if (std::find_if(seen_.begin(), seen_.end(),
                       [&](const auto& r) { return close(r, ratios); }) != seen_.end())
        break;
    }
  }

  // What follows the rounds: shares nearby, and programs that hide more.
  void finish() {
    if (options_.polish && options_.ratios.empty()) polish();
    if (options_.overlap) hide();
  }

  // Rounds from another beginning, to their own end: what is best before gradients are hidden need
  // not be so after. The better end is kept.
  void restart(const std::function<void()>& rounds) {
    beaten_ = std::move(best_);
    restarted_ = true;
    const Program* program = best_program_;
    const ValueId first = first_;
    best_ = {};
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
  }

  // Rounds without the devices of one type.
  void leave_out() {
    for (int t = 0; t < model_.types(); ++t)
      if (const std::vector<double> others = without(t); !others.empty())
        alternate(everywhere(others), {});
  }

  // Shares in proportion to speed of all devices but those of a type; empty if computation alone
  // takes longer than the best step then, as far as speeds tell.
  std::vector<double> without(int type) const {
    std::vector<double> others = proportional_ratios(model_.cluster());
    for (int d = 0; d < model_.cluster().size(); ++d)
      if (model_.cluster().devices[d].type == type) others[d] = 0;
    const double part = std::accumulate(others.begin(), others.end(), 0.0);
    if (beaten_.cost.step - beaten_.cost.comm >= part * beaten_.cost.step) return {};
    for (double& share : others) share /= part;
    return others;
  }

  // A round at shares between those in proportion to speed and those without the devices of one
  // type, to which rounds tend that see no gradients hidden: so much of the way to the latter.
  // Their bounds come with programs that hide more.
  void halfway(double way) {
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
    if (certify_exposed(options_.certify_states) < (1 - kWideGap) * best_.step()) certify(true);
  }

  // Rounds for programs in which types wait for one another in turn: no weights of types find them.
  void price_alternating_types() {
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

  // The ratios of a type in every segment, from the linear program.
  Balance balance_of(const ProgramCost& cost, bool memory_limit) const {
    Balance b = balance(balance_problem(cost, model_, theory_.segments(), tied_, memory_limit));
    if (tied_ && b.feasible) b.ratio.resize(theory_.segments(), b.ratio[0]);
    return b;
  }

  double gap() const { return 1 - best_.lower_bound / best_.step(); }

  // The lower bounds of the plan's shares.
  void certify() {
    auto worth = [&] { return options_.certify && best_.step() <= options_.certify_below; };
    if (!options_.overlap) {
      best_.lower_bound = certify(worth());
      if (worth() && gap() > kWideGap)
        best_.lower_bound = std::max(best_.lower_bound, certify_limited(false));
      return;
    }
    if (!worth() && options_.restriction == Restriction::none &&
        best_.cost.comm - best_.hidden > kWorthOverlapping * best_.step()) {
      // All programs so far at the best ratios: the game asks for others than these.
      const Ratios ratios = best_.ratios;
      for (const ProgramPool::Found& f : pool_.found()) offer(*f.program, ratios);
      certify_exposed(kPlayStates, kPlayDivisions);
    }
    if (!worth()) return;
    best_.lower_bound = certify_exposed(options_.certify_states);
    if (gap() <= kWideGap) return;
    best_.synchronised_bound = certify(true);
    auto loose = [&] { return best_.synchronised_bound < (1 - kWideGap) * best_.cost.step; };
    // Bounds that are loose even if nothing overlaps may have to know of memory.
    if (!loose()) return;
    best_.lower_bound = std::max(best_.lower_bound, certify_limited(true));
    if (gap() <= kWideGap)
      best_.synchronised_bound = 0;
    else if (loose())
      best_.synchronised_bound = std::max(best_.synchronised_bound, certify_limited(false));
  }

  // Shares that divide well are not always those of the linear program, which knows no integers:
  // the best program with a little more for one type and less for another.
  void polish() {
    const int segments = theory_.segments();
    for (int a = 0; a < model_.types(); ++a)
      for (int b = a + 1; b < model_.types(); ++b) {
        polish(0, segments, a, b);
        for (int s = 0; s < segments && segments > 1; ++s) polish(s, s + 1, a, b);
      }
  }

  // Shares of types a and b in the segments [first, end).
  void polish(int first, int end, int a, int b) {
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

  // Rounds at prices that know of the overlap.
  void hide() {
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

  // Parameters, gradients and optimizer state have to be somewhere, once (under data parallelism on
  // every device). If all devices together are too small for them, no program fits, and no search
  // is needed to say so.
  bool holds_state() {
    const Cluster& cluster = model_.cluster();
    const Graph& graph = theory_.graph();
    Bytes state = 0, capacity = 0;
    for (const Parameter& p : graph.parameters) state += state_bytes(graph, p, options_.optimizer);
    for (int d = 0; d < cluster.size(); ++d) capacity += cluster.type_of(d).memory;
    if (options_.restriction == Restriction::data_parallel) {
      for (const DeviceType& t : cluster.types)
        if (state > t.memory)
          best_.reason += fmt::format(
              "{}{} lacks {} (parameters, gradients and optimizer state alone take {}, it has {})",
              best_.reason.empty() ? "" : "; ", t.name, format_bytes(state - t.memory),
              format_bytes(state), format_bytes(t.memory));
      return best_.reason.empty();
    }
    if (state <= capacity) return true;
    best_.reason = fmt::format(
        "parameters, gradients and optimizer state take {} and all devices together have {}; even "
        "cut in proportion to memory",
        format_bytes(state), format_bytes(capacity));
    for (const DeviceType& t : cluster.types)
      best_.reason += fmt::format("{} each {} lacks {}", &t == &cluster.types[0] ? "" : ",", t.name,
                                  format_bytes(t.memory * (state / capacity - 1)));
    return false;
  }

  bool fits(const ProgramCost& cost) const {
    if (!options_.memory_limit) return true;
    for (size_t t = 0; t < cost.memory.peak.size(); ++t)
      if (cost.memory.peak[t] > model_.cluster().types[t].memory) return false;
    return true;
  }

  struct Offer {
    const Program* program;  // of pool_
    Ratios ratios;
    ProgramCost cost;
    Seconds hidden;
    bool fits;
  };

  // Keeps the pair if it is feasible and the best so far.
  const Offer& offer(const Program& program, const Ratios& ratios) {
    for (const Offer& o : offers_)
      if (o.program == &program && o.ratios == ratios) return o;
    const Deadline& deadline = options_.limits.deadline;
    deadline.spend(static_cast<int64_t>(program.steps.size()));
    if (best_.feasible || restarted_) deadline.check();
    Shares shares(ratios);
    Fractions fractions(model_.cluster(), shares);
    Program formed = program;
    choose_forms(theory_, &formed, model_, fractions);
    ProgramCost cost = cost_of(theory_, formed, model_, fractions, options_.optimizer,
                               options_.micro_batches, options_.memory_limit);
    ValueId first;
    const Seconds hidden =
        options_.overlap ? hidden_seconds(theory_, formed, model_, fractions, &first) : 0;
    auto keep = [&](Program p, const ProgramCost& c, Seconds h) {
      if (best_.feasible && c.step - h >= best_.step()) return;
      best_.feasible = true;
      best_.program = std::move(p);
      best_.ratios = ratios;
      best_program_ = &program;
      best_.cost = c;
      best_.hidden = h;
      first_ = first;
    };
    const bool fit = fits(cost);
    if (fit) {
      fits_plain_ = true;
      keep(std::move(formed), cost, hidden);
    } else {
      if (double worst = excess(cost); lack_.empty() || worst < least_excess_) {
        least_excess_ = worst;
        lack_ = lacking(cost, model_.cluster());
      }
      // Computing again only adds time.
      if (!best_.feasible || cost.step - hidden < best_.step())
        if (auto lean = recomputed(formed, fractions)) {
          const Seconds lean_hidden =
              options_.overlap ? hidden_seconds(theory_, lean->first, model_, fractions, &first)
                               : 0;
          keep(std::move(lean->first), lean->second, lean_hidden);
        }
    }
    offers_.push_back({&program, ratios, std::move(cost), hidden, fit});
    return offers_.back();
  }

  // The program with the cheapest blocks computed again that make it fit; none: no blocks do.
  std::optional<std::pair<Program, ProgramCost>> recomputed(const Program& program,
                                                            const Fractions& fractions) {
    if (!options_.recompute || blocks_ == 0) return {};
    const Recomputation recomputation(theory_, program, block_of_);
    auto with = [&](const std::vector<bool>& chosen) {
      options_.limits.deadline.check(static_cast<int64_t>(program.steps.size()));
      std::pair<Program, ProgramCost> result;
      result.first = recomputation.with(chosen);
      result.second = cost_of(theory_, result.first, model_, fractions, options_.optimizer,
                              options_.micro_batches);
      return result;
    };
    const std::vector<bool> chosen = choose_blocks(blocks_, [&](const std::vector<bool>& choice) {
      const ProgramCost c = with(choice).second;
      return RecomputeCost{c.step, excess(c)};
    });
    if (chosen.empty()) return {};
    return with(chosen);
  }

  double excess(const ProgramCost& cost) const {
    double worst = 0;
    for (size_t t = 0; t < cost.memory.peak.size(); ++t)
      worst = std::max(worst, cost.memory.peak[t] - model_.cluster().types[t].memory);
    return worst;
  }

  Solution solve(const Ratios& ratios, const Weights& weights) {
    Shares shares(ratios);
    Fractions fractions(model_.cluster(), shares);
    builder_.price(fractions, options_.micro_batches, pricing_);
    if (price_at_slowest_) builder_.price_at_slowest_type();
    Solution solution = solve_folded(builder_.problem(), *order_, weights, options_.limits, &warm_);
    ++best_.solves;
    best_.states += solution.states;
    if (solution.stop != StopReason::kOptimal && solution.stop != StopReason::kInfeasible)
      worst_stop_ = solution.stop;
    return solution;
  }

  Weights slowest() const {
    Weights weights;
    weights.compute.assign(model_.types(), 0);
    size_t slow = 0;
    for (size_t t = 1; t < weights.compute.size(); ++t)
      if (model_.cluster().types[t].flops < model_.cluster().types[slow].flops) slow = t;
    weights.compute[slow] = 1;
    return weights;
  }

  Ratios by_device(const std::vector<std::vector<double>>& by_type) const {
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

  // One iteration: the best program at these ratios, then the best ratios for it. Returns the
  // latter (empty: no program).
  Ratios round(const Ratios& ratios, bool rebalance, std::vector<double> memory_price = {}) {
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

  // A price per byte, equal on all types: dear enough that a program fits, then brought to where
  // the programs on both sides of the limit cost the same.
  void limit_memory() {
    const Cluster& cluster = model_.cluster();
    Ratios ratios =
        everywhere(options_.ratios.empty() ? proportional_ratios(cluster) : options_.ratios);
    double capacity = 0;
    for (const DeviceType& t : cluster.types) capacity = std::max(capacity, t.memory);
    Priced low = last_, high;
    int tries = 0;
    // Bounds at prices of bytes far from those of programs on the verge of fitting are no beginning
    // for those.
    const WarmStart plain = warm_;
    // In steps of what was found for the memory of a device.
    const double unit = low.seconds / capacity;
    const double hint = options_.memory_price;
    for (double price : {hint, 10 * unit, 1e4 * unit}) {
      if (price == 0 || fits_plain_) continue;
      high = try_price(price, ratios);
      tries = price == hint ? kHintedMemorySolves : kMemorySolves;
    }
    for (int i = 0; i < tries && fits_plain_; ++i) {
      double price = (high.seconds - low.seconds) / (low.memory - high.memory);
      if (!(price > 1.05 * low.price && price < high.price / 1.05))
        price = low.price > 0 ? std::sqrt(low.price * high.price) : high.price / 10;
      if (high.price < 1.2 * low.price || high.seconds - low.seconds < kRoundGain * low.seconds)
        break;
      warm_ = plain;
      const Priced between = try_price(price, ratios);
      auto is = [&](const Priced& other) {
        return std::abs(between.seconds - other.seconds) <= 1e-6 * other.seconds &&
               std::abs(between.memory - other.memory) <= 1e-6 * other.memory;
      };
      if (is(low) || is(high)) break;
      (between.fits ? high : low) = between;
    }
    if (!fits_plain_) return;
    best_.memory_price = high.price;
    byte_prices_.assign(model_.types(), high.price);
  }

  // A program found at a price per byte: its time and bytes as they are priced.
  struct Priced {
    double price = 0, seconds = 0, memory = 0;
    bool fits = false;
  };

  Priced try_price(double price, Ratios& ratios) {
    const std::vector<double> prices(model_.types(), price);
    bool fits = false;
    for (int i = 0; i < 2; ++i) {
      Ratios next = round(ratios, options_.ratios.empty(), prices);
      fits = fits || last_.fits;
      if (next.empty() || close(next, ratios)) break;
      ratios = next;
    }
    last_.price = price;
    last_.fits = fits;
    return last_;
  }

  Priced priced(const Solution& solution, const Weights& weights) const {
    const Problem& problem = builder_.problem();
    Priced result;
    double paid = 0;
    for (size_t n = 0; n < problem.nodes.size(); ++n) {
      const Option& o = problem.option_tables[problem.nodes[n].table].options[solution.option[n]];
      for (size_t j = 0; j < o.memory.size(); ++j) {
        result.memory += o.memory[j];
        if (!weights.memory.empty()) paid += weights.memory[j] * o.memory[j];
      }
    }
    result.seconds = solution.price - paid;
    return result;
  }

  // A lower bound of the synchronised step at the ratios of the best pair: the greatest least price
  // over weights. A better program found on the way is kept. `search` false: what there is.
  Seconds certify(bool search) {
    const Ratios ratios = best_.ratios;
    const auto step = [&] { return best_.cost.step; };
    Seconds bound = 0;
    // What rounds at these ratios have proven.
    for (const Proven& p : proven_)
      if (p.ratios == ratios) bound = std::max(bound, p.bound);
    if (!search || step() - bound <= kCertifyGain * step()) return std::min(bound, step());
    std::vector<PriceLine> lines{{best_.cost.comm, best_.cost.compute}};
    for (const Offer& o : offers_)
      if (o.ratios == ratios) lines.push_back({o.cost.comm, o.cost.compute});
    int limited = 0;
    for (int i = 0; i < kCertifySolves; ++i) {
      double most = 0;
      const Weights weights{max_min_weights(lines, &most), {}};
      // No weights can prove more than the programs that are known cost under them.
      if (i > 0 && most - bound <= kCertifyGain * step()) break;
      const Solution solution = solve(ratios, weights);
      if (solution.option.empty()) break;
      bound = std::max(bound, solution.lower_bound + fixed_seconds(weights));
      const ProgramCost& cost = offer(pool_.of(builder_, solution), ratios).cost;
      if (best_.ratios != ratios || step() - bound <= kCertifyGain * step()) break;
      // Searches where two programs tie are the hardest.
      if (solution.stop != StopReason::kOptimal && ++limited == kCertifyLimited) break;
      PriceLine line{solution.price, cost.compute};
      for (int t = 0; t < model_.types(); ++t) line.comm -= weights.compute[t] * line.compute[t];
      line.comm += fixed_seconds(weights);
      lines.push_back(std::move(line));
    }
    return std::min(bound, step());
  }

  // The same of the step with overlap, of the best pair, for about so many states.
  Seconds certify_exposed(int64_t states, int divisions = std::numeric_limits<int>::max()) {
    const Ratios ratios = best_.ratios;
    const Shares shares(ratios);
    const Fractions fractions(model_.cluster(), shares);
    Certifier certifier(theory_, model_, options_.optimizer, options_.restriction, options_.limits,
                        &builder_, order_, &warm_, &pool_);
    const Seconds bound =
        certifier.bound({&fractions, [&] { return best_.step(); }, best_program_, first_,
                         [&](const Program& program) { offer(program, ratios); }},
                        states, divisions);
    best_.solves += certifier.effort().solves;
    best_.states += certifier.effort().states;
    if (certifier.effort().worst_stop != StopReason::kOptimal)
      worst_stop_ = certifier.effort().worst_stop;
    return bound;
  }

  // A lower bound of the step of the best pair, with overlap or nothing hidden, that knows of the
  // memory of devices; 0 where that is no limit.
  Seconds certify_limited(bool overlap) {
    const bool limited =
        options_.memory_limit && options_.micro_batches == 1 &&
        std::any_of(offers_.begin(), offers_.end(), [](const Offer& o) { return !o.fits; });
    if (!limited) return 0;
    const Ratios ratios = best_.ratios;
    const Shares shares(ratios);
    const Fractions fractions(model_.cluster(), shares);
    const std::vector<int> none(theory_.graph().nodes.size(), -1);
    const MemoryBound bound = memory_bound(
        theory_, model_, options_.optimizer, options_.restriction, options_.limits,
        {&fractions, options_.recompute ? &block_of_ : &none, overlap, first_,
         [&] { return overlap ? best_.step() : best_.cost.step; },
         [&](const Solution& solution) { offer(pool_.of(builder_, solution), ratios); }},
        options_.certify_states);
    best_.solves += bound.effort.solves;
    best_.states += bound.effort.states;
    if (bound.effort.worst_stop != StopReason::kOptimal) worst_stop_ = bound.effort.worst_stop;
    return bound.bound;
  }

  // What every program takes besides its operators, as it is priced.
  Seconds fixed_seconds(const Weights& weights) const {
    Seconds seconds = 0;
    for (int t = 0; t < model_.types(); ++t)
      seconds += weights.compute[t] * model_.per_step(t, theory_.graph());
    return seconds / options_.micro_batches;
  }

  // A lower bound at some ratios, nothing hidden.
  struct Proven {
    Ratios ratios;
    Seconds bound;
  };

  const Theory& theory_;
  const CostModel& model_;
  const AlternationOptions& options_;
  ProgramPool pool_;
  std::deque<Offer> offers_;
  std::vector<Proven> proven_;
  ProblemBuilder builder_;
  OrderMemo own_orders_;
  const Order* order_;
  Weights weights_;
  WarmStart warm_;
  const OverlapPricing* pricing_ = nullptr;  // in prices
  ValueId first_;                            // of the best pair, see hidden_seconds()
  std::vector<double> byte_prices_;          // that the limits ask for; empty: none
  Priced last_;                              // of the last round
  std::vector<Ratios> seen_;
  Alternation best_, beaten_;              // beaten_: the best so far, while rounds begin anew
  const Program* best_program_ = nullptr;  // of pool_
  std::string no_program_, lack_;
  double least_excess_ = 0;
  bool restarted_ = false;         // rounds begin anew, and beaten_ is the best so far
  bool price_at_slowest_ = false;  // prices are those of the slowest type of each operator
  bool tied_ = false;              // all segments have the same ratios
  bool fits_plain_ = false;        // a program fits with nothing computed again
  std::vector<int> block_of_;      // [node of the graph]
  int blocks_ = 0;
  StopReason worst_stop_ = StopReason::kOptimal;
};

}  // namespace

Alternation alternate(const Theory& theory, const CostModel& model,
                      const AlternationOptions& options) {
  return Search(theory, model, options).run();
}

}  // namespace motley::planner
