#include "spmd/synthesis.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>

#include "core/error.h"
#include "spmd/balance.h"
#include "spmd/folded.h"
#include "spmd/order.h"

namespace motley::spmd {

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

// The LP of section 5.1 for a program whose costs are known.
BalanceProblem balance_problem(const ProgramCost& cost, const Cluster& cluster, bool memory_limit) {
  BalanceProblem lp;
  lp.devices = cluster.count_by_type();
  for (const StageCost& s : cost.stages)
    lp.stages.push_back({s.comm_fixed, s.comm_padded, s.cut, s.whole, 0});
  lp.sharded = {cost.memory.cut};
  lp.fixed = cost.memory.whole;
  for (const DeviceType& t : cluster.types)
    lp.capacity.push_back(memory_limit ? t.memory : std::numeric_limits<double>::infinity());
  return lp;
}

// How much of the step each type decides under the present shares: the weights that make the price
// of this program its cost.
Weights deciding_weights(const ProgramCost& cost) {
  Weights weights;
  weights.compute.assign(cost.compute.size(), 0);
  double total = 0;
  for (const StageCost& s : cost.stages) {
    size_t slowest = std::max_element(s.compute.begin(), s.compute.end()) - s.compute.begin();
    weights.compute[slowest] += s.compute[slowest];
    total += s.compute[slowest];
  }
  if (total == 0) weights.compute[0] = total = 1;
  for (double& w : weights.compute) w /= total;
  return weights;
}

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
  Search(const Theory& theory, const CostModel& model, const SynthesisOptions& options)
      : theory_(theory),
        model_(model),
        options_(options),
        builder_(theory, model, options.optimizer, options.restriction) {
    // The order looks at which conversions exist; any shares will do for that.
    Shares shares(even_ratios(model.cluster()));
    builder_.price(Fractions(model.cluster(), shares));
    order_ = make_order(builder_.problem());
  }

  Synthesis run() {
    auto start = std::chrono::steady_clock::now();
    if (options_.memory_limit && !holds_state()) return std::move(best_);
    if (!options_.ratios.empty()) {
      round(options_.ratios, false);
    } else {
      for (const auto& from :
           {proportional_ratios(model_.cluster()), even_ratios(model_.cluster())}) {
        std::vector<double> ratios = from;
        for (int i = 0; i < 6; ++i) {
          const Seconds before = best_.cost.step;
          std::vector<double> next = round(ratios, true);
          if (next.empty() || close(next, ratios)) break;
          // Converged but for the last digits of the shares.
          if (i > 0 && before > 0 && best_.cost.step > before * (1 - kRoundGain)) break;
          ratios = next;
          if (std::find_if(seen_.begin(), seen_.end(),
                           [&](const auto& r) { return close(r, ratios); }) != seen_.end())
            break;
        }
      }
    }
    if (!best_.feasible && options_.memory_limit && no_program_.empty()) limit_memory();
    if (best_.feasible) {
      best_.reason = to_string(worst_stop_);
      certify();
      if (!options_.memory_limit) {
        const Shares shares(best_.ratios);
        best_.cost.memory = memory_of(theory_, best_.program, Fractions(model_.cluster(), shares),
                                      model_.types(), options_.optimizer);
      }
    }
    if (!best_.feasible && best_.reason.empty())
      best_.reason = no_program_.empty() ? lack_ : no_program_;
    best_.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return std::move(best_);
  }

 private:
  static bool close(const std::vector<double>& a, const std::vector<double>& b) {
    for (size_t i = 0; i < a.size(); ++i)
      if (std::abs(a[i] - b[i]) > 1e-4 * (a[i] + b[i])) return false;
    return true;
  }

