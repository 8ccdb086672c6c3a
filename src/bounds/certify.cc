#include "bounds/certify.h"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <tuple>

#include "cost/overlap.h"
#include "solver/balance.h"

namespace motley::bounds {

using namespace solver;
using namespace spmd;

namespace {

constexpr double kCertifyGain =
    1e-3;                          // of the step, that another search could gain for it to be made
constexpr int kLimitedSolves = 2;  // of one game, that may stop at their limit of states
constexpr int kSolves = 16;        // of one game
constexpr int kClasses = 300;      // times that a class is looked at closer
constexpr int64_t kStates = 500;   // of one step of a search
constexpr double kWorthDeciding = 2e-3;  // of a step: what the message of a gradient takes

// The programs that are about the cheapest.
std::vector<const Program*> weakest(const std::vector<PriceLine>& lines,
                                    const std::vector<const Program*>& programs,
                                    const std::vector<double>& weights) {
  std::vector<double> prices;
  for (const PriceLine& line : lines)
    prices.push_back(
        std::inner_product(weights.begin(), weights.end(), line.compute.begin(), line.comm));
  const double least = *std::min_element(prices.begin(), prices.end());
  std::vector<const Program*> result;
  for (size_t i = 0; i < lines.size(); ++i)
    if (prices[i] <= least * (1 + kCertifyGain)) result.push_back(programs[i]);
  return result;
}

// Weights of bounds by kind, node and type: what they are of whatever the stretches.
using Mixture = std::map<std::tuple<OverlapBound::Kind, int64_t, int>, double>;

std::tuple<OverlapBound::Kind, int64_t, int> name_of(const OverlapBound& bound,
                                                     const std::vector<int64_t>& from) {
  const bool begin = bound.kind == OverlapBound::Kind::begin;
  return {bound.kind, begin ? from[bound.stretch - 1] : 0, bound.type};
}

// The weights of these bounds; what the mixture gives to others goes to those of the same type that
// leave no computation out.
std::vector<double> weights_of(const Mixture& mixture, const std::vector<OverlapBound>& bounds,
                               const std::vector<int64_t>& from) {
  std::vector<double> weights(bounds.size(), 0);
  for (const auto& [name, weight] : mixture)
    for (size_t b = 0; b < bounds.size(); ++b)
      if (name_of(bounds[b], from) == name) weights[b] = weight;
  for (const auto& [name, weight] : mixture) {
    const auto is = [&](const OverlapBound& bound) { return name_of(bound, from) == name; };
    if (std::any_of(bounds.begin(), bounds.end(), is)) continue;
    for (size_t b = 0; b < bounds.size(); ++b)
      if (bounds[b].kind == OverlapBound::Kind::never && bounds[b].type == std::get<2>(name))
        weights[b] += weight;
  }
  return weights;
}

}  // namespace

const Program& ProgramPool::add(Program program) {
  found_.push_back({{}, {}, std::make_unique<Program>(std::move(program))});
  return *found_.back().program;
}

const Program& ProgramPool::of(const ProblemBuilder& builder, const Solution& solution) {
  for (const ProgramPool::Found& f : found_)
    if (f.option == solution.option && f.conversions == solution.conversions) return *f.program;
  found_.push_back({solution.option, solution.conversions,
                    std::make_unique<Program>(builder.program(solution))});
  return *found_.back().program;
}

// Bounds against the programs of a class.
struct Certifier::Game {
  ProblemBuilder* builder;
  const Order* order;
  WarmStart* warm;
  std::vector<int64_t> from;
  // Nodes, 0: none. No program communicates from `closed` on but for gradients; all do from
  // `barrier` on.
  int64_t closed = 0, barrier = 0;
  std::vector<Decision> decided = {};
  Mixture mixture = {};  // in: that of the class it is part of, empty: none; out: what proves most
  std::vector<const Program*> weakest = {};  // that keep the bound low
};

Certifier::Certifier(const Theory& theory, const CostModel& model, Optimizer optimizer,
                     Restriction restriction, const Limits& limits, ProblemBuilder* builder,
                     const Order* order, WarmStart* warm, ProgramPool* pool)
    : theory_(theory),
      model_(model),
      optimizer_(optimizer),
      restriction_(restriction),
      limits_(limits),
      builder_(builder),
      order_(order),
      warm_(warm),
      pool_(pool) {
  limits_.max_states = std::min(limits_.max_states, kStates);
}

Solution Certifier::solve(const ProblemBuilder& builder, const Order& order, WarmStart* warm) {
  const Weights ones{std::vector<double>(model_.types(), 1), {}};
  Solution solution = solve_folded(builder.problem(), order, ones, limits_, warm);
  ++effort_.solves;
  effort_.states += solution.states;
  if (solution.stop != StopReason::kOptimal && solution.stop != StopReason::kInfeasible)
    effort_.worst_stop = solution.stop;
  return solution;
}

// Where stretches begin, in order.
std::vector<int64_t> Certifier::stretches(std::vector<int64_t> from) const {
  const auto nodes = static_cast<int64_t>(theory_.graph().nodes.size());
  std::sort(from.begin(), from.end());
  from.erase(std::unique(from.begin(), from.end()), from.end());
  std::erase_if(from, [&](int64_t node) { return node <= 0 || node > nodes; });
  return from;
}

Seconds Certifier::bound(const Certified& certified, int divisions) {
  struct Class {
    int64_t first, end;         // where the last barrier runs; 0: or nowhere
    std::vector<int64_t> cuts;  // where stretches begin, besides
    Seconds bound;
    std::vector<const Program*> weakest;
    Mixture mixture;
    std::vector<Decision> decided = {};
  };
  const auto nodes = static_cast<int64_t>(theory_.graph().nodes.size());
  const int64_t begin = builder_->first_gradient();
  const Fractions& fractions = *certified.fractions;
  std::vector<int64_t> cuts{begin};
  if (certified.first.valid()) cuts.push_back(builder_->ready(certified.first));
  Game opening{builder_, order_, warm_, stretches(std::move(cuts))};
  Class all{0, nodes + 1, opening.from, 0, {}};
  all.bound = play(certified, &opening);
  all.mixture = opening.mixture;
  all.weakest = {certified.program};
  std::vector<Class> classes{all};
  divisions = std::min(divisions, kClasses);
  for (int i = 0; i < divisions && !certified.enough(effort_); ++i) {
    const auto least =
        std::min_element(classes.begin(), classes.end(),
                         [](const Class& a, const Class& b) { return a.bound < b.bound; });
    if (least->bound >= (1 - kWideGap) * certified.step()) break;
    Class weak = *least;
    int64_t last = 0, queue = 0;  // 0: none
    for (const Program* program : weak.weakest) {
      const int64_t barrier = builder_->last_barrier(*program, fractions.shares());
      if (barrier > std::max(weak.first, begin) && barrier < weak.end)
        last = std::max(last, barrier);
      ValueId first;
      hidden_seconds(theory_, *program, model_, fractions, &first);
      if (const int64_t ready = first.valid() ? builder_->ready(first) : 0;
          ready > 0 && std::find(weak.cuts.begin(), weak.cuts.end(), ready) == weak.cuts.end())
        queue = ready;
    }
    const ValueId gradient =
        last > 0 || queue > 0 ? ValueId() : disputed(certified, weak.weakest, weak.decided);
    // The first time, tables that tell the stretches apart are new.
    if (last == 0 && !gradient.valid() && queue == 0 && i > 0) break;
    if (last == 0 && queue > 0) weak.cuts.push_back(queue);
    std::vector<int64_t> from = weak.cuts;
    from.insert(from.end(), {weak.first, last, weak.end});
    from = stretches(std::move(from));
    std::vector<ValueId> apart;
    for (const Decision& d : weak.decided) apart.push_back(d.gradient);
    if (gradient.valid()) apart.push_back(gradient);
    ProblemBuilder builder(theory_, model_, optimizer_, restriction_, from, apart);
    builder.price(fractions);
    const Order order = make_order(builder.problem());
    WarmStart warm;
    classes.erase(least);
    auto add = [&](int64_t after, int64_t before, const std::vector<Decision>& decided) {
      Game game{&builder, &order, &warm, from};
      game.barrier = after;
      game.closed = before <= nodes ? before : 0;
      game.decided = decided;
      // That of a later barrier proves most of those that communicate after it.
      if (after == weak.first) game.mixture = weak.mixture;
      const Seconds bound = std::max(weak.bound, play(certified, &game));
      classes.push_back(
          {after, before, weak.cuts, bound, game.weakest, std::move(game.mixture), decided});
    };
    if (gradient.valid()) {
      for (const bool reduced : {false, true}) {
        std::vector<Decision> decided = weak.decided;
        decided.push_back({gradient, reduced});
        add(weak.first, weak.end, decided);
      }
      continue;
    }
    if (last > 0) add(last, weak.end, weak.decided);
    add(weak.first, last > 0 ? last : weak.end, weak.decided);
  }
  Seconds bound = certified.step();
  for (const Class& c : classes) bound = std::min(bound, c.bound);
  return bound;
}

// The largest gradient that some of the programs all-reduce and others do not, if it is large and
// not decided; else none.
ValueId Certifier::disputed(const Certified& certified, const std::vector<const Program*>& programs,
                            const std::vector<Decision>& decided) const {
  std::map<ValueId, size_t> times;
  for (const Program* program : programs)
    for (ValueId gradient : builder_->reduced(*program)) ++times[gradient];
  for (const Decision& d : decided) times.erase(d.gradient);
  ValueId largest;
  Seconds most = kWorthDeciding * certified.step();
  for (const auto& [gradient, count] : times) {
    const Seconds seconds = builder_->reduction_seconds(gradient);
    if (count == programs.size() || seconds < most) continue;
    largest = gradient;
    most = seconds;
  }
  return largest;
}

// The greatest least price of the class over mixtures of bounds, as far as searches found it.
Seconds Certifier::play(const Certified& certified, Game* game) {
  const Fractions& fractions = *certified.fractions;
  const int types = model_.types(), stretches = static_cast<int>(game->from.size()) + 1;
  auto stretch = [&](int64_t node) { return stretch_of(game->from, node); };
  const std::vector<OverlapBound> bounds =
      overlap_bounds(stretches, types, game->barrier > 0 ? stretch(game->barrier) : 0);
  std::vector<PriceLine> lines;
  std::vector<const Program*> programs;
  auto line = [&](const Program& program) -> PriceLine {
    OverlapPricing parts{game->from, {}, {}};
    parts.decided = game->decided;
    return {0, overlap_values(bounds, builder_->overlap_cost(program, fractions, parts))};
  };
  auto add = [&](const Program& program) {
    lines.push_back(line(program));
    programs.push_back(&program);
  };
  std::vector<PriceLine> others;
  for (const ProgramPool::Found& f : pool_->found()) {
    const int64_t last = builder_->last_barrier(*f.program, fractions.shares());
    const std::vector<ValueId> reduced = builder_->reduced(*f.program);
    const bool agrees =
        std::all_of(game->decided.begin(), game->decided.end(), [&](const Decision& d) {
          return std::binary_search(reduced.begin(), reduced.end(), d.gradient) == d.reduced;
        });
    if (agrees && (game->closed == 0 || last < game->closed) && last >= game->barrier)
      add(*f.program);
    else
      others.push_back(line(*f.program));
  }
  std::vector<double> weights, held;
  if (!game->mixture.empty()) held = weights_of(game->mixture, bounds, game->from);
  if (lines.empty())
    weights = others.empty() ? std::vector<double>(bounds.size(), 1.0 / bounds.size())
                             : max_min_weights(others);
  Seconds bound = 0;
  int limited = 0;
  bool between = true;
  for (int i = 0; i < kSolves && !certified.enough(effort_); ++i) {
    const bool divided = game->builder != builder_;
    const Seconds target = (1 - (divided ? kWideGap / 2 : kCertifyGain)) * certified.step();
    if (!lines.empty()) {
      double most = 0;
      weights = max_min_weights(lines, &most);
      game->weakest = weakest(lines, programs, weights);
      // No mixture can prove more than the programs that are known cost under it.
      if (most - bound <= kCertifyGain * certified.step()) break;
      if (most < (1 - kWideGap) * certified.step() && !divided) break;
      // Between there and where the bound was best: the extremes of few programs are wild.
      between = between && !held.empty();
      for (size_t b = 0; b < held.size() && between; ++b) weights[b] = (weights[b] + held[b]) / 2;
    }
    OverlapPricing pricing = mixture(bounds, weights, game->from, types);
    if (game->closed > 0) pricing.closed = stretch(game->closed);
    pricing.decided = game->decided;
    game->builder->price(fractions, 1, &pricing);
    const Solution solution = solve(*game->builder, *game->order, game->warm);
    if (solution.stop == StopReason::kInfeasible) return std::numeric_limits<double>::infinity();
    Seconds proven = solution.lower_bound + game->builder->decided_seconds(pricing);
    for (int t = 0; t < types; ++t)
      proven += pricing.compute[0][t] * model_.per_step(t, theory_.graph());
    if (proven > bound || held.empty()) {
      held = weights;
      game->mixture.clear();
      for (size_t b = 0; b < bounds.size(); ++b)
        game->mixture[name_of(bounds[b], game->from)] = weights[b];
    }
    bound = std::max(bound, proven);
    if (solution.option.empty()) break;
    const Program& program = pool_->of(*builder_, solution);
    if (certified.found) certified.found(program);
    if (bound >= target) break;
    if (solution.stop != StopReason::kOptimal && ++limited == kLimitedSolves) break;
    const bool known = std::find(programs.begin(), programs.end(), &program) != programs.end();
    // Nothing more to learn at the extreme.
    if (known && !between) break;
    between = !known;
    if (!known) add(program);
  }
  return bound;
}

}  // namespace motley::bounds
