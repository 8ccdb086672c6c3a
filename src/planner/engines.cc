#include "planner/engines.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "planner/batch_step.h"

namespace motley::planner {

namespace {

// Nothing is asked for that only some engine can do; state is kept twice by one program alone.
bool everything(const PlanOptions& o) {
  return o.redundancy == 0 && o.duplex <= 0 && o.target.empty() && o.engine == "auto" &&
         o.strategy.empty() && o.fix.empty() && !o.virtual_devices.forced();
}

bool wants_one_program(const PlanOptions& o) {
  return o.duplex <= 0 && o.target.empty() && o.fix.empty() && !o.virtual_devices.forced() &&
         (o.engine == "auto" || o.engine == "spmd");
}
// Shares that are given are of the whole batch.
bool wants_accumulated(const PlanOptions& o) {
  return wants_one_program(o) && o.redundancy == 0 && o.memory_limit && o.strategy.empty() &&
         o.ratios.empty() && o.segments.one();
}
bool wants_duplex(const PlanOptions& o) {
  return o.duplex >= 0 && o.target.empty() && o.fix.empty() && !o.virtual_devices.forced() &&
         o.segments.one() &&
         (o.engine == "duplex" || o.duplex > 0 || (everything(o) && o.ratios.empty()));
}
bool wants_grid(const PlanOptions& o) {
  return o.duplex <= 0 && o.strategy.empty() && o.target.empty() &&
         (everything(o) || o.engine == "grid" || !o.fix.empty());
}
bool wants_quick(const PlanOptions& o) { return everything(o) && o.segments.one(); }
bool wants_pipeline(const PlanOptions& o) {
  return o.duplex <= 0 && o.strategy.empty() && o.fix.empty() &&
         (everything(o) || o.engine == "pipeline");
}
bool wants_virtual(const PlanOptions& o) {
  return o.virtual_devices.forced() || o.engine == "virtual" ||
         (everything(o) && !o.virtual_devices.off);
}

bool wants_target(const PlanOptions& o) { return !o.target.empty(); }

bool wants_opponents(const PlanOptions& o) {
  return o.engine == "opponents" || (everything(o) && o.baselines);
}

EngineResult one_program(const PlanOptions& o, const Cluster& c, const GraphOf& g,
                         const FoundBefore& known) {
  return plan_one_program(o, c, g, !std::isinf(known.step));
}
EngineResult accumulated_of(const PlanOptions& o, const Cluster& c, const GraphOf& g,
                            const FoundBefore& known) {
  return plan_accumulated(o, c, g, known.step);
}
EngineResult quick_of(const PlanOptions& o, const Cluster& c, const GraphOf& g,
                      const FoundBefore&) {
  return plan_quickly(o, c, g);
}
EngineResult grid_of(const PlanOptions& o, const Cluster& c, const GraphOf& g, const FoundBefore&) {
  return plan_grid(o, c, g, grid::parse_fixed(o.fix));
}
EngineResult pipeline_of(const PlanOptions& o, const Cluster& c, const GraphOf& g,
                         const FoundBefore& known) {
  return plan_pipeline(o, c, g, known.step);
}
EngineResult opponents_of(const PlanOptions& o, const Cluster& c, const GraphOf& g,
                          const FoundBefore&) {
  return plan_opponents(o, c, g);
}
EngineResult target_of(const PlanOptions& o, const Cluster& c, const GraphOf& g,
                       const FoundBefore&) {
  return plan_target(o, c, g);
}
EngineResult virtual_of(const PlanOptions& o, const Cluster& c, const GraphOf& g,
                        const FoundBefore& known) {
  VirtualDevices wanted = o.virtual_devices;
  wanted.known = known.step;
  return plan_virtual(o, c, g, wanted);
}

}  // namespace

const std::vector<Engine>& engines() {
  static const std::vector<Engine> table = {
      {"grid", true, 0, 0.9, wants_quick, quick_of},
      {"spmd", false, 1, 0.4, wants_one_program, one_program},
      {"grid", true, 1, 0.5, wants_grid, grid_of},
      {"opponents", true, 2, 0.8, wants_opponents, opponents_of},
      {"target", true, 1, 1, wants_target, target_of},
      {"pipeline", true, 2, 0.8, wants_pipeline, pipeline_of},
      {"duplex", false, 3, 0.5, wants_duplex, plan_duplex},
      {"spmd", true, 3, 0.9, wants_accumulated, accumulated_of},
      {"virtual", true, 3, 0.9, wants_virtual, virtual_of},
  };
  return table;
}

std::vector<std::string> engine_names() {
  std::vector<std::string> names = {"auto"};
  for (const Engine& engine : engines())
    if (engine.wanted != wants_target &&
        std::find(names.begin(), names.end(), engine.name) == names.end())
      names.emplace_back(engine.name);
  return names;
}

std::shared_ptr<BatchStep> step_of(const PlanOptions& options, const GraphOf& graph_of) {
  return options.step ? options.step
                      : std::make_shared<BatchStep>(graph_of(options.batch), options.batch);
}

std::vector<int> fastest_of(const Cluster& cluster) {
  FlopsPerSecond most = 0;
  for (const DeviceType& type : cluster.types) most = std::max(most, type.flops);
  std::vector<int> devices;
  for (int d = 0; d < cluster.size(); ++d)
    if (cluster.type_of(d).flops == most) devices.push_back(d);
  return devices;
}

bool exact(const Plan& plan) { return !plan.pipeline || plan.pipeline->part().exact(); }

void EngineResult::add(std::unique_ptr<Plan> plan, std::string note) {
  if (record && exact(*plan)) record->found(engine, plan->predicted_step_s);
  Candidate candidate;
  candidate.plan = std::move(plan);
  candidate.note = std::move(note);
  candidates.push_back(std::move(candidate));
}

void rank(EngineResult* result) {
  std::stable_sort(result->candidates.begin(), result->candidates.end(),
                   [](const Candidate& a, const Candidate& b) {
                     return a.plan->predicted_step_s < b.plan->predicted_step_s;
                   });
}

}  // namespace motley::planner
