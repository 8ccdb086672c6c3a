#include "planner/program_plan.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <iterator>
#include <limits>
#include <memory>
#include <mutex>
#include <numeric>
#include <set>

#include "bounds/compute_bound.h"
#include "cluster/part.h"
#include "core/error.h"
#include "core/parallel.h"
#include "core/ranges.h"
#include "planner/batch_step.h"
#include "solver/order.h"

namespace motley::planner {

using namespace spmd;

Plan make_plan(const std::shared_ptr<const BatchStep>& step, const Cluster& cluster,
               const ProgramRequest& request, const Alternation& s) {
  Plan plan;
  plan.model = request.model;
  plan.batch = request.batch;
  plan.optimizer = request.alternation.optimizer;
  plan.redundancy = request.alternation.redundancy;
  plan.cluster = cluster;
  plan.ratios = s.ratios;
  take_step(step, &plan);
  plan.program = s.program;
  const CostModel model(cluster);
  const Shares shares(s.ratios);
  const Launching calls = launching(*plan.theory, plan.program, model,
                                    Fractions(cluster, shares, plan.redundancy), plan.optimizer);
  plan.predicted_step_s = s.step() + calls.beyond(s.cost.comm - s.hidden);
  plan.lower_bound_s = s.lower_bound;
  for (int d = 0; d < cluster.size(); ++d)
    plan.peak_memory_bytes.push_back(s.cost.memory.peak[cluster.devices[d].type]);
  return plan;
}

namespace {

struct Known {
  const char* name;
  Restriction restriction;
  std::vector<double> (*ratios)(const Cluster&);
};
const Known kKnown[] = {{"dp-ev", Restriction::data_parallel, even_ratios},
                        {"dp-cp", Restriction::data_parallel, proportional_ratios},
                        {"zero", Restriction::zero, even_ratios},
                        {"expert-parallel", Restriction::expert_parallel, even_ratios},
                        {"tensor-parallel", Restriction::tensor_parallel, even_ratios}};

// Not of strategies().
const Known kOthers[] = {{"zero-cp", Restriction::zero, proportional_ratios},
                         {"fsdp", Restriction::gathered_parameters, even_ratios},
                         {"matrices", Restriction::cut_matrices, even_ratios}};

// Parts of a cluster that might be faster than all of it, each a list of devices; of those that
// look alike the first.
std::vector<std::vector<int>> parts_of(const Cluster& cluster) {
  std::set<std::vector<int>> parts;
  const auto add = [&](int begin, int end, const auto& belongs) {
    std::vector<int> devices;
    for (int d = begin; d < end; ++d)
      if (belongs(d)) devices.push_back(d);
    if (!devices.empty() && static_cast<int>(devices.size()) < cluster.size())
      parts.insert(std::move(devices));
  };
  // A group's devices of some speed.
  const auto add_group = [&](const Group& g, FlopsPerSecond least) {
    add(g.first_device, g.first_device + g.device_count,
        [&](int d) { return cluster.type_of(d).flops >= least; });
  };
  for (const Group& g : cluster.groups) add_group(g, 0);
  for (const DeviceType& slowest : cluster.types) {
    // The first device of the type.
    int first = 0;
    while (&cluster.type_of(first) != &slowest) ++first;
    add(first, first + 1, [](int) { return true; });
    for (const Group& g : cluster.groups) add_group(g, slowest.flops);
  }
  std::set<std::string> looks;
  std::vector<std::vector<int>> unlike;
  for (const std::vector<int>& part : parts)
    if (looks.insert(look_of(part_of(cluster, part))).second) unlike.push_back(part);
  return unlike;
}

}  // namespace

std::vector<std::string> strategies() {
  std::vector<std::string> names;
  for (const Known& known : kKnown) names.emplace_back(known.name);
  return names;
}

AlternationOptions restricted(const std::string& strategy, const Cluster& cluster,
                              AlternationOptions options) {
  const Known* known = std::find_if(std::begin(kKnown), std::end(kKnown),
                                    [&](const Known& k) { return strategy == k.name; });
  for (const Known& other : kOthers)
    if (strategy == other.name) known = &other;
  if (known == std::end(kKnown))
    throw user_error("plan", "there is no strategy '{}'; give one of {}", strategy,
                     fmt::join(strategies(), ", "));
  options.restriction = known->restriction;
  options.ratios = known->ratios(cluster);
  return options;
}

std::string knobs_of(const StrategyTime& opponent) {
  if (opponent.on_motley_s <= opponent.predicted_step_s * (1 + 1e-3)) return opponent.knobs;
  return fmt::format("{} ({} run by motley)", opponent.knobs, format_seconds(opponent.on_motley_s));
}

std::string part_in_words(const std::vector<int>& devices, int of, const std::string& cluster) {
  return fmt::format(
      "{} of the {} of {} ({}): with the others it would communicate longer than they save",
      devices.size(), of, cluster, format_ranges(devices));
}

// Of what is left of the time: for each baseline; for the whole cluster, where these took longer and
// parts of it are to be searched too.
constexpr double kOfBaseline = 0.1, kOfWhole = 0.4;

// Of models with fewer nodes the first search is so short that it runs beside the baselines.
constexpr size_t kFewNodes = 20'000;

class ProgramPlanner::Work {
 public:
  Work(std::shared_ptr<const BatchStep> step, const Cluster& cluster, ProgramRequest request)
      : step_(std::move(step)),
        graph_(step_->graph()),
        theory_(step_->theory()),
        cluster_(cluster),
        request_(std::move(request)),
        options_(request_.alternation),
        deadline_(options_.limits.deadline) {
    if (!request_.strategy.empty()) options_ = restricted(request_.strategy, cluster, options_);
    options_.overlap = backend_of(cluster_).hides;
    options_.certify = false;
    options_.found = [this](Seconds found) { note(found); };
    if (options_.orders == nullptr) options_.orders = &orders_;
  }

