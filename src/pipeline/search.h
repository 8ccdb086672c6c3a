// The inter-operator search of HAPT section 5.2: which layers form a stage, on which sub-mesh.
//
// Layers 0..L-1 are cut into stages of consecutive layers, each on a sub-mesh of one sub-cluster;
// the sub-clusters follow each other in some order, and every device is used. With t_i the seconds
// a stage spends on a micro-batch and c_i those of the links behind it, B micro-batches take
//
//   T = sum over stages of (t_i + cF_i + cB_i) + (B - 1) P + max over stages of reduce_i + tied
//
// (Eq. 13), where P is the least period that launch counts within the stages' memory can reach
// (schedule.h): with ample memory max{t_i, cF_i, cB_i}, the paper's t_max. A stage holds N_i
// micro-batches, mem_p + N_i mem_a <= mem_device (Eq. 24) with the exact N_i instead of Eq. 23; a
// plan whose memory the paper would reject is slower here, not infeasible.
//
// Search. In a fixed order of sub-clusters the devices used so far are one number d, so that a
// state is (first layer k, first device d) of a suffix of the pipeline. For a bound p on the period
//
//   F(k, d; p) = min over stages k..i-1 on devices d..d'-1 with t <= p of
//                t + cF(i) + cB(i) + F(i, d'; p)
//
// and F(0, 0; p) does not increase in p. After solving at p, no plan of a smaller period improves
// on T* unless its period is below (T* - F(0, 0; p)) / (B - 1): the search descends from T*/B by
// such jumps, each at least to the next plan on the frontier, until no plan is left. What keeps a
// solve cheap:
//
//   bands       R(d), the most layers that the devices d.. can take with t <= p, and its mirror
//               image bound k for every d; stage times that grow with the stage make them greedy
//   bounds      a state whose prefix and suffix, solved at a larger p, together exceed the best T
//               never comes back
//   two phases  first memory only rules out single stages; only if the plan found does not reach p
//               under its memory, labels (latency, launch state Z, reduce), Pareto-filtered, are
//               carried, pruned by the first phase's exact completions
//
// Exact for T (search_test.cc: equal to brute force). REQUIRES of the costs: a stage that contains
// another (same mesh) is not faster and needs no less memory.
//
// Orders of many sub-clusters are searched at once: behind which sub-clusters a suffix stands
// matters, not in which order they come, so that states are shared by orders that agree on the set
// of sub-clusters used and on the present one, 2^(n-1) n parts of the tables instead of n! n.
//
// Micro-batch sizes, numbers of data-parallel pipelines, orders of few sub-clusters and sub-mesh
// families are enumerated around it, with one incumbent; each looks for the least period near that
// of the one before. The plans met on the way are then run in the event simulator with every
// schedule of the table and ranked by the makespan.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/deadline.h"
#include "core/units.h"
#include "pipeline/schedule.h"

