#include "hap_plans.h"

#include <fmt/format.h>

#include <algorithm>

#include "cluster/part.h"
#include "sim/simulate.h"

namespace motley::hap {

std::string spec_of(const Benchmark& b, int devices) {
  if (b.experts == 0) return b.spec;
  return fmt::format("{}:experts={}", b.spec, b.experts * devices);
}

Cluster some_of(const Cluster& all, int each, const std::string& type, int machines) {
  std::vector<int> devices;
  for (const Group& g : all.groups) {
    if (!g.children.empty()) continue;
    if (!type.empty() && all.type_of(g.first_device).name != type) continue;
    if (machines-- <= 0) break;
    for (int d = 0; d < std::min(each, g.device_count); ++d) devices.push_back(g.first_device + d);
  }
  return part_of(all, devices);
}

Outcome run(const Graph& graph, const Cluster& cluster, planner::ProgramRequest request) {
  Outcome outcome;
  outcome.result = planner::plan_program(graph, cluster, request);
  const planner::ProgramResult& r = outcome.result;
  outcome.feasible = r.feasible;
  outcome.reason = r.reason;
  outcome.baselines = r.baselines;
  if (!r.feasible) return outcome;
  outcome.predicted = r.plan.predicted_step_s;
  outcome.step = simulate(r.plan).step;
  outcome.gap = 1 - r.plan.lower_bound_s / outcome.predicted;
  if (r.synchronised_bound_s > 0)
    outcome.apart = 1 - r.synchronised_bound_s / (outcome.predicted + r.hidden_s);
  outcome.devices = r.plan.cluster.size();
  const auto& steps = r.plan.program.steps;
  outcome.recomputes =
      std::any_of(steps.begin(), steps.end(), [](const Step& s) { return s.again; });
  return outcome;
}

bool certified(const Outcome& o) { return std::min(o.gap, o.apart > 0 ? o.apart : kInf) <= kGap; }

planner::ProgramRequest request_of(const std::string& model, int64_t batch) {
  planner::ProgramRequest request;
  request.model = model;
  request.batch = batch;
  request.baselines = false;
  request.alternation.certify = false;
  return request;
}

}  // namespace motley::hap
