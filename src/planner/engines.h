// The engines that plan stages and replicas: HAPT's stage-mesh search, AMP's grid, and HAP's
// virtual devices, each from a model to a plan. Both are composed of rooms that do not know each
// other: layers and their costs come from layered_graph.h, plans from compose.h, and they are
// ranked by the event simulator.
#pragma once

#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "grid/strategy.h"
#include "plan/plan.h"
#include "planner/request.h"

namespace motley::planner {

// What an engine found, best first.
struct EngineResult {
  std::string engine;
  std::vector<std::unique_ptr<Plan>> plans;
  std::vector<std::string> notes;  // [plan] "3 stages, micro-batches of 4", the grid's strategy
  std::string reason;              // why there is no plan, or why the search stopped
  // The model cannot be taken in micro-batches (shard/micro_batch.h), which `reason` then says.
  bool refused = false;
  Seconds lower_bound = 0;  // of the engine's own objective; 0: none
  double search_s = 0;
  int64_t planned = 0;  // program searches
};

// Puts the plans of a result in the order of their predicted times.
void rank(EngineResult* result);

// The search of pipeline/search.h over micro-batch sizes, numbers of pipelines, orders of
// sub-clusters, stages and sub-meshes, on all sub-clusters or without some. The time of a stage on
// a mesh is the sum over its layers, each at its share of the program that the SPMD engine finds
// for it and its neighbours on that mesh; the best plans found are then planned stage by stage.
EngineResult plan_pipeline(const Request& request, const Cluster& cluster, const GraphOf& graph_of);

// The devices of every kind of sub-mesh that the pipeline engine may give a stage: the first ones
// of each sub-cluster of equal devices in equal nodes.
std::vector<std::vector<int>> stage_meshes(const Cluster& cluster);

// The search of grid/search.h on layers read off the graph, with what is fixed.
EngineResult plan_grid(const Request& request, const Cluster& cluster, const GraphOf& graph_of,
                       const grid::Fixed& fixed);

// Machines, or equal parts of them, as single devices (HAP section 3), with data parallelism
// inside: the i-th devices of all of them run one SPMD program on an equal part of the batch, so
// that what the program sends crosses between machines in as many groups side by side, and
// gradients are summed over both axes at once where that is faster. It is a plan of one stage with
// a replica per device of a virtual device; the search is over as many devices as there are virtual
// ones.
struct VirtualDevices {
  bool automatic = true;  // nothing where machines are joined as well as their devices
  int size = 0;           // devices of a virtual one; 0: all that divide the machines are tried
  bool machine = false;   // the largest such size
  // The step of another engine's plan: nothing is fitted into memory that would take longer.
  Seconds known = std::numeric_limits<double>::infinity();
};
// Throws UserError if what is wanted does not divide the machines or the batch.
EngineResult plan_virtual(const Request& request, const Cluster& cluster, const GraphOf& graph_of,
                          const VirtualDevices& wanted);

// Virtual devices of `size` devices of one type, each a part of a machine (a group without groups
// below); empty if some machine cannot be divided so.
std::vector<std::vector<int>> virtual_devices(const Cluster& cluster, int size);

}  // namespace motley::planner