  ProgramResult run() {
    const bool free = options_.restriction == Restriction::none && options_.ratios.empty();
    std::vector<int> all(cluster_.size());
    std::iota(all.begin(), all.end(), 0);
    whole_ = best_ = attempt_on(cluster_, all, reductions_of(cluster_));
    const bool parts = request_.parts && free;
    if (parts) parts_ = parts_of(cluster_);
    ahead_.resize(parts_.size());
    if (request_.threads != 1 && graph_.nodes.size() < kFewNodes) {
      find_baselines([&] { search(whole_.get()); });
    } else {
      find_baselines({});
      AlternationOptions first = options_;
      if (slow_ && parts) first.limits.deadline = deadline_.part(kOfWhole);
      search(whole_.get(), first);
    }
    if (free && !best_->found.feasible && options_.memory_limit && !request_.planned)
      search_cut(best_.get());
    if (parts) search_parts();
    forget_ahead();
    // On one device a strategy is a program with collectives that do nothing.
    if (free && cluster_.size() > 1 && rival_.feasible &&
        !(best_->found.feasible && best_->found.step() <= rival_.step())) {
      const auto rival = attempt_on(cluster_, all, {});
      AlternationOptions options = options_;
      options.ratios = rival_.ratios[0];
      options.known = &rival_;
      rival->found = rival_;
      search(rival.get(), options);
      if (better(rival->found, best_->found)) best_ = rival;
    }
    return result();
  }

  ProgramResult certify(Seconds below) {
    const Seconds step = best_->found.step();
    certify(best_.get(), below);
    if (whole_ != best_ && whole_->found.feasible && whole_->found.step() <= kNearly * step) {
      certify(whole_.get(), std::min(below, kNearly * best_->found.step()));
      if (better(whole_->found, best_->found)) best_ = whole_;
    }
    return result();
  }

 private:
  // The search for a program on some devices, which may go on.
  struct Attempt {
    Cluster cluster;
    std::vector<int> devices;  // of the cluster that was asked for
    std::vector<ReductionProgram> reductions;
    CostModel model;
    std::unique_ptr<Alternator> alternator;  // null: there was no time for it
    Alternation found;
    double seconds = 0;  // of its searches
  };

  // A step that some search has found.
  void note(Seconds step) {
    for (Seconds before = least_step_; step < before;)
      if (least_step_.compare_exchange_weak(before, step)) break;
    if (request_.alternation.found) request_.alternation.found(step);
  }

  static bool better(const Alternation& a, const Alternation& b) {
    return a.feasible && (!b.feasible || a.step() < b.step());
  }

