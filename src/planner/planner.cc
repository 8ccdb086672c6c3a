#include "planner/planner.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "bounds/compute_bound.h"
#include "core/error.h"
#include "core/log.h"
#include "core/parallel.h"
#include "graph/precision.h"
#include "planner/alternation.h"
#include "planner/batch_step.h"
#include "planner/calibrated.h"
#include "planner/narrow_inputs.h"
#include "planner/targets.h"
#include "sim/simulate.h"

namespace motley::planner {

namespace {

void check(const PlanOptions& o) {
  const std::vector<std::string> names = engine_names();
  if (std::find(names.begin(), names.end(), o.engine) == names.end())
    throw user_error("plan", "there is no engine '{}'; give one of {}", o.engine,
                     fmt::join(names, ", "));
  if (!o.target.empty()) {
    if (!find_target(o.target))
      throw user_error("plan", "there is no target '{}'; give one of {}", o.target, target_names());
    if (o.engine != "auto" || !o.strategy.empty() || o.virtual_devices.forced() ||
        !o.segments.one() || !o.ratios.empty())
      throw user_error("plan",
                       "a target (--for) cannot be combined with an engine, a strategy, virtual "
                       "devices or segments; leave them out");
  }
  if (o.engine == "virtual" && (o.virtual_devices.off || !o.fix.empty() || !o.strategy.empty()))
    throw user_error("plan",
                     "engine virtual cannot be combined with --virtual-devices off, fixed choices "
                     "or a strategy; leave one of them out");
  if (o.virtual_devices.forced() &&
      ((o.engine != "auto" && o.engine != "virtual") || !o.fix.empty() || !o.strategy.empty()))
    throw user_error("plan",
                     "virtual devices cannot be combined with an engine, fixed choices or a "
                     "strategy; leave one of them out");
  if (!o.fix.empty() && o.engine != "auto" && o.engine != "grid")
    throw user_error("plan",
                     "fixed choices (--fix) are of the grid engine; with engine {} leave them out, "
                     "or give --engine grid",
                     o.engine);
  if (!o.segments.one() && (!o.strategy.empty() || !o.fix.empty() || o.virtual_devices.forced() ||
                            (o.engine != "auto" && o.engine != "spmd")))
    throw user_error("plan",
                     "segments are of programs that the spmd engine searches; leave out strategy, "
                     "fixed choices, virtual devices and other engines");
  if (o.duplex > 0 &&
      ((o.engine != "auto" && o.engine != "duplex") || !o.target.empty() || !o.fix.empty() ||
       o.virtual_devices.forced() || !o.segments.one() || !o.micro_batches.empty()))
    throw user_error("plan",
                     "parts of a batch (--duplex) are of one program; leave out engines, targets, "
                     "fixed choices, micro-batches, virtual devices and segments");
  if (o.engine == "duplex" && o.duplex < 0)
    throw user_error("plan", "engine duplex with --duplex off has nothing to do; leave one out");
  if (!o.ratios.empty() && o.engine != "spmd" && o.engine != "duplex" && o.duplex <= 0)
    throw user_error("plan", "ratios are shares of one program; give engine spmd, not {}",
                     o.engine);
  for (int64_t size : o.micro_batches)
    if (o.strategy.empty() && (size < 1 || o.batch % size != 0))
      throw user_error("plan",
                       "--batch {} is not a multiple of micro-batches of {}; give one that is",
                       o.batch, size);
  grid::parse_fixed(o.fix);
}

// State is kept twice by one program on several devices, which talk by messages.
void check_redundancy(const Cluster& cluster, const PlanOptions& o) {
  if (o.redundancy == 0) return;
  if (o.redundancy != 1) throw user_error("plan", "--redundancy is {}; give 0 or 1", o.redundancy);
  if ((o.engine != "auto" && o.engine != "spmd") || o.duplex > 0 || !o.target.empty() ||
      !o.fix.empty() || o.virtual_devices.forced())
    throw user_error("plan",
                     "--redundancy 1 is of one program; leave out other engines than spmd, "
                     "targets, fixed choices, virtual devices and parts of a batch");
  if (cluster.size() < 2)
    throw user_error("plan",
                     "--redundancy is 1, but cluster {} has one device; give 0, or a cluster of "
                     "two devices",
                     cluster.name);
  if (const Backend backend = backend_of(cluster); !backend.messages)
    throw user_error("plan",
                     "--redundancy is 1, which needs messages between two workers, and the "
                     "backend {} of cluster {} has none; give 0, or name another backend in the "
                     "cluster file",
                     backend.name, cluster.name);
}

// What the devices talk over cannot do what is asked for.
void check_backend(const Cluster& cluster, const PlanOptions& options) {
  const Backend backend = backend_of(cluster);
  bool wanted = false, any = false;  // without messages
  for (const Engine& engine : engines()) {
    wanted = wanted || (engine.wanted(options) && !engine.messages);
    any = any || engine.wanted(options);
  }
  if (!backend.messages && any && !wanted)
    throw user_error(
        "plan",
        "the backend {} of cluster {} has no messages between two workers, which what is asked "
        "for needs; give --engine spmd, or name another backend in the cluster file",
        backend.name, cluster.name);
  if (!backend.hides && (options.duplex > 0 || options.engine == "duplex"))
    throw user_error(
        "plan",
        "the backend {} of cluster {} hides nothing, which parts of a batch are for; leave "
        "--duplex out, or say 'hides: true' of the backend in the cluster file",
        backend.name, cluster.name);
}

// Whether an engine's plans can run over the backend, and are worth anything there.
bool can_run(const Engine& engine, const Backend& backend) {
  if (engine.messages && !backend.messages) return false;
  return backend.hides || std::string(engine.name) != "duplex";
}

GraphOf in_precision(const GraphOf& graph_of, DType precision) {
  if (precision == DType::f32) return graph_of;
  return [=](int64_t samples) {
    const Graph graph = graph_of(samples);
    check_precision(graph, precision);
    return with_precision(graph, precision);
  };
}

Cluster as_measured(const Cluster& cluster, const PlanOptions& options, const GraphOf& graph_of) {
  return options.measured.empty() ? cluster : corrected(cluster, options, graph_of);
}

// Whether plans that do not compute the same as one device may be the answer.
bool asked(const PlanOptions& options) {
  return options.engine != "auto" || options.duplex > 0 || !options.fix.empty() ||
         !options.strategy.empty() || options.virtual_devices.forced();
}

// What state_bytes() of a step that is not there yet is at least: gradients may be in few bits.
Bytes least_state(const Graph& graph, const Parameter& p, const PlanOptions& options) {
  const TensorSpec& spec = graph.spec(p.value);
  const auto bytes = static_cast<Bytes>(spec.bytes());
  if (p.frozen) return bytes;
  const auto gradient = static_cast<Bytes>(TensorSpec{options.precision, spec.shape}.bytes());
  return bytes * (1 + state_factor(options.optimizer)) + std::min(bytes, gradient);
}

// Of what is left of the time: for those of the last round that there is; for one that other engines
// kept from beginning until its part was over.
constexpr double kLastRound = 0.9, kLate = 0.1;

// Whether there is no time for an engine to begin: of models with so many nodes what all engines do
// first takes about as long as it took to the first plan, or if there is none, longer than it has
// taken until now.
constexpr size_t kManyNodes = 20'000;
bool too_late(const PlanOptions& options) {
  const double until = std::min(options.record->first_s(), options.record->now().seconds);
  return options.step->graph().nodes.size() >= kManyNodes && options.limits.deadline.left() < until;
}

// All rounds of engines, each engine on a thread of its own; in the order of the table. What an
// engine finds depends on what it is told and on its part of the time or work alone.
std::vector<EngineResult> search(const GraphOf& graph_of, const Cluster& cluster,
                                 const PlanOptions& options, bool* out_of_time) {
  std::vector<EngineResult> results(engines().size());
  std::vector<size_t> rounds[kRounds];
  for (size_t e = 0; e < engines().size(); ++e)
    if (engines()[e].wanted(options) && can_run(engines()[e], backend_of(cluster)))
      rounds[engines()[e].round].push_back(e);
  FoundBefore known;
  for (int round = 0; round < kRounds; ++round) {
    const std::vector<size_t>& wanted = rounds[round];
    const auto count = static_cast<int>(wanted.size());
    if (wanted.empty()) continue;
    const bool last = std::all_of(rounds + round + 1, rounds + kRounds,
                                  [](const auto& later) { return later.empty(); });
    std::vector<Deadline> ends;
    for (const size_t e : wanted)
      ends.push_back(options.limits.deadline.part(last ? kLastRound : engines()[e].part));
    std::vector<char> over(wanted.size(), false);
    parallel_for(count, options.threads, [&](int i) {
      const Engine& engine = engines()[wanted[i]];
      EngineResult& result = results[wanted[i]];
      options.record->trying(engine.name);
      PlanOptions its = options;
      its.limits.deadline = options.threads == 1 ? ends[i].part(1.0 / (count - i))
                            : ends[i].over()     ? options.limits.deadline.part(kLate)
                                                 : ends[i];
      const bool late = too_late(options);
      result.reason = kNoTime;
      if (!late && !its.limits.deadline.over()) try {
          result = engine.plan(its, cluster, graph_of, known);
        } catch (const TimeIsUp&) {  // before it had anything
        }
      result.engine = engine.name;
      over[i] = late || ends[i].over();
    });
    *out_of_time = *out_of_time || std::count(over.begin(), over.end(), true) > 0;
    for (const size_t e : wanted)
      for (const Candidate& c : results[e].candidates) {
        if (asked(options) || exact(*c.plan))
          known.step = std::min(known.step, c.plan->predicted_step_s);
        if (!c.plan->pipeline && !c.plan->duplex) known.programs.push_back(&c);
      }
    for (const size_t e : wanted)
      for (const Candidate& c : results[e].others)
        if (!c.plan->pipeline && !c.plan->duplex) known.programs.push_back(&c);
    std::stable_sort(known.programs.begin(), known.programs.end(),
                     [](const Candidate* a, const Candidate* b) {
                       return a->plan->predicted_step_s < b->plan->predicted_step_s;
                     });
  }
  std::erase_if(results, [](const EngineResult& result) { return result.engine.empty(); });
  return results;
}

void certify(std::vector<EngineResult>* engines, const PlanOptions& options) {
  Seconds best = std::numeric_limits<Seconds>::infinity();
  for (const EngineResult& engine : *engines)
    for (const Candidate& c : engine.candidates)
      if (asked(options) || exact(*c.plan)) best = std::min(best, c.plan->predicted_step_s);
  for (EngineResult& engine : *engines) {
    if (!engine.certify || engine.candidates[0].plan->predicted_step_s > kNearly * best) continue;
    options.record->trying("lower bounds");
    EngineResult certified = engine.certify(kNearly * best);
    certified.engine = engine.engine;
    certified.tried = std::move(engine.tried);
    engine = std::move(certified);
  }
}

// Moves candidates into the report. Those that do not compute the same as one device only where an
// engine was asked for by name.
void collect(PlanReport* report, const PlanOptions& options) {
  std::vector<std::pair<std::vector<std::string>, std::string>> reasons;  // engines, why none
  for (EngineResult& engine : report->engines) {
    if (engine.candidates.empty()) {
      auto why = std::find_if(reasons.begin(), reasons.end(),
                              [&](const auto& r) { return r.second == engine.reason; });
      if (why == reasons.end()) why = reasons.insert(why, {{}, engine.reason});
      if (std::count(why->first.begin(), why->first.end(), engine.engine) == 0)
        why->first.push_back(engine.engine);
    }
    for (Candidate& candidate : engine.candidates) {
      candidate.search_s = engine.search_s;
      if (asked(options) || exact(*candidate.plan)) {
        report->candidates.push_back(std::move(candidate));
      } else if (report->left_out.empty()) {
        report->left_out =
            normalised_by_part(*candidate.plan->graph, candidate.plan->pipeline->part()) +
            ", unlike on one device; such plans are left out unless an --engine or "
            "--virtual-devices asks for them";
      }
    }
    engine.candidates.clear();
  }
  for (const auto& [names, why] : reasons)
    report->reason +=
        fmt::format("{}{}: {}", report->reason.empty() ? "" : "; ", fmt::join(names, ", "), why);
  if (!report->left_out.empty()) {
    spdlog::info("{}", report->left_out);
    if (report->candidates.empty())
      report->reason += (report->reason.empty() ? "" : "; ") + report->left_out;
  }
}

// No plan is faster than its computation; one program may have a bound of its own.
void bound(PlanReport* report, const Theory& theory, const Cluster& cluster) {
  Seconds computation = 0;
  for (Candidate& candidate : report->candidates) {
    if (candidate.plan->lower_bound_s > 0) continue;
    if (computation == 0) computation = bounds::compute_bound(theory, CostModel(cluster), 1);
    candidate.plan->lower_bound_s = computation;
  }
}

void simulate_and_rank(std::vector<Candidate>* candidates) {
  for (Candidate& candidate : *candidates)
    candidate.simulated_s = candidate.plan->pipeline ? candidate.plan->predicted_step_s
                                                     : simulate(*candidate.plan).step;
  std::stable_sort(
      candidates->begin(), candidates->end(),
      [](const Candidate& a, const Candidate& b) { return a.simulated_s < b.simulated_s; });
}

// What plans say of themselves.
void finish(PlanReport* report, DType precision) {
  for (Candidate& candidate : report->candidates) {
    candidate.plan->precision = precision;
    if (!candidate.plan->pipeline) narrow_inputs(candidate.plan.get());
  }
  if (report->candidates.empty()) return;
  Plan& best = *report->candidates[0].plan;
  if (!best.pipeline) {
    const std::vector<std::string> problems = motley::check(best.running(), best.program);
    MOTLEY_CHECK(problems.empty(), "the plan found is not sound: {}", problems.front());
  }
  for (size_t c = 1; c < report->candidates.size(); ++c) {
    const Candidate& other = report->candidates[c];
    best.alternatives.push_back({other.plan->engine, other.note, false, true, other.simulated_s});
  }
  for (const EngineResult& engine : report->engines)
    for (const StrategyTime& b : engine.baselines)
      best.alternatives.push_back(
          {b.name, b.feasible ? knobs_of(b) : b.reason, true, b.feasible, b.predicted_step_s});
  if (!exact(best))
    spdlog::warn("{}, unlike on one device; --engine spmd computes the same as one device",
                 normalised_by_part(*best.graph, best.pipeline->part()));
}

}  // namespace

const EngineResult* PlanReport::of(const std::string& engine) const {
  for (const EngineResult& result : engines)
    if (result.engine == engine) return &result;
  return nullptr;
}

bool PlanReport::refused() const {
  return candidates.empty() && !engines.empty() &&
         std::all_of(engines.begin(), engines.end(),
                     [](const EngineResult& result) { return result.refused; });
}

std::string too_large(const Graph& graph, const Cluster& cluster, const PlanOptions& options) {
  if (!options.memory_limit || asked(options)) return {};
  Bytes state = 0, memory = 0;
  for (const Parameter& p : graph.parameters)
    state += graph.loss.valid() ? state_bytes(graph, p, options.optimizer)
                                : least_state(graph, p, options);
  for (int d = 0; d < cluster.size(); ++d) memory += cluster.type_of(d).memory;
  if (state <= memory) return {};
  return fmt::format(
      "the cluster lacks {} (parameters, gradients and optimizer state take {}, all devices "
      "together have {})",
      format_bytes(state - memory), format_bytes(state), format_bytes(memory));
}

Seconds usual_time_limit(const Cluster& cluster, const Graph& graph) {
  constexpr Seconds kFew = 5, kMany = 10;
  constexpr int kFewDevices = 64;
  constexpr size_t kFewNodes = 20'000;
  return cluster.size() <= kFewDevices && graph.nodes.size() <= kFewNodes ? kFew : kMany;
}

PlanReport plan(const GraphOf& graph_of, const Cluster& cluster, const PlanOptions& question) {
  check(question);
  check_redundancy(cluster, question);
  check_backend(cluster, question);
  PlanOptions options = question;
  const GraphOf graphs = in_precision(graph_of, options.precision);
  const Cluster devices = as_measured(cluster, options, graphs);
  Graph graph = graphs(options.batch);
  PlanReport report;
  if (report.reason = too_large(graph, devices, options); !report.reason.empty()) return report;
  options.step =
      std::make_shared<BatchStep>(std::move(graph), options.batch, options.limits.deadline);
  report.engines = search(graphs, devices, options, &report.out_of_time);
  certify(&report.engines, options);
  collect(&report, options);
  bound(&report, options.step->theory(), devices);
  simulate_and_rank(&report.candidates);
  finish(&report, options.precision);
  return report;
}

std::string no_plan(const PlanReport& report, const Cluster& cluster, const PlanOptions& options,
                    const std::string& limit) {
  if (report.out_of_time)
    return fmt::format(
        "[plan] no plan for {} on {} was found in {}: {}; give a longer --time-limit",
        options.model, cluster.name, limit, report.reason);
  return fmt::format(
      "[plan] no plan for {} on {} fits: {}; use more or larger devices, a smaller --batch, or "
      "--memory-limit off",
      options.model, cluster.name, report.reason);
}

}  // namespace motley::planner
