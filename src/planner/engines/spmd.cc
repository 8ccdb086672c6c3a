// One SPMD program (HAP): alternation of program search and shares of devices, in segments if asked
// for.
#include <utility>

#include "core/log.h"
#include "planner/batch_step.h"
#include "planner/engines.h"
#include "planner/segments.h"
#include "reduce/cluster.h"

namespace motley::planner {

namespace {

constexpr double kCertifyWork = 0.1;  // of what the search took

ProgramRequest request_of(const PlanOptions& options) {
  ProgramRequest request;
  request.model = options.model;
  request.batch = options.batch;
  request.strategy = options.strategy;
  request.parts = !options.all_devices;
  request.baselines = options.baselines;
  // Beside other engines, which have better use for threads, it takes one.
  request.threads = options.engine == "auto" ? 1 : options.threads;
  request.reductions = reduce::reductions_of_all;
  request.alternation.optimizer = options.optimizer;
  request.alternation.redundancy = options.redundancy;
  request.alternation.memory_limit = options.memory_limit;
  request.alternation.recompute = options.recompute && options.strategy.empty();
  request.alternation.ratios = options.ratios;
  request.alternation.limits = options.limits;
  request.alternation.found = [record = options.record](Seconds step) {
    record->found("spmd", step);
  };
  if (!options.certify) request.alternation.certify_work = kCertifyWork;
  return request;
}

EngineResult result_of(ProgramResult found) {
  EngineResult result;
  result.reason = found.reason;
  result.search_s = found.search_s;
  result.planned = found.solves;
  result.states = found.states;
  result.baselines = std::move(found.baselines);
  if (!found.feasible) return result;
  result.lower_bound = found.plan.lower_bound_s;
  result.add(std::make_unique<Plan>(std::move(found.plan)), found.reason);
  Candidate& candidate = result.candidates.back();
  candidate.devices = std::move(found.devices);
  candidate.hidden_s = found.hidden_s;
  candidate.synchronised_bound_s = found.synchronised_bound_s;
  return result;
}

}  // namespace

EngineResult plan_one_program(const PlanOptions& options, const Cluster& cluster,
                              const GraphOf& graph_of, bool planned) {
  const std::shared_ptr<const BatchStep> step = step_of(options, graph_of);
  for (const std::string& op : step->theory().unknown_ops())
    spdlog::warn("{} is not in the op table: it runs replicated", op);
  ProgramRequest request = request_of(options);
  request.planned = planned;
  if (!options.segments.one()) {
    std::vector<Segmented> tried;
    EngineResult result =
        result_of(plan_segments(plan_program(step, cluster, request), step->graph(), cluster,
                                request, options.segments, &tried));
    result.tried = std::move(tried);
    return result;
  }
  const auto planner = std::make_shared<ProgramPlanner>(step, cluster, request);
  EngineResult result = result_of(planner->run());
  if (!result.candidates.empty())
    result.certify = [planner](Seconds below) { return result_of(planner->certify(below)); };
  return result;
}

}  // namespace motley::planner
