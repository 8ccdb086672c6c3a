// Clusters, plans and their simulation.
#include <set>

#include "cluster/cluster.h"
#include "cluster/part.h"
#include "core/error.h"
#include "core/file.h"
#include "planner/planner.h"
#include "python/bindings.h"
#include "sim/simulate.h"

namespace motley::python {

namespace {

struct Found {
  planner::PlanReport report;
};

planner::PlanOptions options_of(const CapturedGraph& graph, const py::dict& given) {
  planner::PlanOptions options;
  options.model = graph.graph.model;
  options.batch = graph.batch;
  for (const auto& [key, value] : given) {
    const auto name = key.cast<std::string>();
    if (name == "engine")
      options.engine = value.cast<std::string>();
    else if (name == "strategy")
      options.strategy = value.cast<std::string>();
    else if (name == "fix")
      options.fix = value.cast<std::string>();
    else if (name == "virtual_devices")
      options.virtual_devices = planner::parse_virtual_devices(value.cast<std::string>());
    else if (name == "segments")
      options.segments = planner::parse_segments(value.cast<std::string>());
    else if (name == "duplex")
      options.duplex = planner::parse_duplex(value.cast<std::string>());
    else if (name == "layers")
      options.layers = planner::parse_layers(value.cast<std::string>());
    else if (name == "ratios")
      options.ratios = value.cast<std::vector<double>>();
    else if (name == "all_devices")
      options.all_devices = value.cast<bool>();
    else if (name == "optimizer")
      parse_optimizer(value.cast<std::string>(), &options.optimizer);
    else if (name == "redundancy")
      options.redundancy = value.cast<int>();
    else if (name == "precision")
      MOTLEY_CHECK(parse_dtype(value.cast<std::string>(), &options.precision), "precision");
    else if (name == "memory_limit")
      options.memory_limit = value.cast<bool>();
    else if (name == "recompute")
      options.recompute = value.cast<bool>();
    else if (name == "micro_batch")
      options.micro_batches = {value.cast<int64_t>()};
    else if (name == "time_limit")
      options.limits.deadline = Deadline::in(value.cast<double>());
    else if (name == "seed")
      options.limits.seed = value.cast<uint64_t>();
    else if (name == "threads")
      options.threads = value.cast<int>();
    else
      MOTLEY_CHECK(false, "there is no option {}", name);
  }
  return options;
}

std::unique_ptr<Found> find_plan(const CapturedGraph& graph, const Cluster& cluster,
                                 const py::dict& given) {
  planner::PlanOptions options = options_of(graph, given);
  if (!given.contains("time_limit"))
    options.limits.deadline = Deadline::in(planner::usual_time_limit(cluster, graph.graph));
  const py::gil_scoped_release unlocked;
  auto found = std::make_unique<Found>();
  found->report = planner::plan([&](int64_t) { return graph.graph; }, cluster, options);
  return found;
}

py::list baselines(const Found& found) {
  py::list list;
  for (const planner::EngineResult& engine : found.report.engines)
    for (const planner::StrategyTime& b : engine.baselines)
      list.append(py::dict(py::arg("name") = b.name, py::arg("feasible") = b.feasible,
                           py::arg("predicted_step_s") = b.predicted_step_s,
                           py::arg("reason") = b.reason));
  return list;
}

// Once: the plan is moved out of what was found.
std::shared_ptr<Plan> take_best(Found& found) {
  return std::shared_ptr<Plan>(std::move(found.report.candidates.at(0).plan));
}

py::dict simulated(const Plan& plan, const std::string& trace) {
  Simulation simulation;
  {
    py::gil_scoped_release unlocked;
    simulation = simulate(plan, trace.empty() ? Spans::none : Spans::all);
    if (!trace.empty()) write_file(trace, to_trace(plan, simulation));
  }
  py::list devices;
  for (const DeviceTime& d : simulation.devices)
    devices.append(py::dict(py::arg("busy_s") = d.busy, py::arg("comm_s") = d.comm,
                            py::arg("exposed_comm_s") = d.exposed_comm, py::arg("idle_s") = d.idle,
                            py::arg("peak_memory_bytes") = d.peak_memory,
                            py::arg("allocated_bytes") = d.allocated));
  return py::dict(py::arg("step_s") = simulation.step, py::arg("devices") = devices,
                  py::arg("overlap") = simulation.overlap,
                  py::arg("load_balance") = simulation.load_balance);
}

void bind_cluster(py::module_& m) {
  py::class_<Cluster, std::shared_ptr<Cluster>>(m, "Cluster")
      .def_readonly("name", &Cluster::name)
      .def("__len__", [](const Cluster& c) { return c.size(); })
      // What the file says of all of it; empty: nothing.
      .def_property_readonly("backend", [](const Cluster& c) { return c.groups[0].backend.name; })
      // That it names anywhere.
      .def_property_readonly("backends",
                             [](const Cluster& c) {
                               std::set<std::string> names;
                               for (const Group& g : c.groups)
                                 if (!g.backend.name.empty()) names.insert(g.backend.name);
                               return std::vector<std::string>(names.begin(), names.end());
                             })
      .def("part",
           [](const Cluster& c, const std::vector<int>& devices) { return part_of(c, devices); })
      .def("text", [](const Cluster& c) { return to_yaml(c); })
      .def("slower", &with_slower)
      .def("slowest_link", [](const Cluster& c) { return slowest_port(c, GroupId(0)); })
      .def("speed", [](const Cluster& c, int device) { return c.type_of(device).speed; })
      .def("memory", [](const Cluster& c, int device) { return c.type_of(device).memory; })
      .def("device", [](const Cluster& c, int device) { return c.type_of(device).name; });
  m.def("load_cluster", py::overload_cast<const std::string&>(&load_cluster));
  m.def("measured_cluster", [](const std::string& path, const std::string& profile) {
    return load_cluster(path, 0, profile);
  });
  m.def("parse_cluster", &parse_cluster);
}

}  // namespace

void bind_plan(py::module_& m) {
  bind_cluster(m);
  py::class_<Found>(m, "Found")
      .def_property_readonly("found", [](const Found& f) { return !f.report.candidates.empty(); })
      // Why the model cannot be taken in micro-batches, where all plans that were wanted would; ''.
      .def_property_readonly("refusal",
                             [](const Found& f) {
                               const auto& engines = f.report.engines;
                               return f.report.refused() ? engines.front().reason : std::string();
                             })
      .def_property_readonly("out_of_time", [](const Found& f) { return f.report.out_of_time; })
      .def_property_readonly("why_not", [](const Found& f) { return f.report.reason; })
      .def_property_readonly("reason", [](const Found& f) { return f.report.best().note; })
      .def_property_readonly("search_s", [](const Found& f) { return f.report.best().search_s; })
      .def_property_readonly("devices", [](const Found& f) { return f.report.best().devices; })
      .def_property_readonly("baselines", &baselines)
      .def("take_best", &take_best);
  m.def("part_in_words", &planner::part_in_words);
  m.def("plan", &find_plan);

  py::class_<Plan, std::shared_ptr<Plan>>(m, "Plan")
      .def("__str__",
           [](const Plan& p) {
             const std::vector<std::string> problems = check(p, false);
             return problems.empty() ? describe(p)
                                     : fmt::format("{}: not sound: {}\n", p.model, problems[0]);
           })
      .def("text", [](const Plan& p) { return to_json(p).dump(); })
      .def("save", [](const Plan& p, const std::string& path) { save_plan(p, path); })
      .def("check", [](const Plan& p, bool memory_limit) { return check(p, memory_limit); })
      .def("simulate", &simulated)
      // The seconds of a step on another cluster of as many devices.
      .def("step_on",
           [](const Plan& p, const Cluster& cluster) {
             Plan there = parse_plan(to_json(p).dump(), "plan");
             MOTLEY_CHECK(cluster.size() == p.cluster.size());
             there.cluster = cluster;
             return simulate(there).step;
           })
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
      .def_readonly("redundancy", &Plan::redundancy)
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
