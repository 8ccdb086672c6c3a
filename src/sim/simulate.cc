#include "sim/simulate.h"

#include <algorithm>
#include <map>
#include <utility>

#include "cost/allocated.h"
#include "cost/overlap.h"
#include "sim/overlapped.h"
#include "sim/pipeline.h"

namespace motley {

namespace {

// Spans of a timeline, about: what a device does in every step, or in every pass, with waits.
double spans_of(const Plan& plan) {
  if (!plan.pipeline) return static_cast<double>(plan.program.steps.size()) * plan.cluster.size();
  double spans = 0;
  for (const ReplicaPlan& replica : plan.pipeline->replicas)
    for (const StagePlan& stage : replica.stages)
      spans += 4.0 * replica.micro_batches * static_cast<double>(stage.devices.size());
  return spans;
}

// Devices that were alike so far stay so if they are in spans [from, ...) too, where `like` is who
// stands for whom.
void refine(const std::vector<int>& like, size_t from, Simulation* sim) {
  if (sim->like.empty()) {
    sim->like = like;
    return;
  }
  // [device] Others that stand for themselves from now on, whose spans were its own.
  std::vector<std::vector<int>> before(like.size()), now(like.size());
  std::map<std::pair<int, int>, int> first;
  std::vector<int> both;
  for (int d = 0; d < static_cast<int>(like.size()); ++d) {
    const auto [it, fresh] = first.try_emplace({sim->like[d], like[d]}, d);
    both.push_back(it->second);
    if (fresh && sim->like[d] != d) before[sim->like[d]].push_back(d);
    if (fresh && like[d] != d) now[like[d]].push_back(d);
  }
  const size_t end = sim->spans.size();
  for (size_t i = 0; i < end; ++i)
    for (int d : (i < from ? before : now)[sim->spans[i].device]) {
      Span span = sim->spans[i];
      span.device = d;
      add_span(std::move(span), sim);
      if (sim->too_long) return;
    }
  sim->like = std::move(both);
}

}  // namespace

void add_span(Span span, Simulation* simulation) {
  if (simulation->spans.size() == kMostSpans) simulation->too_long = true;
  if (simulation->too_long)
    simulation->spans.clear();
  else
    simulation->spans.push_back(std::move(span));
}

Simulation simulate(const Plan& plan, Spans spans, const Deadline& deadline) {
  if (spans == Spans::all && spans_of(plan) > kMostSpans) spans = Spans::alike;
  if (plan.pipeline) return simulate_pipeline(plan, spans, deadline);
  const Theory& theory = plan.running();
  const Graph& graph = *plan.graph;
  const int devices = plan.cluster.size();
  CostModel model(plan.cluster, plan.reductions);
  Shares shares(plan.ratios);
  Fractions fractions(plan.cluster, shares, plan.redundancy);
  Simulation sim;
  sim.devices.resize(devices);
  std::vector<Seconds> now(devices, 0);
  std::vector<DeviceTime> times;  // of a walk, of the devices that stand for others
  const WalkSink sink = [&](int d, Seconds begin, Seconds end, const std::string& name,
                            WalkKind kind, NodeId node) {
    if (spans != Spans::none) add_span({d, begin, end, name, kind, node}, &sim);
    DeviceTime& t = times[d];
    (kind == WalkKind::compute ? t.busy : kind == WalkKind::comm ? t.comm : t.idle) += end - begin;
  };
  const auto add = [&](const auto& walked) {
    times.assign(devices, {});
    const size_t from = sim.spans.size();
    const std::vector<int> like = walked();
    if (spans == Spans::alike) refine(like, from, &sim);
    for (int d = 0; d < devices; ++d) {
      sim.devices[d].busy += times[like[d]].busy;
      sim.devices[d].comm += times[like[d]].comm;
      sim.devices[d].idle += times[like[d]].idle;
    }
  };
  const WalkOptions options{.each = spans == Spans::all, .deadline = deadline};
  Overlapped overlapped;
  add([&] {
    if (plan.duplex)
      return walk_overlapped(theory, plan.program, model, fractions, &now, &overlapped, sink,
                             options);
    return walk(theory, plan.program, model, fractions, 0,
                static_cast<int>(plan.program.steps.size()), &now, sink, options);
  });
  add([&] {
    return walk_optimizer(theory, plan.program, model, fractions, plan.optimizer, &now, sink, {},
                          options);
  });
  for (int d = 0; d < devices; ++d)
    if (const Seconds s = model.per_step(plan.cluster.devices[d].type, graph); s > 0) {
      if (spans == Spans::all || (spans == Spans::alike && sim.like[d] == d))
        add_span({d, now[d], now[d] + s, "step", WalkKind::compute, {}}, &sim);
      sim.devices[d].busy += s;
      now[d] += s;
    }
  sim.step = *std::max_element(now.begin(), now.end());
  MemoryCost memory = memory_of(theory, plan.program, fractions, model.types(), plan.optimizer);
  Seconds busiest = 0, total = 0;
  for (int d = 0; d < devices; ++d) {
    DeviceTime& t = sim.devices[d];
    t.idle += sim.step - now[d];
    t.exposed_comm = t.comm;
    if (plan.duplex) {
      // What it waited for was noted as idle; of that, the network was busy for it meanwhile.
      t.comm = overlapped.comm[d];
      t.exposed_comm = std::min(overlapped.exposed[d], t.idle);
      t.idle -= t.exposed_comm;
    }
    t.peak_memory = memory.peak[plan.cluster.devices[d].type];
    t.allocated = allocated_bytes(memory, model, plan.cluster.devices[d].type);
    busiest = std::max(busiest, t.busy);
    total += t.busy;
  }
  // What the executor sends beside the backward pass. The spans are of steps without it.
  const Seconds hidden = plan.duplex ? 0 : hidden_seconds(theory, plan.program, model, fractions);
  const Seconds comm = devices > 0 ? sim.devices[0].comm : 0;
  if (plan.duplex && comm > 0) sim.overlap = 1 - sim.devices[0].exposed_comm / comm;
  if (hidden != 0 && comm > 0) {
    sim.step -= hidden;
    sim.overlap = std::max(0.0, hidden / comm);
    for (DeviceTime& t : sim.devices) t.exposed_comm -= hidden;
  }
  // Devices wait where their machine launches calls more slowly than they take them.
  const Seconds late =
      launching(theory, plan.program, model, fractions, plan.optimizer).beyond(comm - hidden);
  if (late > 0) {
    sim.step += late;
    for (DeviceTime& t : sim.devices) t.idle += late;
  }
  sim.load_balance = busiest > 0 ? total / devices / busiest : 1;
  return sim;
}

std::string to_trace(const Plan& plan, const Simulation& simulation) {
  if (simulation.too_long)
    throw user_error("simulate",
                     "the timeline has more than {} spans, of steps or passes on devices that do "
                     "not do the same; too many to draw",
                     kMostSpans);
  std::vector<int> others(plan.cluster.size());
  for (size_t d = 0; d < simulation.like.size(); ++d)
    if (simulation.like[d] != static_cast<int>(d)) ++others[simulation.like[d]];
  // Event by event: as one value in memory they would take ten times the text.
  std::string text = "{\"traceEvents\":[";
  const auto add = [&](const Json& event) {
    if (text.back() != '[') text += ',';
    text += event.dump(-1, ' ', false, Json::error_handler_t::replace);
  };
  for (int d = 0; d < plan.cluster.size(); ++d) {
    if (!simulation.like.empty() && simulation.like[d] != d) continue;
    std::string name = fmt::format("device {} ({})", d, plan.cluster.type_of(d).name);
    if (others[d] > 0) name += fmt::format(" and {} that do the same", others[d]);
    add({{"ph", "M"},
         {"pid", d},
         {"tid", 0},
         {"name", "process_name"},
         {"args", {{"name", std::move(name)}}}});
  }
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
    add(e);
  }
  return text + "],\"displayTimeUnit\":\"ms\"}\n";
}

}  // namespace motley
