#include "cli/plan_output.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "core/units.h"
#include "planner/targets.h"

namespace motley {

namespace {

using planner::Candidate;
using planner::EngineResult;
using planner::PlanReport;

Json schedule_of(const PipelinePlan& pipeline) {
  Json replicas = Json::array();
  for (const ReplicaPlan& replica : pipeline.replicas) {
    Json stages = Json::array();
    for (size_t i = 0; i < replica.stages.size(); ++i) {
      const StagePlan& s = replica.stages[i];
      stages.push_back(
          {{"devices", s.devices},
           {"ratios", s.ratios},
           {"warm_up", s.warm_up},
           {"recompute", computed_again(pipeline.theory(static_cast<int>(i)), s) > 0}});
      if (has_later(s.program)) stages.back()["weights_behind"] = s.weights_behind;
    }
    replicas.push_back({{"micro_batches", replica.micro_batches}, {"stages", stages}});
  }
  Json schedule = {
      {"kind", pipeline.schedule}, {"micro_batch", pipeline.micro_batch}, {"replicas", replicas}};
  for (const Division& division : pipeline.zero) schedule["zero"].push_back(division.level);
  return schedule;
}

// Of every device of the cluster; 0 of those that the plan leaves out.
std::vector<double> of_all_devices(const Candidate& candidate, const std::vector<double>& of_plan,
                                   const Cluster& cluster) {
  if (candidate.devices.empty()) return of_plan;
  std::vector<double> of_all(cluster.size(), 0);
  for (size_t i = 0; i < of_plan.size(); ++i) of_all[candidate.devices[i]] = of_plan[i];
  return of_all;
}

// Those that the plan uses, in the order of its workers.
std::vector<int> devices_of(const Candidate& candidate, const Cluster& cluster) {
  if (!candidate.devices.empty()) return candidate.devices;
  std::vector<int> all(static_cast<size_t>(cluster.size()));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

// Of several segments a list of each.
Json ratios_json(const Candidate& candidate, const Cluster& cluster) {
  const Plan& plan = *candidate.plan;
  if (plan.pipeline) return Json();
  if (plan.ratios.size() == 1) return of_all_devices(candidate, plan.ratios[0], cluster);
  Json ratios = Json::array();
  for (const auto& of_segment : plan.ratios)
    ratios.push_back(of_all_devices(candidate, of_segment, cluster));
  return ratios;
}

Json baselines_json(const PlanReport& report) {
  Json baselines = Json::array();
  for (const EngineResult& engine : report.engines)
    for (const planner::StrategyTime& b : engine.baselines)
      baselines.push_back({{"name", b.name},
                           {"predicted_step_s", b.feasible ? Json(b.predicted_step_s) : Json()},
                           {"feasible", b.feasible},
                           {"reason", b.reason},
                           {"on_motley_s", b.on_motley_s > 0 ? Json(b.on_motley_s) : Json()},
                           {"knobs", b.knobs}});
  return baselines;
}

Json tried_json(const PlanReport& report) {
  Json tried = Json::array();
  for (const EngineResult& engine : report.engines)
    for (const planner::Segmented& s : engine.tried)
      tried.push_back({{"what", s.what},
                       {"segments", s.segments},
                       {"simulated_step_s", s.feasible ? Json(s.simulated_s) : Json()},
                       {"search_s", s.search_s}});
  return tried;
}

Json candidates_json(const PlanReport& report) {
  Json list = Json::array();
  for (const Candidate& c : report.candidates)
    list.push_back({{"engine", c.plan->engine},
                    {"what", c.note},
                    {"predicted_step_s", c.plan->predicted_step_s},
                    {"simulated_step_s", c.simulated_s},
                    {"search_s", c.search_s}});
  return list;
}

double gap_of(const Plan& plan) { return 1 - plan.lower_bound_s / plan.predicted_step_s; }

// Of one program: what no program at these shares goes below, and how it was found.
std::string certificate(const Candidate& best, const EngineResult& engine) {
  const Plan& plan = *best.plan;
  std::string without_overlap;
  if (const Seconds bound = best.synchronised_bound_s; bound > 0)
    without_overlap = fmt::format(", {} if nothing overlaps (gap {:.2f}%)", format_seconds(bound),
                                  100 * (1 - bound / (plan.predicted_step_s + best.hidden_s)));
  return fmt::format(
      "  certificate any program at these shares takes at least {} (gap {:.2f}%){}; {} after {} "
      "searches, {}\n",
      format_seconds(plan.lower_bound_s), 100 * gap_of(plan), without_overlap, best.note,
      engine.planned, format_seconds(best.search_s));
}

std::string one_program(const Candidate& best, const EngineResult& engine, const Cluster& cluster) {
  const Plan& plan = *best.plan;
  std::string text;
  if (plan.cluster.size() < cluster.size())
    text += fmt::format("  devices     {}\n",
                        planner::part_in_words(best.devices, cluster.size(), cluster.name));
  return text + certificate(best, engine);
}

}  // namespace

Json plan_json(const PlanReport& report, const Cluster& cluster, double capture_s,
               const planner::Record& record) {
  const Candidate& best = report.best();
  const Plan& plan = *best.plan;
  const EngineResult* spmd = report.of("spmd");
  return {{"engine", plan.engine},
          {"feasible", true},
          {"predicted_step_s", plan.predicted_step_s},
          {"lower_bound_s", plan.lower_bound_s},
          {"gap", gap_of(plan)},
          {"redundancy", plan.redundancy},
          {"search_s", best.search_s},
          {"capture_s", capture_s},
          {"planning_s", record.now().seconds},
          {"first_plan_s", record.first_s()},
          {"out_of_time", report.out_of_time},
          {"devices", devices_of(best, cluster)},
          {"peak_memory_bytes", of_all_devices(best, plan.peak_memory_bytes, cluster)},
          {"baselines", baselines_json(report)},
          {"candidates", candidates_json(report)},
          {"ratios", ratios_json(best, cluster)},
          {"segments", tried_json(report)},
          {"schedule", plan.pipeline ? schedule_of(*plan.pipeline) : Json()},
          {"stop_reason", best.note},
          {"states", spmd ? spmd->states : 0},
          {"solves", spmd ? spmd->planned : 0}};
}

namespace {

// The free plan, unless what the target can say is faster than all that was found.
Seconds free_step(const PlanReport& report, const PlanReport& free) {
  const Seconds own = report.best().simulated_s;
  return free.candidates.empty() ? own : std::min(own, free.best().simulated_s);
}

}  // namespace

Json target_json(const PlanReport& report, const PlanReport& free, const std::string& target) {
  const Seconds own = report.best().simulated_s, best = free_step(report, free);
  Json limits = Json::array();
  const EngineResult& engine = *report.of("target");
  for (const planner::Lifted& lifted : engine.lifted)
    limits.push_back({{"limit", lifted.limit},
                      {"step_s_without", lifted.step_s},
                      {"cost", own / lifted.step_s - 1}});
  const planner::StrategyTime& standard = engine.baselines[0];
  return {{"target", target},
          {"predicted_step_s", own},
          {"default_step_s", standard.feasible ? Json(standard.predicted_step_s) : Json()},
          {"default", standard.knobs},
          {"free_step_s", free.candidates.empty() ? Json() : Json(best)},
          {"free_engine", best < own ? Json(free.best().plan->engine) : Json()},
          {"cost", free.candidates.empty() ? Json() : Json(own / best - 1)},
          {"limits", limits}};
}

std::string describe_target(const PlanReport& report, const PlanReport& free,
                            const std::string& target) {
  const Seconds own = report.best().simulated_s, best = free_step(report, free);
  const char* title = planner::find_target(target)->title;
  if (free.candidates.empty()) return "";
  if (best >= own * (1 - 1e-9))
    return fmt::format("  for         {}: no plan was found that is faster without its limits\n",
                       title);
  std::string text = fmt::format(
      "  for         {}: {:.1f}% slower than the free plan, {} ({}: {})\n", title,
      100 * (own / best - 1), format_seconds(best), free.best().plan->engine, free.best().note);
  const std::vector<planner::Lifted>& lifted = report.of("target")->lifted;
  for (size_t i = 0; i < lifted.size(); ++i)
    text += fmt::format("  limit       {}: without it {} ({:.1f}% less){}\n", lifted[i].limit,
                        format_seconds(lifted[i].step_s), 100 * (1 - lifted[i].step_s / own),
                        i == 0 ? "; costs most" : "");
  if (lifted.empty())
    text += "  limit       no single one costs anything: the free plan is of another kind\n";
  return text;
}

Json no_plan_json(const PlanReport& report, const planner::PlanOptions& options) {
  const EngineResult* spmd = report.of("spmd");
  return {{"engine", options.engine},
          {"feasible", false},
          {"reason", report.reason},
          {"out_of_time", report.out_of_time},
          {"baselines", baselines_json(report)},
          {"search_s", spmd ? spmd->search_s : 0}};
}

static const char* label(const EngineResult& engine) {
  return engine.engine == "opponents" ? "opponent"
         : engine.engine == "target"  ? "as it is"
                                      : "strategy";
}

std::string describe_search(const PlanReport& report, const Cluster& cluster) {
  const Candidate& best = report.best();
  const Plan& plan = *best.plan;
  std::string text = describe(plan);
  if (plan.pipeline || plan.engine != "spmd")
    text +=
        fmt::format("  certificate computation alone takes any plan at least {} (gap {:.1f}%)\n",
                    format_seconds(plan.lower_bound_s), 100 * gap_of(plan));
  else
    text += one_program(best, *report.of("spmd"), cluster);
  for (size_t c = 1; c < report.candidates.size(); ++c) {
    const Candidate& other = report.candidates[c];
    text += fmt::format("  other plan  {:<16} {} ({:.2f}x)  {}\n", other.plan->engine,
                        format_seconds(other.simulated_s), other.simulated_s / best.simulated_s,
                        other.note);
  }
  for (const EngineResult& engine : report.engines) {
    for (const planner::Segmented& s : engine.tried)
      text += fmt::format("  tried       {}: {}\n", s.what,
                          s.feasible        ? format_seconds(s.simulated_s) + " simulated"
                          : s.segments == 1 ? "is one segment"
                                            : "does not fit");
    // The strategies of one program have no knobs: beside opponents, which have, they say little.
    if (engine.engine == "spmd" && report.of("opponents") != nullptr) continue;
    for (const planner::StrategyTime& b : engine.baselines)
      text += b.feasible
                  ? fmt::format("  {:<11} {:<16} {} ({:.2f}x)  {}\n", label(engine), b.name,
                                format_seconds(b.predicted_step_s),
                                b.predicted_step_s / plan.predicted_step_s, planner::knobs_of(b))
                  : fmt::format("  {:<11} {:<16} {}{}\n", label(engine), b.name,
                                b.reason == kNoTime ? "" : "infeasible: ", b.reason);
  }
  return text;
}

}  // namespace motley
