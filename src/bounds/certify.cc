#include "bounds/certify.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "bounds/cutting_planes.h"
#include "core/infinity.h"
#include "cost/overlap.h"

namespace motley::bounds {

using namespace solver;
using namespace spmd;

namespace {

constexpr double kCertifyGain =
    1e-3;                          // of the step, that another search could gain for it to be made
constexpr int kLimitedSolves = 2;  // of one class, that may stop at their limit of states
constexpr int kSolves = 16;        // of one class
constexpr int kClasses = 300;      // times that a class is looked at closer
constexpr int64_t kStates = 500;   // of one step of a search
constexpr double kWorthDeciding = 2e-3;  // of a step: what the message of a gradient takes

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

// The bound of a class of programs.
struct Certifier::BoundProblem {
  ProblemBuilder* builder;
  const Order* order;
  WarmStart* warm;
  std::vector<int64_t> from;
  // Nodes, 0: none. No program communicates from `closed` on but for gradients; all do from
  // `barrier` on.
  int64_t closed = 0, barrier = 0;
  std::vector<Decision> decided = {};
  Mixture mixture = {};  // in: that of the class it is part of, empty: none; out: what proves most
  Seconds bound = 0;     // out
  std::vector<const Program*> weakest = {};  // out: that keep the bound low
};

// Of programs, by where their last barrier runs and which gradients they all-reduce.
struct Certifier::Class {
  int64_t first, end;         // where the last barrier runs; 0: or nowhere
  std::vector<int64_t> cuts;  // where other stretches begin
  Seconds bound;
  std::vector<const Program*> weakest;
  Mixture mixture;
  std::vector<Decision> decided = {};
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

Seconds Certifier::bound(const BoundRequest& request, int divisions) {
  const Fractions& fractions = *request.fractions;
  const int64_t begin = builder_->first_gradient();
  std::vector<int64_t> cuts{begin};
  if (request.first.valid()) cuts.push_back(builder_->ready(request.first));
  BoundProblem all{builder_, order_, warm_, stretches(std::move(cuts))};
  raise_bound(request, &all);
  const auto nodes = static_cast<int64_t>(theory_.graph().nodes.size());
  bool first_time = true;  // tables that tell the stretches apart are new
  const Seconds bound = branch_and_bound(
      std::vector<Class>{{0, nodes + 1, all.from, all.bound, {request.program}, all.mixture}},
      std::min(divisions, kClasses),
      [&](const Class& least) {
        return request.enough(effort_) || least.bound >= (1 - kWideGap) * request.step();
      },
      [&](Class weak, std::vector<Class>* classes) {
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
        const ValueId gradient = last > 0 || queue > 0
                                     ? ValueId()
                                     : branching_gradient(request, weak.weakest, weak.decided);
        if (last == 0 && !gradient.valid() && queue == 0 && !first_time) {
          classes->push_back(std::move(weak));
          return false;
        }
        first_time = false;
        if (last == 0 && queue > 0) weak.cuts.push_back(queue);
        divide(request, weak, last, gradient, classes);
        return true;
      });
  return std::min(bound, request.step());
}

// Adds the parts of a class: programs whose last barrier is at `last` or later and the others
// (0: not divided by that), or those that all-reduce the gradient and the others (none: not that).
void Certifier::divide(const BoundRequest& request, const Class& weak, int64_t last,
                       ValueId gradient, std::vector<Class>* classes) {
  const auto nodes = static_cast<int64_t>(theory_.graph().nodes.size());
  std::vector<int64_t> from = weak.cuts;
  from.insert(from.end(), {weak.first, last, weak.end});
  from = stretches(std::move(from));
  std::vector<ValueId> separate;
  for (const Decision& d : weak.decided) separate.push_back(d.gradient);
  if (gradient.valid()) separate.push_back(gradient);
  ProblemBuilder builder(theory_, model_, optimizer_, restriction_, from, separate);
  builder.set_sizes(kLargestSizes);
  builder.price(*request.fractions);
  const Order order = make_order(builder.problem());
  WarmStart warm;
  const auto add = [&](int64_t after, int64_t before, const std::vector<Decision>& decided) {
    BoundProblem part{&builder, &order, &warm, from};
    part.barrier = after;
    part.closed = before <= nodes ? before : 0;
    part.decided = decided;
    // That of a later barrier proves most of those that communicate after it.
    if (after == weak.first) part.mixture = weak.mixture;
    raise_bound(request, &part);
    classes->push_back({after, before, weak.cuts, std::max(weak.bound, part.bound),
                        std::move(part.weakest), std::move(part.mixture), decided});
  };
  if (gradient.valid()) {
    for (const bool reduced : {false, true}) {
      std::vector<Decision> decided = weak.decided;
      decided.push_back({gradient, reduced});
      add(weak.first, weak.end, decided);
    }
    return;
  }
  if (last > 0) add(last, weak.end, weak.decided);
  add(weak.first, last > 0 ? last : weak.end, weak.decided);
}

// The largest gradient that some of the programs all-reduce and others do not, if it is large and
// not decided; else none.
ValueId Certifier::branching_gradient(const BoundRequest& request,
                                      const std::vector<const Program*>& programs,
                                      const std::vector<Decision>& decided) const {
  std::map<ValueId, size_t> times;
  for (const Program* program : programs)
    for (ValueId gradient : builder_->reduced(*program)) ++times[gradient];
  for (const Decision& d : decided) times.erase(d.gradient);
  ValueId largest;
  Seconds most = kWorthDeciding * request.step();
  for (const auto& [gradient, count] : times) {
    const Seconds seconds = builder_->reduction_seconds(gradient);
    if (count == programs.size() || seconds < most) continue;
    largest = gradient;
    most = seconds;
  }
  return largest;
}

// The greatest least price of the class over mixtures of bounds, as far as searches found it.
void Certifier::raise_bound(const BoundRequest& request, BoundProblem* problem) {
  const Fractions& fractions = *request.fractions;
  const int types = model_.types(), stretches = static_cast<int>(problem->from.size()) + 1;
  const auto stretch = [&](int64_t node) { return stretch_of(problem->from, node); };
  const std::vector<OverlapBound> bounds =
      overlap_bounds(stretches, types, problem->barrier > 0 ? stretch(problem->barrier) : 0);
  std::vector<const Program*> programs;
  const auto line = [&](const Program& program) -> PriceLine {
    OverlapPricing parts{problem->from, {}, {}};
    parts.decided = problem->decided;
    return {0, overlap_values(bounds, builder_->overlap_cost(program, fractions, parts))};
  };
  CuttingPlanes planes;
  std::vector<PriceLine> others;
  for (const ProgramPool::Found& f : pool_->found()) {
    const int64_t last = builder_->last_barrier(*f.program, fractions.shares());
    const std::vector<ValueId> reduced = builder_->reduced(*f.program);
    const bool agrees =
        std::all_of(problem->decided.begin(), problem->decided.end(), [&](const Decision& d) {
          return std::binary_search(reduced.begin(), reduced.end(), d.gradient) == d.reduced;
        });
    if (agrees && (problem->closed == 0 || last < problem->closed) && last >= problem->barrier) {
      planes.lines.push_back(line(*f.program));
      programs.push_back(f.program.get());
    } else {
      others.push_back(line(*f.program));
    }
  }
  if (!problem->mixture.empty()) planes.best = weights_of(problem->mixture, bounds, problem->from);
  if (planes.lines.empty() && !others.empty())
    planes.at = max_min(others);
  else
    planes.at.weights.assign(bounds.size(), 1.0 / static_cast<double>(bounds.size()));
  const bool divided = problem->builder != builder_;
  const PlaneRules rules{.step = request.step,
                         .gap = divided ? kWideGap / 2 : kCertifyGain,
                         .gain = kCertifyGain,
                         .reachable = divided ? 0 : 1 - kWideGap,
                         .searches = kSolves,
                         .limited = kLimitedSolves,
                         .halfway = true};
  const auto search = [&](const MaxMin& at) -> PlaneSearch {
    OverlapPricing pricing = mixture(bounds, at.weights, problem->from, types);
    if (problem->closed > 0) pricing.closed = stretch(problem->closed);
    pricing.decided = problem->decided;
    problem->builder->price(fractions, 1, &pricing);
    const Solution solution = solve(*problem->builder, *problem->order, problem->warm);
    if (solution.stop == StopReason::kInfeasible) return {.bound = kInfinity};
    PlaneSearch found;
    found.bound = solution.lower_bound + problem->builder->decided_seconds(pricing);
    for (int t = 0; t < types; ++t)
      found.bound += pricing.compute[0][t] * model_.per_step(t, theory_.graph());
    if (solution.option.empty()) return found;
    const Program& program = pool_->of(*builder_, solution);
    if (request.found) request.found(program);
    found.line = line(program);
    found.known = std::find(programs.begin(), programs.end(), &program) != programs.end();
    found.limited = solution.stop != StopReason::kOptimal;
    if (!found.known) programs.push_back(&program);
    return found;
  };
  bounds::raise_bound(
      rules, [&] { return !request.enough(effort_); }, search, &planes);
  problem->bound = planes.bound;
  for (const size_t l : planes.cheapest) problem->weakest.push_back(programs[l]);
  if (!planes.raised) return;
  problem->mixture.clear();
  for (size_t b = 0; b < bounds.size(); ++b)
    problem->mixture[name_of(bounds[b], problem->from)] = planes.best[b];
}

}  // namespace motley::bounds
