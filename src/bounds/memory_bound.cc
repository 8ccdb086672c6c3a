#include "bounds/memory_bound.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <optional>

#include "bounds/cutting_planes.h"
#include "bounds/memory_problem.h"
#include "core/infinity.h"
#include "solver/folded.h"
#include "solver/order.h"

namespace motley::bounds {

using namespace solver;
using namespace spmd;

namespace {

constexpr double kTarget = 0.9 * kWideGap;  // gap at which a class of programs is left alone
constexpr double kGain = 1e-3;     // of the step, that another search could gain for it to be made
constexpr int kMemorySolves = 12;  // of one class
constexpr int kMemoryClasses = 60;
constexpr int64_t kMemoryStates = 200;  // of one step of a search
constexpr int kSweeps = 1000;           // operators that run twice or not take long to agree
constexpr double kTight = 1e-6;         // of the bound, that they go on for

// Multipliers are in units of a step per memory of a device, or per so many blocks.
constexpr double kFirstMost = 1, kMost = 64;
constexpr double kBlocks = 50;

constexpr double kWhole = 0.02;  // blocks, that a mean is away from a whole number at most
constexpr double kMixed = 0.01;  // part of a mixture, for programs to be looked at between
constexpr size_t kBetween = 8;

// Gradients whose messages take that part of a step begin stretches of their own.
constexpr double kLargeGradient = 5e-3;
constexpr size_t kLargeGradients = 3;

// The nodes for which two solutions choose differently, those together that share a value of which
// they choose different forms.
std::vector<std::vector<int>> differences(const Problem& problem, const std::vector<int>& a,
                                          const std::vector<int>& b) {
  std::vector<int> part(problem.nodes.size());
  std::iota(part.begin(), part.end(), 0);
  auto root = [&](int n) {
    while (part[n] != n) n = part[n] = part[part[n]];
    return n;
  };
  std::vector<int> touched(problem.value_table.size(), -1);
  for (int n = 0; n < static_cast<int>(problem.nodes.size()); ++n) {
    if (a[n] == b[n]) continue;
    const ProblemNode& node = problem.nodes[n];
    const Option &x = problem.option_tables[node.table].options[a[n]],
                 &y = problem.option_tables[node.table].options[b[n]];
    auto touch = [&](int value, int form, int other) {
      if (form == other) return;
      if (touched[value] >= 0) part[root(n)] = root(touched[value]);
      touched[value] = n;
    };
    for (size_t i = 0; i < node.inputs.size(); ++i) touch(node.inputs[i], x.in[i], y.in[i]);
    for (size_t i = 0; i < node.outputs.size(); ++i) touch(node.outputs[i], x.out[i], y.out[i]);
  }
  std::vector<std::vector<int>> parts;
  std::map<int, size_t> number;
  for (int n = 0; n < static_cast<int>(problem.nodes.size()); ++n) {
    if (a[n] == b[n]) continue;
    const auto [it, fresh] = number.try_emplace(root(n), parts.size());
    if (fresh) parts.emplace_back();
    parts[it->second].push_back(n);
  }
  return parts;
}

class MemoryBoundSearch {
 public:
  MemoryBoundSearch(const Theory& theory, const CostModel& model, Optimizer optimizer,
                    Restriction restriction, const Limits& limits,
                    const MemoryBoundRequest& request)
      : theory_(theory), model_(model), request_(request), limits_(limits) {
    limits_.max_states = std::min(limits_.max_states, kMemoryStates);
    limits_.sweeps = limits_.max_sweeps = kSweeps;
    limits_.tight = kTight;
    builder_.emplace(theory, model, optimizer, restriction);
    if (request.overlap) {
      from_ = stretches();
      builder_.emplace(theory, model, optimizer, restriction, from_);
    }
    builder_->set_sizes(kLargestSizes);
    builder_->price(*request.fractions);
    const NodeId peak_node = MemoryProblem::peak_node(theory, *builder_, *request.fractions);
    if (!peak_node.valid()) return;
    held_.emplace(theory, *builder_, *request.block_of, *request.fractions, peak_node, from_);
    order_ = make_order(held_->problem());
    if (request.overlap)
      bounds_ = overlap_bounds(static_cast<int>(from_.size()) + 1, model.types(), 0);
  }

