// What a stage of the pipeline search costs (pipeline/search.h): its layers' costs on the devices
// of a slice, summed. Layers are planned for slices as they are asked for.
#pragma once

#include <array>
#include <map>
#include <tuple>
#include <vector>

#include "net/topology.h"
#include "planner/layered_graph.h"
#include "planner/sub_clusters.h"

namespace motley::planner {

class StageCosts {
 public:
  // Of pipelines on all devices of `use`, with micro-batches of the graph. All arguments
  // outlive this.
  StageCosts(const PlanOptions& request, DeviceGroups* groups, const net::Topology& topology,
             LayeredGraph* graph, std::vector<const Part*> use, int64_t micro_batch);

  // Layers of larger micro-batches, of so many samples, whose costs on slices where they are known
  // bound those here: in a smaller micro-batch a sample takes no less. The graph outlives this.
  void take_bounds(LayeredGraph* larger, int64_t samples);

  // Clusters, layers and costs of a problem that refers to this. The costs are bounds of those that
  // stages have: on slices that are not planned as if their devices divided all work without any
  // loss, and memory had no end. With `bound` on all slices.
  pipeline::SearchProblem problem(bool bound);

  // Finds the slices that stages of so many pipelines may lie on; with `all` plans all layers on
  // every one, without that plan() does where they are needed.
  void find_slices(const std::vector<int>& pipelines, bool all);
  // Plans all layers on the slices of these plans, and on some others of several types. False: the
  // former were planned before.
  bool plan(const std::vector<pipeline::PipelinePlan>& plans);

 private:
  // A slice with the costs of all layers on it: sums over the layers in front of each. Bytes as of
  // devices with the least memory of the sub-cluster.
  struct Slice {
    bool lean = false;
    double devices = 1;
    Bytes memory = 0;
    std::vector<int> infeasible = {0};
    std::vector<Seconds> forward = {0}, backward = {0}, once = {0};
    std::vector<Bytes> state = {0}, held = {0}, late = {0}, own = {0};
    std::vector<Bytes> workspace, held_inputs;    // [layer], no sums
    Seconds reduce_latency = 0, reduce_byte = 0;  // of a gradient, over the pipelines
  };
  const Part& part(int cluster) const { return *use_[cluster]; }
  LayeredGraph::OnGroup on(const pipeline::Mesh& mesh, int pipelines);
  // One device of each type on a slice, and how many it has of the type.
  std::vector<std::pair<const DeviceGroups::Kind*, int>> types_of(const pipeline::Mesh& mesh);
  Slice slice(const pipeline::Mesh& mesh, int pipelines);
  LayeredGraph::LayerCost bound(const pipeline::Mesh& mesh, int layer,
                                const LayeredGraph::OnGroup& group);
  // What a stage that computes again needs beside its state, in: without that; and what a micro-batch
  // in flight holds. Block by block, or all of it at once.
  void compute_again(const Slice& on, int first, int last, Bytes* workspace,
                     Bytes* activation) const;
  pipeline::StageProfile profile(const pipeline::StageQuery& query);
  Seconds crossing(int from, int to, Bytes bytes, int pipelines) const;

  const PlanOptions& request_;
  DeviceGroups& groups_;
  const net::Topology& topology_;
  LayeredGraph& graph_;
  std::vector<const Part*> use_;
  int64_t micro_batch_;
  std::vector<int> block_;  // [layer] of the model; -1: of none
  int devices_ = 0;         // of all parts
  // How often the program runs in a step, about, which only says which one is best.
  int runs_;
  bool bound_ = false;
  double travels_ =
      1;  // bytes of gradients, as they are summed over the pipelines, per byte of parameters
  LayeredGraph* larger_ = nullptr;  // null: none
  int64_t larger_samples_ = 0;
  std::vector<LayeredGraph::OnGroup> unequal_;                     // slices of several types
  std::map<std::array<int, 5>, Slice> slices_;                     // by mesh and pipelines
  std::map<std::tuple<int, int, Bytes, int>, Seconds> crossings_;  // from, to, bytes, pipelines
};

}  // namespace motley::planner
