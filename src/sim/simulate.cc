#include "sim/simulate.h"

#include <algorithm>
#include <numeric>

#include "cost/overlap.h"
#include "sim/pipeline.h"

namespace motley {

Simulation simulate(const Plan& plan, bool with_spans) {
  if (plan.pipeline) return simulate_pipeline(plan, with_spans);
  const Theory& theory = *plan.theory;
  const Graph& graph = *plan.graph;
  const int devices = plan.cluster.size();
  CostModel model(plan.cluster, plan.reductions);
  Shares shares(plan.ratios);
  Fractions fractions(plan.cluster, shares);
  Simulation sim;
  sim.devices.resize(devices);
  std::vector<Seconds> now(devices, 0);
  const WalkSink sink = [&](int d, Seconds begin, Seconds end, const std::string& name,
                            WalkKind kind, NodeId node) {
    if (with_spans) sim.spans.push_back({d, begin, end, name, kind, node});
    DeviceTime& t = sim.devices[d];
    (kind == WalkKind::compute ? t.busy : kind == WalkKind::comm ? t.comm : t.idle) += end - begin;
  };
  walk(theory, plan.program, model, fractions, 0, static_cast<int>(plan.program.steps.size()), &now,
       sink);
  walk_optimizer(theory, plan.program, model, fractions, plan.optimizer, &now, sink);
  for (int d = 0; d < devices; ++d)
    if (const Seconds s = model.per_step(plan.cluster.devices[d].type, graph); s > 0) {
      sink(d, now[d], now[d] + s, "step", WalkKind::compute, {});
      now[d] += s;
    }
  sim.step = *std::max_element(now.begin(), now.end());
  MemoryCost memory = memory_of(theory, plan.program, fractions, model.types(), plan.optimizer);
  Seconds busiest = 0, total = 0;
  for (int d = 0; d < devices; ++d) {
    DeviceTime& t = sim.devices[d];
    t.idle += sim.step - now[d];
    t.exposed_comm = t.comm;
    t.peak_memory = memory.peak[plan.cluster.devices[d].type];
    busiest = std::max(busiest, t.busy);
    total += t.busy;
  }
  // What the executor sends beside the backward pass. The spans are of steps without it.
  const Seconds hidden = hidden_seconds(theory, plan.program, model, fractions);
  const Seconds comm = devices > 0 ? sim.devices[0].comm : 0;
  if (hidden != 0 && comm > 0) {
    sim.step -= hidden;
    sim.overlap = std::max(0.0, hidden / comm);
    for (DeviceTime& t : sim.devices) t.exposed_comm -= hidden;
  }
  sim.load_balance = busiest > 0 ? total / devices / busiest : 1;
  return sim;
}

std::string to_trace(const Plan& plan, const Simulation& simulation) {
  Json events = Json::array();
  for (int d = 0; d < plan.cluster.size(); ++d)
    events.push_back(
        {{"ph", "M"},
         {"pid", d},
         {"tid", 0},
         {"name", "process_name"},
         {"args", {{"name", fmt::format("device {} ({})", d, plan.cluster.type_of(d).name)}}}});
  for (const Span& s : simulation.spans) {
    Json e = {{"ph", "X"},
              {"pid", s.device},
              {"tid", s.kind == WalkKind::comm ? 1 : 0},
              {"ts", s.begin * 1e6},
              {"dur", (s.end - s.begin) * 1e6},
              {"name", s.name},
              {"cat", s.kind == WalkKind::compute ? "compute"
                      : s.kind == WalkKind::comm  ? "comm"
                                                  : "wait"}};
    if (s.node.valid()) e["args"] = {{"node", s.node.index}};
    events.push_back(std::move(e));
  }
  return Json{{"traceEvents", events}, {"displayTimeUnit", "ms"}}.dump() + "\n";
}

}  // namespace motley