  MemoryBound run() {
    if (!held_) return result_;
    unit_ = request_.step();
    const Seconds bound = branch_and_bound(
        std::vector<Class>{{}}, kMemoryClasses,
        [&](const Class& least) {
          return done(least) || (!found_.empty() && request_.enough(result_.effort));
        },
        [&](Class weak, std::vector<Class>* classes) {
          if (!raise(&weak)) return true;
          const std::optional<CountLimit> split = done(weak) ? std::nullopt : look_between(weak);
          if (!split) {
            classes->push_back(weak);
            return done(weak);
          }
          for (const bool at_least : {false, true}) {
            Class part = weak;
            part.limits.push_back({split->kind, split->count + at_least, at_least});
            classes->push_back(std::move(part));
          }
          return true;
        });
    result_.bound = std::min(request_.step(), bound);
    return result_;
  }

 private:
  // Of the blocks of a kind that run twice.
  struct CountLimit {
    int kind, count;
    bool at_least;  // else at most
  };
  struct Class {
    std::vector<CountLimit> limits = {};
    Seconds bound = 0;
  };
  struct Found {
    PriceLine line;             // of its bounds; no limits
    std::vector<Bytes> memory;  // [type]
    std::vector<int> twice;     // [kind]
    std::vector<int> option;    // [node of the builder]
  };

  bool done(const Class& c) const { return c.bound >= (1 - kTarget) * request_.step(); }

  // Where the stretches of the bounds begin: at the first gradient, where messages begin to queue,
  // and at large gradients.
  std::vector<int64_t> stretches() const {
    const Graph& graph = theory_.graph();
    std::vector<int64_t> from{builder_->first_gradient()};
    if (request_.first.valid()) from.push_back(builder_->ready(request_.first));
    std::vector<std::pair<Seconds, int64_t>> large;
    for (const Parameter& p : graph.parameters)
      if (p.gradient.valid())
        if (const Seconds s = builder_->reduction_seconds(p.gradient);
            s > kLargeGradient * request_.step())
          large.push_back({-s, builder_->ready(p.gradient)});
    std::sort(large.begin(), large.end());
    for (size_t i = 0; i < std::min(large.size(), kLargeGradients); ++i)
      from.push_back(large[i].second);
    std::sort(from.begin(), from.end());
    from.erase(std::unique(from.begin(), from.end()), from.end());
    std::erase_if(from, [&](int64_t node) {
      return node <= 0 || node >= static_cast<int64_t>(graph.nodes.size());
    });
    return from;
  }

  // Prices at weights of the bounds. Returns those of the types, and what every program takes in
  // addition.
  Weights price(const std::vector<double>& weights, Seconds* fixed_seconds) {
    *fixed_seconds = 0;
    std::vector<double> of_type = weights;
    if (request_.overlap) {
      const OverlapPricing pricing = mixture(bounds_, weights, from_, model_.types());
      builder_->price(*request_.fractions, 1, &pricing);
      held_->price(&pricing);
      of_type = pricing.compute[0];
    }
    for (int t = 0; t < model_.types(); ++t)
      *fixed_seconds += of_type[t] * model_.per_step(t, theory_.graph());
    if (request_.overlap) of_type.assign(model_.types(), 1);
    return {of_type, {}};
  }

  size_t bounds() const { return request_.overlap ? bounds_.size() : model_.types(); }