namespace motley::pipeline {

struct SubCluster {
  std::string name;
  int nodes = 1;
  int devices = 1;   // per node
  Bytes memory = 0;  // of a device; of unequal ones the least, to which profiles scale their bytes
  std::vector<int> kinds = {};  // [device] of unequal ones; empty: all are alike
  int size() const { return nodes * devices; }
};

// A slice of one sub-cluster: part of a node (nodes == 1) or whole nodes.
struct Mesh {
  int cluster = 0;
  int nodes = 1;
  int devices = 1;         // per node
  bool recompute = false;  // the backward pass computes the activations again
  int at = 0;              // of unequal devices: its first one, where such a slice starts first
  int size() const { return nodes * devices; }
  friend bool operator==(const Mesh&, const Mesh&) = default;
};

struct StageQuery {
  int first = 0, last = 0;  // layers, last included
  Mesh mesh;
  int64_t micro_batch = 1;  // samples
  int pipelines = 1;        // that share gradients
};

// What a stage takes on a mesh, per micro-batch; bytes of the fullest device.
struct StageProfile {
  bool feasible = true;
  Seconds forward = 0, backward = 0;
  Bytes state = 0;       // parameters, gradients, optimizer, workspace
  Bytes activation = 0;  // held per micro-batch in flight
  Seconds reduce = 0;    // gradients, over the pipelines, once per step
};

// The caller's intra-operator planner. Called once per distinct stage and mesh.
using StageCost = std::function<StageProfile(const StageQuery&)>;
// Seconds of moving the activations in front of layer `layer` from one sub-cluster to another (or
// within one), and of their gradients back, if all `pipelines` do so at once.
using LinkCost =
    std::function<LinkTime(int layer, int from, int to, int64_t micro_batch, int pipelines)>;

constexpr int kMostSubClusters = 8;

struct SearchProblem {
  int layers = 0;
  // Equal classes, equal layers: stages of equal sequences are planned once. Empty: all differ.
  std::vector<int> layer_class;
  std::vector<SubCluster> clusters;
  StageCost stage_cost;
  LinkCost link_cost;
  // Seconds of reducing the gradient of a parameter that the first and the last layer share, by the
  // sub-clusters of the first and the last stage; null: no such parameter.
  std::function<Seconds(int first, int last, int pipelines)> tied_cost;
  int64_t batch = 1;  // samples of a step
};

// Sub-meshes of an N x M sub-cluster: (1, 2^k) and (1..N, M), which always pack (the paper's); or
// any (1, m) that does not straddle nodes, and whole nodes; or plans of either kind. Of unequal
// devices (1, 2^k) does not straddle nodes either.
enum class Shapes { paper, uneven, both };

struct SearchOptions {
  std::vector<int64_t> micro_batches = {1};  // samples; those that do not divide are passed over
  std::vector<int> pipelines = {1};          // likewise, and of whose shares the kinds differ
  Shapes shapes = Shapes::paper;
  bool recompute = false;  // also try stages that compute activations again
  bool memory_limit = true;
  bool any_order = true;  // of the sub-clusters; else as they are listed
  int joint_orders = 4;   // sub-clusters from which on all orders are searched at once
  int pool = 8;           // plans that are simulated; 0: none
  Deadline deadline;
  Seconds worth = 1e30;  // plans with a greater T are not looked for
};

struct Stage {
  int first = 0, last = 0;  // layers
  Mesh mesh;
  StageProfile profile;
};

struct PipelinePlan {
  std::vector<Stage> stages;
  int64_t micro_batch = 1;
  int micro_batches = 1;
  int pipelines = 1;
  Pipeline pipeline;      // times, in-flight limits and epilogues of the stages
  Seconds objective = 0;  // T
  Seconds period = 0;     // P
  std::vector<int> counts;
  // Of the fastest schedule in the simulator; empty if not simulated.
  std::string schedule;
  Seconds makespan = 0;
};

struct SearchResult {
  bool feasible = false;
  std::string reason;              // why no plan, or why the search stopped
  PipelinePlan best;               // by makespan if simulated, else by objective
  std::vector<PipelinePlan> pool;  // by objective
  Seconds objective = 0;           // least T found
  Seconds lower_bound = 0;         // of T; equal to `objective` unless time ran out
  int64_t planned = 0;             // calls of stage_cost
  int64_t solves = 0, label_solves = 0, labels = 0;
  int configurations = 0;  // (micro-batch, pipelines, shapes, orders at once)
  double search_s = 0, cost_s = 0, simulate_s = 0;
};

// Throws UserError if the problem is malformed.
SearchResult search(const SearchProblem& problem, const SearchOptions& options);

// T, P and counts of given stages: what `search` minimises.
PipelinePlan evaluate(const SearchProblem& problem, const std::vector<Stage>& stages,
                      int64_t micro_batch, int micro_batches, int pipelines, bool memory_limit);

// Sub-meshes and where they may start, the space that `search` covers: calls visit(mesh, d') for
// every mesh that may start at device d of a sub-cluster, d' being the device behind it.
void for_each_mesh(const SubCluster& cluster, int index, Shapes shapes, int d,
                   const std::function<void(const Mesh&, int)>& visit);

// HAPT Eq. 25: 1 - idle share of the devices, weighted by their speed. REQUIRES: speed[cluster].
double load_balance(const PipelinePlan& plan, const std::vector<double>& speed);

}  // namespace motley::pipeline
