// Clusters, plans and their simulation.
#include "cluster/cluster.h"
#include "core/file.h"
#include "graph/file.h"
#include "python/bindings.h"
#include "sim/simulate.h"
#include "spmd/planner.h"

namespace motley::python {

namespace {

struct Planned {
  spmd::PlanResult result;
  std::shared_ptr<Plan> plan;  // null: nothing fits
};

Planned make_plan(const CapturedGraph& graph, const Cluster& cluster, const std::string& optimizer,
                  bool memory_limit, double time_limit, uint64_t seed,
                  const std::vector<double>& ratios) {
  spmd::PlanRequest request;
  request.model = graph.graph.model;
  request.batch = graph.batch;
  parse_optimizer(optimizer, &request.synthesis.optimizer);
  request.synthesis.memory_limit = memory_limit;
  request.synthesis.limits.time_limit_s = time_limit;
  request.synthesis.limits.seed = seed;
  request.synthesis.ratios = ratios;
  Planned planned;
  planned.result = spmd::plan(graph.graph, cluster, request);
  if (planned.result.feasible)
    planned.plan = std::make_shared<Plan>(std::move(planned.result.plan));
  return planned;
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
      .def("device", [](const Cluster& c, int device) { return c.type_of(device).name; });
  m.def("load_cluster", &load_cluster);
  m.def("parse_cluster", &parse_cluster);

  py::class_<Planned>(m, "Planned")
      .def_readonly("plan", &Planned::plan)
      .def_property_readonly("reason", [](const Planned& p) { return p.result.reason; })
      .def_property_readonly("search_s", [](const Planned& p) { return p.result.search_s; })
      .def_property_readonly("baselines", &baselines);
  m.def("plan", &make_plan, py::call_guard<py::gil_scoped_release>());

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
      .def_readonly("ratios", &Plan::ratios)
      .def_readonly("cluster", &Plan::cluster)
      .def_readonly("predicted_step_s", &Plan::predicted_step_s)
      .def_readonly("lower_bound_s", &Plan::lower_bound_s)
      .def_readonly("peak_memory_bytes", &Plan::peak_memory_bytes)
      .def_property_readonly("optimizer", [](const Plan& p) { return to_string(p.optimizer); });
  m.def("parse_plan", [](const std::string& text, const std::string& name) {
    return std::make_shared<Plan>(parse_plan(text, name));
  });
  m.def("load_plan",
        [](const std::string& path) { return std::make_shared<Plan>(load_plan(path)); });
}

}  // namespace motley::python