  // Parameters, gradients and optimizer state have to be somewhere, once. If all devices together
  // are too small for them, no program fits, and no search is needed to say so.
  bool holds_state() {
    const Cluster& cluster = model_.cluster();
    const Graph& graph = theory_.graph();
    Bytes state = 0, capacity = 0;
    for (const Parameter& p : graph.parameters)
      state += static_cast<Bytes>(graph.spec(p.value).bytes()) *
               (p.gradient.valid() ? 2 + state_factor(options_.optimizer) : 1);
    for (int d = 0; d < cluster.size(); ++d) capacity += cluster.type_of(d).memory;
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

  // Keeps the pair if it is feasible and the best so far. Returns its cost.
  ProgramCost offer(const Program& program, const std::vector<double>& ratios) {
    for (const Offer& o : offers_)
      if (o.program == &program && o.ratios == ratios) return o.cost;
    Shares shares(ratios);
    Fractions fractions(model_.cluster(), shares);
    Program formed = program;
    choose_forms(theory_, &formed, model_, fractions);
    ProgramCost cost = cost_of(theory_, formed, model_, fractions, options_.optimizer,
                               options_.micro_batches, options_.memory_limit);
    if (fits(cost)) {
      if (!best_.feasible || cost.step < best_.cost.step) {
        best_.feasible = true;
        best_.program = std::move(formed);
        best_.ratios = ratios;
        best_.cost = cost;
      }
    } else if (double worst = excess(cost); lack_.empty() || worst < least_excess_) {
      least_excess_ = worst;
      lack_ = lacking(cost, model_.cluster());
    }
    offers_.push_back({&program, ratios, cost});
    return cost;
  }

  double excess(const ProgramCost& cost) const {
    double worst = 0;
    for (size_t t = 0; t < cost.memory.peak.size(); ++t)
      worst = std::max(worst, cost.memory.peak[t] - model_.cluster().types[t].memory);
    return worst;
  }

  // The program of a solution. Rounds often find the program of an earlier one again.
  const Program& program_of(const Solution& solution) {
    for (const Found& f : found_)
      if (f.option == solution.option && f.conversions == solution.conversions) return *f.program;
    found_.push_back({solution.option, solution.conversions,
                      std::make_unique<Program>(builder_.program(solution))});
    return *found_.back().program;
  }

  Solution solve(const std::vector<double>& ratios, const Weights& weights) {
    Shares shares(ratios);
    Fractions fractions(model_.cluster(), shares);
    builder_.price(fractions, options_.micro_batches);
    Solution solution = solve_folded(builder_.problem(), order_, weights, options_.limits, &warm_);
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

  std::vector<double> by_device(const std::vector<double>& by_type) const {
    std::vector<double> ratios;
    for (int d = 0; d < model_.cluster().size(); ++d)
      ratios.push_back(std::max(0.0, by_type[model_.cluster().devices[d].type]));
    double total = std::accumulate(ratios.begin(), ratios.end(), 0.0);
    for (double& r : ratios) r /= total;
    return ratios;
  }

  // One iteration: the best program at these ratios, then the best ratios for it. Returns the
  // latter (empty: no program).
  std::vector<double> round(const std::vector<double>& ratios, bool rebalance,
                            std::vector<double> memory_price = {}) {
    seen_.push_back(ratios);
    ++best_.rounds;
    if (weights_.compute.empty()) weights_ = slowest();
    weights_.memory = std::move(memory_price);
    Solution solution = solve(ratios, weights_);
    if (solution.option.empty()) {
      no_program_ = "no program satisfies the theory under this restriction";
      return {};
    }
    const Program& program = program_of(solution);
    ProgramCost cost = offer(program, ratios);
    weights_ = deciding_weights(cost);
    if (!rebalance) return ratios;
    Balance b = balance(balance_problem(cost, model_.cluster(), options_.memory_limit));
    if (!b.feasible) return {};
    std::vector<double> next = by_device(b.ratio[0]);
    ProgramCost balanced = offer(program, next);
    weights_ = b.weights.compute.empty() ? deciding_weights(balanced) : b.weights;
    weights_.memory.clear();
    return next;
  }

  // A price per byte on every type that is short, raised until the program fits, then lowered by
  // bisection.
  void limit_memory() {
    const Cluster& cluster = model_.cluster();
    std::vector<double> ratios =
        options_.ratios.empty() ? proportional_ratios(cluster) : options_.ratios;
    double total = 0;
    for (const DeviceType& t : cluster.types) total = std::max(total, t.memory);
    double low = 0, high = 0;
    // One second for the memory of a device, to begin with far below and to end with far above what
    // a step costs.
    const double hint = options_.memory_price;
    for (double price = hint > 0 ? hint : 1e-3 / total; price < 1e7 / total; price *= 10) {
      try_price(price, ratios);
      if (best_.feasible) {
        high = best_.memory_price = price;
        break;
      }
      low = price;
    }
    // Below a hint that fits, prices fall until one does not.
    for (int i = 0; i < 4 && best_.feasible; ++i) {
      const double middle = low > 0 ? std::sqrt(low * high) : high / (hint > 0 ? 3 : 10);
      const double before = best_.cost.step;
      try_price(middle, ratios);
      const bool better = best_.cost.step < before;
      if (better) best_.memory_price = middle;
      if (!better && low == 0 && hint > 0) break;
      (better ? high : low) = middle;
    }
  }

  void try_price(double price, std::vector<double>& ratios) {
    std::vector<double> prices(model_.types(), price);
    for (int i = 0; i < 2; ++i) {
      std::vector<double> next = round(ratios, options_.ratios.empty(), prices);
      if (next.empty() || close(next, ratios)) break;
      ratios = next;
    }
  }

  // The lower bound at the ratios of the best pair: the greatest least price over a few weights. A
  // better program found on the way is kept.
  void certify() {
    std::vector<double> ratios = best_.ratios;
    Weights weights = deciding_weights(best_.cost);
    for (int i = 0; i < 3; ++i) {
      Solution solution = solve(ratios, weights);
      if (solution.option.empty()) break;
      double bound = solution.lower_bound;
      best_.lower_bound = std::max(best_.lower_bound, bound);
      ProgramCost cost = offer(program_of(solution), ratios);
      if (best_.cost.step - best_.lower_bound <= 1e-3 * best_.cost.step) break;
      // Half-way between what decides now and what decided before: a damped step on the dual.
      Weights next = deciding_weights(cost);
      bool same = true;
      for (size_t t = 0; t < next.compute.size(); ++t) {
        same = same && std::abs(next.compute[t] - weights.compute[t]) < 1e-3;
        next.compute[t] = (next.compute[t] + weights.compute[t]) / 2;
      }
      if (same) break;
      weights = next;
    }
    best_.lower_bound = std::min(best_.lower_bound, best_.cost.step);
  }

  struct Found {
    std::vector<int> option;
    std::vector<Conversion> conversions;
    std::unique_ptr<Program> program;
  };
  struct Offer {
    const Program* program;  // of found_
    std::vector<double> ratios;
    ProgramCost cost;
  };

  const Theory& theory_;
  const CostModel& model_;
  const SynthesisOptions& options_;
  std::vector<Found> found_;
  std::vector<Offer> offers_;
  Builder builder_;
  Order order_;
  Weights weights_;
  WarmStart warm_;
  std::vector<std::vector<double>> seen_;
  Synthesis best_;
  std::string no_program_, lack_;
  double least_excess_ = 0;
  StopReason worst_stop_ = StopReason::kOptimal;
};

}  // namespace

Synthesis synthesize(const Theory& theory, const CostModel& model,
                     const SynthesisOptions& options) {
  return Search(theory, model, options).run();
}

}  // namespace motley::spmd
