#include "runtime/plan_model.h"

#include "capture/capture.h"
#include "core/error.h"
#include "graph/canonical.h"
#include "graph/file.h"
#include "graph/precision.h"
#include "graph/segment.h"

namespace motley {

ModelSpec model_of(const Plan& plan) {
  return parse_model(is_graph_file(plan.model) ? plan.graph->model : plan.model);
}

Graph captured_graph(const Plan& plan, DType dtype, DType compute) {
  Graph graph = canonicalize(capture(model_of(plan).text(), plan.batch, dtype).graph);
  if (plan.precision != DType::f32) graph = with_precision(graph, compute);
  if (plan.theory->segments() == 1) return graph;
  const std::vector<int> segments = original_segments(*plan.graph);
  return segments.size() == graph.nodes.size() ? with_segments(graph, segments) : graph;
}

DType dtype_of(const Plan& plan) {
  if (plan.graph->parameters.empty()) return DType::f32;
  return plan.graph->spec(plan.graph->parameters[0].value).dtype;
}

Graph captured_graph(const Plan& plan) {
  return captured_graph(plan, dtype_of(plan), plan.precision);
}

Graph graph_of_model(const Plan& plan) {
  Graph graph = captured_graph(plan);
  if (fingerprint(graph) != fingerprint(*plan.graph))
    throw user_error("run",
                     "this is a plan for another model: its graph is that of {} ({:016x}), but its "
                     "model is {} at batch {} ({:016x}); plan that model again",
                     plan.graph->model, fingerprint(*plan.graph), plan.model, plan.batch,
                     fingerprint(graph));
  return graph;
}

Plan plan_to_run(const std::string& path, int workers) {
  Plan plan = load_plan(path);
  const std::vector<std::string> problems = check(plan, /*memory_limit=*/false);
  if (!problems.empty())
    throw user_error("run", "{}: the plan is not sound: {}; see motley check", path, problems[0]);
  if (plan.precision == DType::f16)
    throw user_error(
        "run",
        "{}: precision is f16, which trains only with loss scaling, and workers do not "
        "scale; plan with --precision bf16",
        path);
  if (workers > 0 && workers != plan.cluster.size())
    throw user_error("run", "{}: the plan is for {} devices, but {} workers were started", path,
                     plan.cluster.size(), workers);
  return plan;
}

}  // namespace motley
