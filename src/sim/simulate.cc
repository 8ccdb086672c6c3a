#include "sim/simulate.h"

#include <algorithm>
#include <numeric>

namespace motley {

Simulation simulate(const Plan& plan, bool with_spans) {
  const Theory& theory = *plan.theory;
  const Graph& graph = *plan.graph;
  const int devices = plan.cluster.size();
  CostModel model(plan.cluster);
  Shares shares(plan.ratios);
  Fractions fractions(plan.cluster, shares);
  const std::vector<bool> pure = pure_gradients(graph);
  Simulation sim;
  sim.devices.resize(devices);
  std::vector<Seconds> now(devices, 0);

  auto spend = [&](int d, Seconds s, const std::string& name, Span::Kind kind, NodeId node = {}) {
    if (s <= 0) return;
    if (with_spans) sim.spans.push_back({d, now[d], now[d] + s, name, kind, node});
    now[d] += s;
    DeviceTime& t = sim.devices[d];
    (kind == Span::Kind::compute ? t.busy : kind == Span::Kind::comm ? t.comm : t.idle) += s;
  };
  auto communicate = [&](Seconds s, const std::string& name) {
    Seconds start = *std::max_element(now.begin(), now.end());
    for (int d = 0; d < devices; ++d) {
      spend(d, start - now[d], "wait", Span::Kind::wait);
      now[d] = start;
      spend(d, s, name, Span::Kind::comm);
    }
  };
  bool after_gradient = false;
  for (const Step& step : plan.program.steps) {
    if (step.is_compute()) {
      const Triple& triple = theory.triples(step.node)[step.triple];
      for (const InnerCollective& c : triple.collectives)
        communicate(model.net().all_reduce(static_cast<Bytes>(c.bytes)),
                    "all_reduce in " + triple.kernel);
      Work work = work_of(theory, step.node, triple);
      if (work.free) continue;
      after_gradient = false;
      const auto& f = fractions.by_device(work.cut);
      for (int d = 0; d < devices; ++d)
        spend(d, model.compute(plan.cluster.devices[d].type, work, f[d]), graph.node(step.node).op,
              Span::Kind::compute, step.node);
    } else if (step.kind != CollectiveKind::slice && step.kind != CollectiveKind::mask) {
      Placement cut = step.from.is_shard() ? step.from : step.to;
      Seconds s = model.collective(
          step.kind, static_cast<Bytes>(graph.spec(step.value).bytes()),
          fractions.profile(cut.is_shard() ? theory.cut_size(step.value, cut) : 0, model.net()));
      bool gradient = step.kind == CollectiveKind::all_reduce && pure[step.value.index];
      if (gradient && after_gradient) s = std::max(0.0, s - model.net().all_reduce(0));
      after_gradient = gradient;
      communicate(s, to_string(step.kind));
    }
  }
  const std::vector<Placement> stored = stored_placements(theory, plan.program);
  for (const Parameter& p : graph.parameters) {
    if (!p.gradient.valid()) continue;
    Placement placement = stored[p.value.index];
    const auto& f =
        fractions.by_device(placement.is_shard() ? theory.cut_size(p.value, placement) : 0);
    for (int d = 0; d < devices; ++d)
      spend(d,
            model.update(plan.cluster.devices[d].type,
                         static_cast<Bytes>(graph.spec(p.value).bytes()) * f[d], plan.optimizer),
            "optimizer", Span::Kind::compute);
  }
  for (int d = 0; d < devices; ++d)
    spend(d, model.per_step(plan.cluster.devices[d].type, graph), "step", Span::Kind::compute);
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
              {"tid", s.kind == Span::Kind::comm ? 1 : 0},
              {"ts", s.begin * 1e6},
              {"dur", (s.end - s.begin) * 1e6},
              {"name", s.name},
              {"cat", s.kind == Span::Kind::compute ? "compute"
                      : s.kind == Span::Kind::comm  ? "comm"
                                                    : "wait"}};
    if (s.node.valid()) e["args"] = {{"node", s.node.index}};
    events.push_back(std::move(e));
  }
  return Json{{"traceEvents", events}, {"displayTimeUnit", "ms"}}.dump() + "\n";
}

}  // namespace motley
