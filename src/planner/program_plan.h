// From a canonical graph and a cluster to a plan, with the baselines of the field beside it.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "plan/plan.h"
#include "planner/alternation.h"

namespace motley::planner {

class BatchStep;

struct ProgramRequest {
  std::string model;  // what the plan records
  int64_t batch = 0;  // global
  AlternationOptions alternation;
  bool baselines = true;
  // What large all-reduces of a cluster take instead of the plain collective; none if not set.
  // Baselines and strategies take the plain one.
  std::function<std::vector<ReductionProgram>(const Cluster&)> reductions;
  std::string strategy;  // the name of a baseline that is to be the plan; empty: search
  bool planned = false;  // there is a plan: what is hardly any good is not looked for
  int threads = 1;       // of its searches; 0: one per core. The plan is the same
  bool parts = false;    // also plan for parts of the cluster that may be faster than all of it
};

// The names of the baselines, in order.
std::vector<std::string> strategies();
// Options of a search that is restricted to a strategy's programs, at its shares; whether it may
// compute again is as in `options`. Besides those of
// strategies() "zero-cp": ZeRO with batches by speed; "fsdp": ZeRO that gathers parameters alone;
// "matrices": tensor parallelism that cuts every matrix, as frameworks do. Throws UserError if there is none of the name.
AlternationOptions restricted(const std::string& strategy, const Cluster& cluster,
                              AlternationOptions options);

struct StrategyTime {
  std::string name;  // of strategies(), or an opponent
  bool feasible = false;
  Seconds predicted_step_s = 0;
  std::string reason;
  std::string knobs;  // of an opponent (engines/opponents.cc): what makes it fastest
  // Of an opponent: the same plan run by motley, which hides less than its own framework may; 0:
  // not known.
  Seconds on_motley_s = 0;
};
// An opponent's knobs in words, and its step run by motley where that is another.
std::string knobs_of(const StrategyTime& opponent);

struct ProgramResult {
  bool feasible = false;
  std::string reason;  // why the search stopped, or why nothing fits
  Plan plan;
  std::vector<int> devices;  // of the cluster that was asked for: those of the plan's cluster
  Seconds hidden_s = 0;      // of the plan's communication behind its backward pass
  // Lower bound of predicted step + hidden_s; 0 if the plan's own bound is within 1%.
  Seconds synchronised_bound_s = 0;
  std::vector<StrategyTime> baselines;
  double search_s = 0;  // searches of the plan itself, baselines not counted
  int solves = 0;
  int64_t states = 0;
};

// Plans one program, and certifies it where that is asked for.
//
// The plan is no slower than the best baseline that was looked at; these come first, so that there
// soon is a plan, or where there are threads beside the search. With `parts`, where a plan
// communicates so long that fewer devices could win, groups of the cluster, its faster types and
// single devices are planned for too; the plan's cluster is then the part that won. A part is left
// out if its devices could not compute the model in the plan's time, however they shared it.
class ProgramPlanner {
 public:
  // `step`: of the batch. What is not copied outlives this. Throws UserError if there is no strategy
  // of that name.
  ProgramPlanner(std::shared_ptr<const BatchStep> step, const Cluster& cluster,
                 ProgramRequest request);
  ~ProgramPlanner();
  ProgramResult run();
  // The same with lower bounds, if the plan takes no longer than `below`; and found with more
  // effort, on the whole cluster too where that takes not much longer. REQUIRES: run() found a
  // plan.
  ProgramResult certify(Seconds below);

 private:
  class Work;
  std::unique_ptr<Work> work_;
};

// run(), certified unless the request says otherwise.
ProgramResult plan_program(Graph graph, const Cluster& cluster, const ProgramRequest& request);
ProgramResult plan_program(std::shared_ptr<const BatchStep> step, const Cluster& cluster,
                           const ProgramRequest& request);

// Which devices of a larger cluster a plan of one program is for, and why: "2 of the 4 of mixed
// (0-1): with the others it would communicate longer than they save".
std::string part_in_words(const std::vector<int>& devices, int of, const std::string& cluster);

// A plan from one alternation.
Plan make_plan(const std::shared_ptr<const BatchStep>& step, const Cluster& cluster,
               const ProgramRequest& request, const Alternation& alternation);

}  // namespace motley::planner
