// The engines: ways to plan a model on a cluster, each from the same question to plans. An engine
// is one file in engines/ and a line of the table in engines.cc; plan() (planner.h) runs those that
// a question wants and ranks what they find.
//
// Engines of stages and replicas (HAPT's stage-mesh search, AMP's grid, HAP's virtual devices) are
// composed of modules that do not know each other: layers and their costs come from
// layered_graph.h, plans from compose.h, and they are ranked by the event simulator.
#pragma once

#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "grid/strategy.h"
#include "plan/plan.h"
#include "planner/options.h"
#include "planner/program_plan.h"
#include "planner/segments.h"

namespace motley::planner {

// A plan, and how it came about.
struct Candidate {
  std::unique_ptr<Plan> plan;
  std::string note;     // "3 stages, micro-batches of 4", the grid's strategy, why a search stopped
  double search_s = 0;  // of its engine
  Seconds simulated_s = 0;   // what decides; set by plan()
  std::vector<int> devices;  // of the cluster that was asked for: those of the plan's cluster
  Seconds hidden_s = 0;      // of one program's communication, behind its backward pass
  Seconds synchronised_bound_s =
      0;  // of predicted step + hidden_s, of one program; 0: not looked for
};

// That of the options, or of the graph.
std::shared_ptr<BatchStep> step_of(const PlanOptions& options, const GraphOf& graph_of);

// What a target's best plan would take without one of its limits.
struct Lifted {
  std::string limit;  // "stages run 1F1B"
  Seconds step_s = 0;
};

// What an engine found, best first.
struct EngineResult {
  std::string engine;
  std::shared_ptr<Record> record;  // that is told of plans; null: none
  std::vector<Candidate> candidates;
  // Slower ones, for engines of later rounds to make faster; no answers.
  std::vector<Candidate> others;
  std::string reason;  // why there is no plan, or why the search stopped
  // The model cannot be taken in micro-batches (shard/micro_batch.h), which `reason` then says.
  bool refused = false;
  Seconds lower_bound = 0;  // of the engine's own objective; 0: none
  double search_s = 0;
  int planned = 0;     // program searches
  int64_t states = 0;  // of them
  std::vector<StrategyTime> baselines;
  std::vector<Lifted> lifted;    // limits of a target, those that cost most first
  std::vector<Segmented> tried;  // ways to cut the model into segments
  // Looks for lower bounds of its plan, and for better ones where these are far, if it takes no
  // longer than that; the candidates that it returns take the place of its own. Null: it has none.
  std::function<EngineResult(Seconds below)> certify;

  // Appends a plan.
  void add(std::unique_ptr<Plan> plan, std::string note);
};

// The devices of the fastest type, ascending.
std::vector<int> fastest_of(const Cluster& cluster);

// Whether a plan computes the same as one device.
bool exact(const Plan& plan);

// Puts the candidates of a result in the order of their predicted times.
void rank(EngineResult* result);

// What engines of earlier rounds found.
struct FoundBefore {
  Seconds step = std::numeric_limits<Seconds>::infinity();  // of the best plan
  // Of one program, in one micro-batch, whose collectives do not travel beside its computation yet:
  // the fastest, ascending.
  std::vector<const Candidate*> programs;
};

constexpr int kRounds = 4;
// An engine. Those of a round run after those of the rounds before and are told what these found.
struct Engine {
  const char* name;
  bool messages;  // its plans need messages between two workers (cluster/backend.h)
  int round;
  double part;  // of the time or work that is left when its round begins
  bool (*wanted)(const PlanOptions& options);
  EngineResult (*plan)(const PlanOptions& options, const Cluster& cluster, const GraphOf& graph_of,
                       const FoundBefore& known);
};

// By name; one may have several lines, in rounds of their own.
const std::vector<Engine>& engines();
// What PlanOptions::engine may be: auto, and the names of the table.
std::vector<std::string> engine_names();

// One program on all devices or those that make it faster (HAP), in segments if asked for. Where
// others have a plan nothing is looked for only to have one.
EngineResult plan_one_program(const PlanOptions& options, const Cluster& cluster,
                              const GraphOf& graph_of, bool planned = false);

// The same in several micro-batches whose gradients add up, on all devices: where memory is short
// less is computed again. Nothing is looked for that takes longer than `known`.
EngineResult plan_accumulated(const PlanOptions& options, const Cluster& cluster,
                              const GraphOf& graph_of, Seconds known);

// One program on the parts of a batch (options.duplex; 0: two, where that is faster than what is
// known), whose communication hides behind one another's computation. With 0 the programs that are
// known are tried as one part, too, on their own devices.
EngineResult plan_duplex(const PlanOptions& options, const Cluster& cluster,
                         const GraphOf& graph_of, const FoundBefore& known);

// The search of pipeline/search.h over micro-batch sizes, numbers of pipelines, orders of
// sub-clusters, stages and sub-meshes, on all sub-clusters or without some. The time of a stage on
// a mesh is the sum over its layers, each at its share of the program that the SPMD engine finds
// for it and its neighbours on that mesh; the best plans found are then planned stage by stage. What
// seems to take much longer than `known`, the step of another engine's plan, is not looked for.
EngineResult plan_pipeline(const PlanOptions& options, const Cluster& cluster,
                           const GraphOf& graph_of,
                           Seconds known = std::numeric_limits<Seconds>::infinity());

// The search of grid/search.h on layers read off the graph, with what is fixed.
EngineResult plan_grid(const PlanOptions& options, const Cluster& cluster, const GraphOf& graph_of,
                       const grid::Fixed& fixed);

// The i-th devices of all virtual devices run one SPMD program on an equal part of the batch, so
// that what the program sends crosses between machines in as many groups side by side, and
// gradients are summed over both axes at once where that is faster. It is a plan of one stage with
// a replica per device of a virtual device; the search is over as many devices as there are virtual
// ones. Throws UserError if what is wanted does not divide the machines or the batch.
EngineResult plan_virtual(const PlanOptions& options, const Cluster& cluster,
                          const GraphOf& graph_of, const VirtualDevices& wanted);

// The program of a plan, as one part: parameters gathered ahead of their use, gradients reduced while
// the backward pass goes on. nullptr: that is not worth it beside `known`, or does not fit.
// REQUIRES: options.step.
std::unique_ptr<Plan> overlapped(const PlanOptions& options, const Plan& plan, Seconds known);

// Plans of the grid that are found at once, without searching for programs; where they do not fit,
// one program that divides all parameters.
EngineResult plan_quickly(const PlanOptions& options, const Cluster& cluster,
                          const GraphOf& graph_of);

// The fastest of what users would run otherwise (DDP, FSDP, Megatron, each with the best of its
// knobs); all of them are in `baselines`.
EngineResult plan_opponents(const PlanOptions& options, const Cluster& cluster,
                            const GraphOf& graph_of);

// The fastest plans that options.target can say, among them its defaults: all devices, as many layers
// in each stage, even batches; what is the best of these is the baseline `default`.
EngineResult plan_target(const PlanOptions& options, const Cluster& cluster,
                         const GraphOf& graph_of);

// Virtual devices of `size` devices of one type, each a part of a machine (a group without groups
// below); empty if some machine cannot be divided so.
std::vector<std::vector<int>> virtual_devices(const Cluster& cluster, int size);

}  // namespace motley::planner
