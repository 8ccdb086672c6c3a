// From a canonical graph and a cluster to a plan, with the baselines of the field beside it.
#pragma once

#include <string>
#include <vector>

#include "plan/plan.h"
#include "spmd/synthesis.h"

namespace motley::spmd {

struct PlanRequest {
  std::string model;  // what the plan records
  int64_t batch = 0;  // global
  SynthesisOptions synthesis;
  bool baselines = true;
};

struct Baseline {
  std::string name;  // dp-ev, dp-cp, zero, tensor-parallel
  bool feasible = false;
  Seconds predicted_step_s = 0;
  std::string reason;
};

struct PlanResult {
  bool feasible = false;
  std::string reason;  // why the search stopped, or why nothing fits
  Plan plan;
  std::vector<Baseline> baselines;
  double search_s = 0;  // theory, problem and searches of the plan itself, baselines not counted
  int solves = 0;
  int64_t states = 0;
};

PlanResult plan(Graph graph, const Cluster& cluster, const PlanRequest& request);

// A plan from one synthesis.
Plan make_plan(Graph graph, const Cluster& cluster, const PlanRequest& request,
               const Synthesis& synthesis);

}  // namespace motley::spmd
