#include "spmd/planner.h"

#include <chrono>

namespace motley::spmd {

Plan make_plan(Graph graph, const Cluster& cluster, const PlanRequest& request,
               const Synthesis& s) {
  Plan plan;
  plan.model = request.model;
  plan.batch = request.batch;
  plan.optimizer = request.synthesis.optimizer;
  plan.cluster = cluster;
  plan.ratios = s.ratios;
  plan.set_graph(std::move(graph));
  plan.program = s.program;
  plan.predicted_step_s = s.cost.step;
  plan.lower_bound_s = s.lower_bound;
  for (int d = 0; d < cluster.size(); ++d)
    plan.peak_memory_bytes.push_back(s.cost.memory.peak[cluster.devices[d].type]);
  return plan;
}

PlanResult plan(Graph graph, const Cluster& cluster, const PlanRequest& request) {
  auto start = std::chrono::steady_clock::now();
  PlanResult result;
  CostModel model(cluster);
  Synthesis best;
  {
    Theory theory(graph);
    best = synthesize(theory, model, request.synthesis);
    result.search_s =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (request.baselines) {
      struct Known {
        const char* name;
        Restriction restriction;
        std::vector<double> ratios;
      };
      for (const Known& known :
           {Known{"dp-ev", Restriction::data_parallel, even_ratios(cluster)},
            Known{"dp-cp", Restriction::data_parallel, proportional_ratios(cluster)},
            Known{"zero", Restriction::zero, even_ratios(cluster)}}) {
        SynthesisOptions options = request.synthesis;
        options.restriction = known.restriction;
        options.ratios = known.ratios;
        Synthesis s = synthesize(theory, model, options);
        result.baselines.push_back(
            {known.name, s.feasible, s.cost.step, s.feasible ? "" : s.reason});
      }
    }
  }
  result.feasible = best.feasible;
  result.reason = best.reason;
  result.solves = best.solves;
  result.states = best.states;
  if (best.feasible) result.plan = make_plan(std::move(graph), cluster, request, best);
  return result;
}

}  // namespace motley::spmd
