// What of an alternation fits into memory: pairs of program and shares with their costs, blocks
// computed again, and the price of a byte.
#include <algorithm>
#include <cmath>
#include <limits>

#include "core/error.h"
#include "cost/overlap.h"
#include "planner/alternation_search.h"
#include "spmd/least_memory.h"
#include "spmd/recompute.h"

namespace motley::planner {

namespace {

// Tries of the secant method for the price of a byte.
constexpr int kMemorySolves = 5, kHintedMemorySolves = 2;
constexpr int64_t kFittingStates = 50;  // of these searches: where bytes have a price many tie

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

}  // namespace

bool AlternationSearch::holds_state() {
  const Cluster& cluster = model_.cluster();
  const Graph& graph = theory_.graph();
  Bytes state = 0, capacity = 0;
  for (const Parameter& p : graph.parameters) state += state_bytes(graph, p, options_.optimizer);
  const Bytes least = options_.recompute ? least_memory_again(graph, options_.optimizer)
                                         : least_memory(graph, options_.optimizer);
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
  if (least <= capacity) return true;
  if (state <= capacity) {
    best_.reason =
        fmt::format("state and {} take {} and all devices together have {}",
                    options_.recompute ? "what one operator reads and makes"
                                       : "what the backward pass reads of the forward pass",
                    format_bytes(least), format_bytes(capacity));
    return false;
  }
  best_.reason = fmt::format(
      "parameters, gradients and optimizer state take {} and all devices together have {}; even "
      "cut in proportion to memory",
      format_bytes(state), format_bytes(capacity));
  for (const DeviceType& t : cluster.types)
    best_.reason += fmt::format("{} each {} lacks {}", &t == &cluster.types[0] ? "" : ",", t.name,
                                format_bytes(t.memory * (state / capacity - 1)));
  return false;
}

bool AlternationSearch::fits(const ProgramCost& cost) const {
  if (!options_.memory_limit) return true;
  for (size_t t = 0; t < cost.memory.peak.size(); ++t)
    if (cost.memory.peak[t] > model_.cluster().types[t].memory) return false;
  return true;
}

const AlternationSearch::Offer& AlternationSearch::offer(const Program& program,
                                                         const Ratios& ratios) {
  for (const Offer& o : offers_)
    if (o.program == &program && o.ratios == ratios && o.sizes == sizes_) return o;
  const Deadline& deadline = options_.limits.deadline;
  deadline.spend(static_cast<int64_t>(program.steps.size()));
  if (best_.feasible || restarted_) deadline.check();
  Shares shares(ratios);
  Fractions fractions(model_.cluster(), shares, options_.redundancy);
  Program formed = program;
  formed.sizes = sizes_;
  choose_forms(theory_, &formed, model_, fractions);
  ProgramCost cost = cost_of(theory_, formed, model_, fractions, options_.optimizer,
                             options_.micro_batches, options_.memory_limit);
  ValueId first;
  const Seconds hidden =
      options_.overlap ? hidden_seconds(theory_, formed, model_, fractions, &first) : 0;
  auto keep = [&](Program p, const ProgramCost& c, Seconds h, std::vector<bool> blocks) {
    if (best_.feasible && c.step - h >= best_.step()) return;
    best_.feasible = true;
    best_.program = std::move(p);
    best_.ratios = ratios;
    best_program_ = &program;
    best_.cost = c;
    best_.hidden = h;
    if (options_.found) options_.found(best_.step());
    first_ = first;
    best_blocks_ = std::move(blocks);
  };
  const bool fit = fits(cost);
  if (fit) {
    fits_plain_ = true;
    keep(std::move(formed), cost, hidden, {});
  } else {
    if (Bytes worst = lack(cost); lack_.empty() || worst < least_excess_) {
      least_excess_ = worst;
      lack_ = lacking(cost, model_.cluster());
    }
    // Computing again only adds time.
    if (!best_.feasible || cost.step - hidden < best_.step())
      if (auto lean = recomputed(formed, fractions)) {
        const Seconds lean_hidden =
            options_.overlap ? hidden_seconds(theory_, lean->program, model_, fractions, &first)
                             : 0;
        keep(std::move(lean->program), lean->cost, lean_hidden, std::move(lean->blocks));
      }
  }
  offers_.push_back({&program, ratios, sizes_, std::move(cost), hidden, fit});
  return offers_.back();
}

std::optional<AlternationSearch::Lean> AlternationSearch::recomputed(const Program& program,
                                                                     const Fractions& fractions) {
  if (!options_.recompute || blocks_ == 0) return {};
  const Recomputation recomputation(theory_, program, block_of_);
  const auto with = [&](const std::vector<bool>& chosen) {
    options_.limits.deadline.check(static_cast<int64_t>(program.steps.size()));
    Lean lean{recomputation.with(chosen), {}, chosen};
    lean.cost = cost_of(theory_, lean.program, model_, fractions, options_.optimizer,
                        options_.micro_batches);
    return lean;
  };
  // At shares near those of the best pair the blocks of that are a good choice too.
  if (polishing_ && !best_blocks_.empty()) {
    Lean like = with(best_blocks_);
    if (lack(like.cost) <= 0) return like;
    if (like.cost.step >= best_.cost.step) return {};  // more blocks only add time
  }
  const auto cost = [&](const std::vector<bool>& choice) {
    const ProgramCost c = with(choice).cost;
    return RecomputeCost{c.step, lack(c)};
  };
  const std::vector<bool> chosen = choose_blocks(blocks_, cost, recomputation.like());
  if (chosen.empty()) return {};
  return with(chosen);
}

Bytes AlternationSearch::lack(const ProgramCost& cost) const {
  Bytes worst = -std::numeric_limits<Bytes>::infinity();
  for (size_t t = 0; t < cost.memory.peak.size(); ++t)
    worst = std::max(worst, cost.memory.peak[t] - model_.cluster().types[t].memory);
  return worst;
}

void AlternationSearch::limit_memory() {
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
  const int64_t states = options_.limits.max_states;
  options_.limits.max_states = std::min(states, kFittingStates);
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
  options_.limits.max_states = states;
  if (!fits_plain_) return;
  best_.memory_price = high.price;
  byte_prices_.assign(model_.types(), high.price);
}

AlternationSearch::Priced AlternationSearch::try_price(double price, Ratios& ratios) {
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

AlternationSearch::Priced AlternationSearch::priced(const Solution& solution,
                                                    const Weights& weights) const {
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

}  // namespace motley::planner
