// Clusters, plans and their simulation.
#include <algorithm>
#include <optional>
#include <tuple>

#include "cluster/cluster.h"
#include "core/error.h"
#include "core/file.h"
#include "graph/file.h"
#include "graph/op.h"
#include "planner/engines.h"
#include "planner/program_plan.h"
#include "python/bindings.h"
#include "reduce/cluster.h"
#include "sim/simulate.h"

namespace motley::python {

namespace {

struct Planned {
  spmd::PlanResult result;
  std::shared_ptr<Plan> plan;  // null: nothing fits
};

// Stores inputs in the pieces that a program cuts them into, so that a worker need not load the
// rest. Where every use of a whole input, or of a view of one, is one slice, the piece is made in
// its place; slices and views are free, so the plan's price is the same.
void narrow_inputs(Plan* plan) {
  const Graph& graph = *plan->graph;
  const Theory& theory = *plan->theory;
  std::vector<Step>& steps = plan->program.steps;
  const auto whole = Placement::replicated();
  for (bool changed = true; changed;) {
    changed = false;
    std::vector<bool> from_input(graph.values.size());
    for (const Input& i : graph.inputs) from_input[i.value.index] = true;
    for (size_t s = 0; s < steps.size() && !changed; ++s) {
      if (!steps[s].is_compute()) continue;
      const Node& node = graph.node(steps[s].node);
      const std::vector<ValueId> operands = graph.inputs_of(node);
      const OpDef* op = is_source(node) ? nullptr : find_op(node.op);
      const bool view = op != nullptr && op->alias && operands.size() == 1 &&
                        node.outputs.size() == 1 && from_input[operands[0].index];
      if (view) from_input[node.outputs[0].index] = true;
      if (node.outputs.empty() || !from_input[node.outputs[0].index]) continue;
      const ValueId value = node.outputs[0];
      const auto& triples = theory.triples(steps[s].node);
      if (!triples[steps[s].triple].out[0].is_replicated()) continue;
      std::optional<Placement> piece;
      bool one = true;
      for (const Step& use : steps) {
        if (use.is_compute()) {
          const std::vector<ValueId> inputs = graph.inputs_of(graph.node(use.node));
          for (size_t i = 0; i < inputs.size(); ++i)
            one =
                one && !(inputs[i] == value && theory.triples(use.node)[use.triple].in[i] == whole);
        } else if (use.value == value && use.from == whole) {
          one = one && use.kind == CollectiveKind::slice && piece.value_or(use.to) == use.to;
          piece = use.to;
        }
      }
      if (!one || !piece) continue;
      for (size_t t = 0; t < triples.size() && !changed; ++t) {
        CollectiveKind kind;
        if (triples[t].out[0] != *piece || !triples[t].kernel.empty() ||
            (view && (!Theory::conversion(whole, triples[t].in[0], &kind) ||
                      kind != CollectiveKind::slice)))
          continue;
        steps[s].triple = static_cast<int>(t);
        std::erase_if(steps, [&](const Step& use) {
          return !use.is_compute() && use.value == value && use.from == whole;
        });
        if (view) {
          Step slice;
          slice.value = operands[0];
          slice.from = whole;
          slice.to = triples[t].in[0];
          slice.kind = CollectiveKind::slice;
          if (std::find(steps.begin(), steps.end(), slice) == steps.end()) {
            const auto at = std::find_if(steps.begin(), steps.end(), [&](const Step& step) {
              return step.is_compute() && step.node == graph.value(value).producer;
            });
            steps.insert(at, slice);
          }
        }
        changed = true;
      }
    }
  }
}

Planned make_plan(const CapturedGraph& graph, const Cluster& cluster, const std::string& optimizer,
                  bool memory_limit, double time_limit, uint64_t seed,
                  const std::vector<double>& ratios, bool parts) {
  spmd::PlanRequest request;
  request.model = graph.graph.model;
  request.batch = graph.batch;
  parse_optimizer(optimizer, &request.synthesis.optimizer);
  request.synthesis.memory_limit = memory_limit;
  request.synthesis.limits.deadline = Deadline::in(time_limit);
  request.synthesis.limits.seed = seed;
  request.synthesis.ratios = ratios;
  request.parts = parts;
  request.reductions = reduce::reductions_of_all;
  Planned planned;
  planned.result = spmd::plan(graph.graph, cluster, request);
  if (!planned.result.feasible) return planned;
  planned.plan = std::make_shared<Plan>(std::move(planned.result.plan));
  narrow_inputs(planned.plan.get());
  return planned;
}

// Plans of another engine, best first, the seconds they took, why there is none, and whether that
// is because the model cannot be taken in micro-batches.
std::tuple<std::vector<std::shared_ptr<Plan>>, double, std::string, bool> engine_plans(
    const std::string& engine, const CapturedGraph& graph, const Cluster& cluster,
    const std::string& optimizer, bool memory_limit, double time_limit, uint64_t seed) {
  planner::Request request;
  request.model = graph.graph.model;
  request.batch = graph.batch;
  parse_optimizer(optimizer, &request.optimizer);
  request.memory_limit = memory_limit;
  request.limits.deadline = Deadline::in(time_limit);
  request.seed = seed;
  const planner::GraphOf graph_of = [&](int64_t) { return graph.graph; };
  planner::EngineResult found = engine == "grid"
                                    ? planner::plan_grid(request, cluster, graph_of, {})
                                    : planner::plan_pipeline(request, cluster, graph_of);
  std::vector<std::shared_ptr<Plan>> plans;
  for (std::unique_ptr<Plan>& plan : found.plans) plans.push_back(std::move(plan));
  return {plans, found.search_s, found.reason, found.refused};
}

py::list baselines(const Planned& planned) {
  py::list list;
  for (const spmd::Baseline& b : planned.result.baselines)
    list.append(py::dict(py::arg("name") = b.name, py::arg("feasible") = b.feasible,
                         py::arg("predicted_step_s") = b.predicted_step_s,
                         py::arg("reason") = b.reason));
  return list;
}

py::dict simulated(const Plan& plan, const std::string& trace) {
  Simulation simulation;
  {
    py::gil_scoped_release unlocked;
    simulation = simulate(plan, !trace.empty());
    if (!trace.empty()) write_file(trace, to_trace(plan, simulation));
  }
  py::list devices;
  for (const DeviceTime& d : simulation.devices)
    devices.append(py::dict(py::arg("busy_s") = d.busy, py::arg("comm_s") = d.comm,
                            py::arg("exposed_comm_s") = d.exposed_comm, py::arg("idle_s") = d.idle,
                            py::arg("peak_memory_bytes") = d.peak_memory));
  return py::dict(py::arg("step_s") = simulation.step, py::arg("devices") = devices,
                  py::arg("overlap") = simulation.overlap,
                  py::arg("load_balance") = simulation.load_balance);
}

}  // namespace

void bind_plan(py::module_& m) {
  py::class_<Cluster, std::shared_ptr<Cluster>>(m, "Cluster")
      .def_readonly("name", &Cluster::name)
      .def("__len__", [](const Cluster& c) { return c.size(); })
      .def("speed", [](const Cluster& c, int device) { return c.type_of(device).speed; })
      .def("memory", [](const Cluster& c, int device) { return c.type_of(device).memory; })
      .def("device", [](const Cluster& c, int device) { return c.type_of(device).name; });
  m.def("load_cluster", py::overload_cast<const std::string&>(&load_cluster));
  m.def("parse_cluster", &parse_cluster);

  py::class_<Planned>(m, "Planned")
      .def_readonly("plan", &Planned::plan)
      .def_property_readonly("reason", [](const Planned& p) { return p.result.reason; })
      .def_property_readonly("search_s", [](const Planned& p) { return p.result.search_s; })
      .def_property_readonly("devices", [](const Planned& p) { return p.result.devices; })
      .def_property_readonly("baselines", &baselines);
  m.def("part_in_words", &spmd::part_in_words);
  m.def("plan", &make_plan, py::call_guard<py::gil_scoped_release>());
  m.def("engine_plans", &engine_plans, py::call_guard<py::gil_scoped_release>());

  py::class_<Plan, std::shared_ptr<Plan>>(m, "Plan")
      .def("__str__", [](const Plan& p) { return describe(p); })
      .def("text", [](const Plan& p) { return to_json(p).dump(); })
      .def("save", [](const Plan& p, const std::string& path) { save_plan(p, path); })
      .def("check", [](const Plan& p, bool memory_limit) { return check(p, memory_limit); })
      .def("simulate", &simulated)
      .def("graph",
           [](const Plan& p) {
             CapturedGraph graph;
             graph.graph = *p.graph;
             graph.batch = p.batch;
             return graph;
           })
      .def_readonly("engine", &Plan::engine)
      .def_readonly("model", &Plan::model)
      .def_readonly("batch", &Plan::batch)
      .def_property_readonly(
          "micro_batches",
          [](const Plan& p) { return p.pipeline ? p.pipeline->micro_batches() : 1; })
      // What keeps the plan from computing the same as one device; empty: nothing.
      .def_property_readonly("inexact",
                             [](const Plan& p) {
                               return p.pipeline && !p.pipeline->part().exact()
                                          ? normalised_by_part(*p.graph, p.pipeline->part())
                                          : std::string();
                             })
      .def_property_readonly("stages",
                             [](const Plan& p) { return p.pipeline ? p.pipeline->stages() : 0; })
      // Of one segment a list, of several a list of lists.
      .def_property_readonly("ratios",
                             [](const Plan& p) -> py::object {
                               if (p.ratios.empty()) return py::list();
                               return p.ratios.size() == 1 ? py::cast(p.ratios[0])
                                                           : py::cast(p.ratios);
                             })
      .def_readonly("cluster", &Plan::cluster)
      .def_readonly("predicted_step_s", &Plan::predicted_step_s)
      .def_readonly("lower_bound_s", &Plan::lower_bound_s)
      .def_readonly("peak_memory_bytes", &Plan::peak_memory_bytes)
      .def_property(
          "precision", [](const Plan& p) { return to_string(p.precision); },
          [](Plan& p, const std::string& text) {
            MOTLEY_CHECK(parse_dtype(text, &p.precision), "precision {}", text);
          })
      .def_property_readonly("optimizer", [](const Plan& p) { return to_string(p.optimizer); });
  m.def("parse_plan", [](const std::string& text, const std::string& name) {
    return std::make_shared<Plan>(parse_plan(text, name));
  });
  m.def("load_plan",
        [](const std::string& path) { return std::make_shared<Plan>(load_plan(path)); });
}

}  // namespace motley::python