  std::vector<ReductionProgram> reductions_of(const Cluster& cluster) const {
    return request_.reductions && request_.strategy.empty() ? request_.reductions(cluster)
                                                            : std::vector<ReductionProgram>{};
  }

  static std::shared_ptr<Attempt> attempt_on(const Cluster& cluster, std::vector<int> devices,
                                             std::vector<ReductionProgram> reductions) {
    return std::shared_ptr<Attempt>(new Attempt{
        cluster, std::move(devices), reductions, CostModel(cluster, reductions), nullptr, {}, 0});
  }

  void search(Attempt* attempt) { search(attempt, options_); }
  void search(Attempt* attempt, const AlternationOptions& options) {
    timed(attempt, [&] {
      auto alternator = std::make_unique<Alternator>(theory_, attempt->model, options);
      Alternation found = alternator->run();
      attempt->alternator = std::move(alternator);
      return found;
    });
  }
  void certify(Attempt* attempt, Seconds below) {
    if (attempt->alternator) timed(attempt, [&] { return attempt->alternator->certify(below); });
  }

  // What it found is kept if there was no time for more.
  void timed(Attempt* attempt, const std::function<Alternation()>& search) {
    const auto start = std::chrono::steady_clock::now();
    Alternation& found = attempt->found;
    const int solves = found.solves;
    const int64_t states = found.states;
    try {
      deadline_.check();
      found = search();
    } catch (const TimeIsUp&) {
      if (!found.feasible) found.reason = kNoTime;
    }
    const std::lock_guard lock(mutex_);
    solves_ += found.solves - solves;
    states_ += found.states - states;
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    attempt->seconds += seconds;
    seconds_ += seconds;
  }

  Alternation find_baseline(const Known& known, const CostModel& plain, char* slow) const {
    AlternationOptions options = restricted(known.name, cluster_, request_.alternation);
    options.overlap = backend_of(cluster_).hides;
    options.recompute = false;
    options.certify = false;
    options.orders = options_.orders;
    options.found = options_.found;
    options.limits.deadline = deadline_.part(kOfBaseline);
    Alternation found;
    found.reason = kNoTime;
    try {
      deadline_.check();
      found = alternate(theory_, plain, options);
    } catch (const TimeIsUp&) {
    }
    *slow = options.limits.deadline.over();
    return found;
  }

  // `beside`, unless empty: what runs on another thread meanwhile; parts follow that will be
  // searched too, as far as one can tell by then.
  void find_baselines(const std::function<void()>& beside) {
    const int count = request_.baselines ? static_cast<int>(std::size(kKnown)) : 0;
    std::vector<Alternation> found(count);
    std::vector<char> slow(count, 0);
    const CostModel plain(cluster_);
    std::atomic<bool> over = false;
    const int ahead = beside ? static_cast<int>(parts_.size()) : 0;
    parallel_for(count + 1 + ahead, beside ? request_.threads : 1, [&](int i) {
      if (i > count) {
        const int p = i - count - 1;
        if (over || least_step_ == std::numeric_limits<Seconds>::infinity()) return;
        auto part = attempt_on_part(p, least_step_);
        if (part) search(part.get());
        ahead_[p] = std::move(part);
      } else if (i > 0)
        found[i - 1] = find_baseline(kKnown[i - 1], plain, &slow[i - 1]);
      else if (beside) {
        beside();
        over = true;
      }
    });
    for (int k = 0; k < count; ++k) {
      Alternation& s = found[k];
      slow_ = slow_ || slow[k];
      baselines_.push_back(
          {kKnown[k].name, s.feasible, s.feasible ? s.step() : 0, s.feasible ? "" : s.reason});
      if (better(s, rival_)) rival_ = std::move(s);
    }
  }

  // Nothing was found that fits: with all parameters cut, something may.
  void search_cut(Attempt* attempt) {
    Alternation found = attempt->found;
    AlternationOptions options = options_;
    options.restriction = Restriction::zero;
    search(attempt, options);
    if (!attempt->found.feasible) attempt->found = std::move(found);
  }