  // Seconds of a solution at the present prices, no bytes.
  Seconds seconds_of(const Solution& solution, const Weights& weights) const {
    const Problem& problem = held_->problem();
    Seconds seconds = 0;
    for (size_t n = 0; n < problem.nodes.size(); ++n)
      seconds += solver::price(
          problem.option_tables[problem.nodes[n].table].options[solution.option[n]], weights);
    for (const Conversion& c : solution.conversions) {
      const FormTable& table = problem.form_tables[problem.value_table[c.value]];
      seconds += table.convert[c.from * table.forms + c.to];
    }
    return seconds;
  }

  Found describe(const Solution& solution) {
    const Problem& problem = held_->problem();
    Found found;
    found.twice = held_->twice(solution);
    found.memory = held_->fixed_bytes();
    for (size_t n = 0; n < problem.nodes.size(); ++n) {
      const Option& o = problem.option_tables[problem.nodes[n].table].options[solution.option[n]];
      for (int t = 0; t < model_.types(); ++t) found.memory[t] += o.memory[t];
    }
    const std::vector<Seconds> none(held_->kinds().size(), 0);
    held_->price_modes(none, none);
    for (size_t b = 0; b < bounds(); ++b) {
      std::vector<double> only(bounds(), 0);
      only[b] = 1;
      Seconds fixed_seconds = 0;
      const Weights weights = price(only, &fixed_seconds);
      found.line.compute.push_back(seconds_of(solution, weights) + fixed_seconds);
    }
    return found;
  }

  // By how much a program exceeds the memory of each type and the limits of a class.
  std::vector<Seconds> excess(const Found& f, const Class& c) const {
    std::vector<Seconds> excess;
    for (int t = 0; t < model_.types(); ++t) {
      const Bytes memory = model_.cluster().types[t].memory;
      excess.push_back((f.memory[t] - memory) / memory * unit_);
    }
    for (const CountLimit& l : c.limits)
      excess.push_back((l.at_least ? l.count - f.twice[l.kind] : f.twice[l.kind] - l.count) *
                       unit_ / kBlocks);
    return excess;
  }

  std::vector<PriceLine> lines(const Class& c) const {
    std::vector<PriceLine> lines;
    for (const Found& f : found_) {
      lines.push_back(f.line);
      lines.back().excess = excess(f, c);
    }
    return lines;
  }

  // Raises the bound of a class as far as multipliers go; false: no program is in it.
  bool raise(Class* c) {
    CuttingPlanes planes{.lines = lines(*c), .most = most_, .bound = c->bound};
    planes.at.weights.assign(bounds(), 1.0 / static_cast<double>(bounds()));
    planes.at.multipliers.assign(model_.types() + c->limits.size(), 0);
    const PlaneRules rules{.step = request_.step,
                           .gap = kTarget,
                           .gain = kGain,
                           .searches = kMemorySolves,
                           .most_multiplier = kMost};
    raise_bound(
        rules, [&] { return found_.empty() || !request_.enough(result_.effort); },
        [&](const MaxMin& at) { return search(*c, at); }, &planes);
    c->bound = planes.bound;
    most_ = planes.most;
    return c->bound < kInfinity;
  }

  PlaneSearch search(const Class& c, const MaxMin& at) {
    const int types = model_.types();
    Seconds constant = 0;
    Weights weights = price(at.weights, &constant);
    weights.memory.assign(types, 0);
    std::vector<Seconds> twice(held_->kinds().size(), 0), once = twice;
    for (int t = 0; t < types; ++t) {
      const Bytes memory = model_.cluster().types[t].memory;
      weights.memory[t] = at.multipliers[t] * unit_ / memory;
      constant += weights.memory[t] * (held_->fixed_bytes()[t] - memory);
    }
    for (size_t l = 0; l < c.limits.size(); ++l) {
      const CountLimit& limit = c.limits[l];
      const Seconds each = at.multipliers[types + l] * unit_ / kBlocks;
      (limit.at_least ? once : twice)[limit.kind] += each;
      constant -= each * (limit.at_least ? held_->kinds()[limit.kind] - limit.count : limit.count);
    }
    held_->price_modes(twice, once);
    const Solution solution = solve_folded(held_->problem(), order_, weights, limits_, &warm_);
    ++result_.effort.solves;
    result_.effort.states += solution.states;
    if (solution.stop == StopReason::kInfeasible) return {.bound = kInfinity};
    if (solution.stop != StopReason::kOptimal) result_.effort.worst_stop = solution.stop;
    PlaneSearch result{.bound = solution.lower_bound + constant};
    if (solution.option.empty()) return result;
    Found found = describe(solution);
    Solution plain = held_->plain(solution);
    request_.found(plain);
    found.option = std::move(plain.option);
    result.line = found.line;
    result.line->excess = excess(found, c);
    result.known = std::any_of(found_.begin(), found_.end(), [&](const Found& f) {
      return f.line.compute == found.line.compute && f.memory == found.memory &&
             f.twice == found.twice;
    });
    if (!result.known) found_.push_back(std::move(found));
    return result;
  }

