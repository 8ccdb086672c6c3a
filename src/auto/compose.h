// From a choice of stages to a plan: which layers on which devices, how many micro-batches to whom.
//
// What the choice leaves open is found here: every stage's SPMD program and shares (spmd/), planned
// once per different (stage, group of devices) and cut down to the memory that the micro-batches in
// flight leave; and the warm-up counts, the best in the event simulator among all schedules of
// pipeline/ under the devices' memory.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "pipeline/layers.h"
#include "plan/plan.h"
#include "spmd/synthesis.h"

namespace motley::planner {

// The canonical graph of the model at a number of samples.
using GraphOf = std::function<Graph(int64_t samples)>;

struct Request {
  std::string model;
  int64_t batch = 0;  // global
  Optimizer optimizer = Optimizer::adamw;
  bool memory_limit = true;
  spmd::Limits limits;
  uint64_t seed = 0;
};

struct StageChoice {
  int first = 0, last = 0;  // layers, last included
  std::vector<int> devices;
  bool recompute = false;
};
struct ReplicaChoice {
  int micro_batches = 1;
  std::vector<StageChoice> stages;  // the same layers in every replica
};
struct Composition {
  int64_t micro_batch = 1;
  std::vector<ReplicaChoice> replicas;
};

// A micro-batch's graph with its layers, and what was planned of it.
class Workbench {
 public:
  Workbench(const Request& request, const Cluster& cluster, Graph graph, int layers);

  const Graph& graph() const { return graph_; }
  const pipeline::Layers& layers() const { return layers_; }
  int size() const { return static_cast<int>(layers_.layers.size()); }

  // The stage of every node if layers are cut in front of `cuts` (ascending).
  std::vector<int> stages_of(const std::vector<int>& cuts) const;

  // A layer by itself on a group of devices.
  struct LayerCost {
    bool feasible = false;
    PhaseSeconds seconds;
    Bytes state = 0, held = 0, held_inputs = 0, workspace = 0;  // on the fullest device
  };
  // `lean`: parameters and their state are cut wherever they can be. Equal layers are planned once.
  const LayerCost& layer_cost(int layer, const Cluster& group, int micro_batches, bool lean);

  // The plan, simulated; nothing and the reason if it does not fit.
  std::unique_ptr<Plan> compose(const Composition& composition, const std::string& engine,
                                std::string* reason);

  int planned() const { return planned_; }  // program searches

 private:
  struct Planned {
    bool feasible = false;
    std::string reason;
    Program program;
    std::vector<double> ratios;
  };
  Planned plan_stage(const Theory& theory, const Cluster& group, int micro_batches, int in_flight,
                     bool recompute);

  const std::vector<ReductionProgram>& reductions_inside(const Cluster& group);
  void add_reductions(Plan* plan);

  Request request_;
  Cluster cluster_;
  Graph graph_;
  pipeline::Layers layers_;
  std::map<std::string, LayerCost> layer_costs_;
  std::map<std::string, Planned> stages_;
  std::map<std::string, std::vector<ReductionProgram>> reductions_;  // by part of the cluster
  int planned_ = 0;
};

// Seconds of a value of `bytes` from one group of devices to another, each receiver taking all of
// it (`whole`) or its part.
Seconds handover(const Cluster& cluster, const std::vector<int>& from, const std::vector<int>& to,
                 Bytes bytes, bool whole);

}  // namespace motley::planner
