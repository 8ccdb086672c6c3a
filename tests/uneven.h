// Clusters of unequal devices, and small models that are trained on them by plans.
#pragma once

#include <algorithm>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "capture/capture.h"
#include "core/error.h"
#include "graph/canonical.h"
#include "planner/program_plan.h"
#include "runtime/trainer.h"

namespace motley {

// Small ones of three kinds.
inline const char* const kModels[] = {"mlp:layers=3,hidden=16,in=12,classes=5",
                                      "gpt:layers=1,hidden=16,heads=4,seq=8,vocab=256",
                                      "convnet:width=4,image=8,classes=5"};

// `count` devices; the first is as fast as three of the last.
inline Cluster uneven_cluster(int count) {
  std::vector<DeviceType> types;
  for (int i = 0; i < count; ++i) {
    DeviceType type;
    type.name = fmt::format("type{}", i);
    type.flops = type.half_flops = 1e9 * (3 - 2. * i / std::max(count - 1, 1));
    type.memory = 1e10;
    type.memory_bandwidth = 1e10;
    type.overhead = 1e-6;
    type.speed = 0.2;
    types.push_back(type);
  }
  return flat_cluster(types, std::vector<int>(count, 1), {LinkKind::switched, 1e8, 1e-6});
}

// One program, at shares in proportion to speed.
inline Plan plan_of(const std::string& model, int64_t batch, const Cluster& cluster,
                    spmd::Restriction restriction = spmd::Restriction::none,
                    Optimizer optimizer = Optimizer::adamw) {
  planner::ProgramRequest request;
  request.model = model;
  request.batch = batch;
  request.baselines = request.alternation.certify = false;
  request.alternation.optimizer = optimizer;
  request.alternation.restriction = restriction;
  request.alternation.ratios = planner::proportional_ratios(cluster);
  planner::ProgramResult result =
      planner::plan_program(canonicalize(capture(model, batch).graph), cluster, request);
  MOTLEY_CHECK(result.feasible, "{}", result.reason);
  return std::move(result.plan);
}

// What rank 0 reports.
inline std::vector<StepReport> train_on_threads(const Plan& plan, const TrainOptions& options,
                                                int64_t steps) {
  std::vector<StepReport> reports;
  run_thread_group(plan.cluster.size(), [&](Communicator& group) {
    RunReport report = train(plan, group, options, steps);
    if (group.rank() == 0) reports = report.steps;
  });
  return reports;
}

// Of what it throws.
inline std::string message_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& e) {
    return e.what();
  }
  return "nothing was thrown";
}

}  // namespace motley