  // Looks at programs of the mixture that keeps the bound of a class low, and between them. Returns
  // by which count to divide it; none: by none.
  std::optional<CountLimit> look_between(const Class& c) {
    const MaxMin best = max_min(lines(c), most_);
    std::vector<int> by_part(found_.size());
    std::iota(by_part.begin(), by_part.end(), 0);
    std::stable_sort(by_part.begin(), by_part.end(),
                     [&](int a, int b) { return best.mix[a] > best.mix[b]; });
    if (by_part.size() > 1 && best.mix[by_part[1]] > kMixed)
      blend(found_[by_part[0]].option, found_[by_part[1]].option, best.weights);
    std::vector<double> mean(held_->kinds().size(), 0);
    for (size_t f = 0; f < found_.size(); ++f)
      for (size_t k = 0; k < mean.size(); ++k) mean[k] += best.mix[f] * found_[f].twice[k];
    std::optional<CountLimit> result;
    double farthest = kWhole;
    for (size_t k = 0; k < mean.size(); ++k)
      if (const double part = std::abs(mean[k] - std::round(mean[k])); part > farthest) {
        farthest = part;
        result = CountLimit{static_cast<int>(k), static_cast<int>(std::floor(mean[k])), false};
      }
    return result;
  }

  // The first parts of one program and the others of the other, both ways: gradients of the last
  // layers are made first and may be hidden or end before those of the first begin.
  void blend(const std::vector<int>& one, const std::vector<int>& other,
             const std::vector<double>& bound_weights) {
    Seconds fixed_seconds = 0;
    const Weights weights = price(bound_weights, &fixed_seconds);
    const std::vector<std::vector<int>> parts = differences(builder_->problem(), one, other);
    const size_t tries = std::min(parts.size(), kBetween);
    for (const bool swapped : {false, true}) {
      std::vector<int> option = swapped ? other : one;
      for (size_t i = 1, done = 0; i < tries; ++i) {
        for (; done < i * parts.size() / tries; ++done)
          for (int n : parts[done]) option[n] = (swapped ? one : other)[n];
        const Solution between = evaluate(builder_->problem(), option, weights);
        if (!between.option.empty() && between.price < kInfinity) request_.found(between);
      }
    }
  }

  const Theory& theory_;
  const CostModel& model_;
  const MemoryBoundRequest& request_;
  Limits limits_;
  std::vector<int64_t> from_;
  std::optional<ProblemBuilder> builder_;
  std::optional<MemoryProblem> held_;
  Order order_;
  WarmStart warm_;
  std::vector<OverlapBound> bounds_;
  std::vector<Found> found_;
  double most_ = kFirstMost;
  Seconds unit_ = 0;
  MemoryBound result_;
};

}  // namespace

MemoryBound memory_bound(const Theory& theory, const CostModel& model, Optimizer optimizer,
                         Restriction restriction, const Limits& limits,
                         const MemoryBoundRequest& request) {
  return MemoryBoundSearch(theory, model, optimizer, restriction, limits, request).run();
}

}  // namespace motley::bounds