  // A part has no more memory than the whole.
  void search_parts() {
    if (!best_->found.feasible && options_.memory_limit) return;
    const Seconds step =
        best_->found.feasible ? best_->found.step() : std::numeric_limits<Seconds>::infinity();
    std::vector<std::shared_ptr<Attempt>> parts, fresh;
    for (size_t p = 0; p < parts_.size(); ++p) {
      auto part = attempt_on_part(p, step);
      if (part && ahead_[p])
        part = std::move(ahead_[p]);
      else if (part)
        fresh.push_back(part);
      if (part) parts.push_back(std::move(part));
    }
    parallel_for(static_cast<int>(fresh.size()), request_.threads,
                 [&](int p) { search(fresh[p].get()); });
    for (const auto& part : parts)
      if (better(part->found, best_->found)) best_ = part;
  }

  // Null if no program of the part takes less than the step.
  std::shared_ptr<Attempt> attempt_on_part(size_t p, Seconds step) const {
    const std::vector<int>& devices = parts_[p];
    if (options_.redundancy > 0 && devices.size() < 2) return nullptr;  // nowhere to keep it
    const Cluster part = part_of(cluster_, devices);
    if (step < std::numeric_limits<Seconds>::infinity() &&
        bounds::compute_bound(theory_, CostModel(part)) >= step)
      return nullptr;
    return attempt_on(part, devices, reductions_of(part));
  }

  // What was searched for in vain does not count.
  void forget_ahead() {
    for (const auto& part : ahead_)
      if (part) {
        solves_ -= part->found.solves;
        states_ -= part->found.states;
        seconds_ -= part->seconds;
      }
    ahead_.clear();
  }

  ProgramResult result() const {
    const Alternation& best = best_->found;
    ProgramResult result;
    result.feasible = best.feasible;
    result.reason = best.reason;
    result.baselines = baselines_;
    result.search_s = seconds_;
    result.solves = solves_;
    result.states = states_;
    result.synchronised_bound_s = best.synchronised_bound;
    result.hidden_s = best.hidden;
    result.devices = best_->devices;
    if (!best.feasible) return result;
    result.plan = make_plan(step_, best_->cluster, request_, best);
    const auto largest = static_cast<Bytes>(largest_all_reduce(
        *result.plan.theory, result.plan.program, !best_->model.backend().half_sums));
    result.plan.reductions = best_->reductions;
    std::erase_if(result.plan.reductions,
                  [&](const ReductionProgram& r) { return r.from > largest; });
    return result;
  }

  const std::shared_ptr<const BatchStep> step_;
  const Graph& graph_;
  const Theory& theory_;
  const Cluster cluster_;
  const ProgramRequest request_;
  AlternationOptions options_;
  solver::OrderMemo orders_;
  const Deadline deadline_;
  std::shared_ptr<Attempt> whole_, best_;
  std::vector<std::vector<int>> parts_;          // of the cluster
  std::vector<std::shared_ptr<Attempt>> ahead_;  // [part] searched before it was sure to be
  std::atomic<Seconds> least_step_ = std::numeric_limits<Seconds>::infinity();  // found so far
  Alternation rival_;                                                           // the best baseline
  bool slow_ = false;  // there was no time for one of them
  std::vector<StrategyTime> baselines_;
  std::mutex mutex_;    // of what follows, as searches run on threads
  double seconds_ = 0;  // of searches
  int solves_ = 0;
  int64_t states_ = 0;
};

ProgramPlanner::ProgramPlanner(std::shared_ptr<const BatchStep> step, const Cluster& cluster,
                               ProgramRequest request)
    : work_(std::make_unique<Work>(std::move(step), cluster, std::move(request))) {}
ProgramPlanner::~ProgramPlanner() = default;
ProgramResult ProgramPlanner::run() { return work_->run(); }
ProgramResult ProgramPlanner::certify(Seconds below) { return work_->certify(below); }

ProgramResult plan_program(Graph graph, const Cluster& cluster, const ProgramRequest& request) {
  return plan_program(std::make_shared<const BatchStep>(std::move(graph), request.batch), cluster,
                      request);
}

ProgramResult plan_program(std::shared_ptr<const BatchStep> step, const Cluster& cluster,
                           const ProgramRequest& request) {
  ProgramPlanner planner(std::move(step), cluster, request);
  ProgramResult result = planner.run();
  if (!result.feasible || !request.alternation.certify) return result;
  return planner.certify(std::numeric_limits<Seconds>::infinity());
}

}  // namespace motley::planner
