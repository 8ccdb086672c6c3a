// A micro-batch's graph with its layers, and what these cost as parts of stages.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cost/parts.h"
#include "graph/stage.h"
#include "pipeline/layers.h"
#include "planner/groups.h"
#include "planner/options.h"
#include "planner/program_search.h"

namespace motley::planner {

class LayeredGraph {
 public:
  // `groups`: of the cluster; they may serve several graphs, and outlive this one, as does
  // `cache` (null: none).
  LayeredGraph(const PlanOptions& request, DeviceGroups* groups, std::shared_ptr<const Graph> graph,
               pipeline::Layers layers, SearchCache* cache = nullptr);

  const Graph& graph() const { return graph_; }
  const pipeline::Layers& layers() const { return layers_; }
  int size() const { return static_cast<int>(layers_.layers.size()); }

  // Bytes of parameters that both halves of the model read.
  Bytes tied();

  // The stage of every node if layers are cut in front of `cuts` (ascending).
  std::vector<int> stages_of(const std::vector<int>& cuts) const;

  // Of a layer's own graph; null: views alone, nothing to do.
  const Theory* layer_theory(int layer) { return piece(layer).theory.get(); }
  // The distinct layers that compute anything, by their theories.
  std::vector<const Theory*> distinct_layers();

  // A layer as part of a stage on a group of devices: what it costs (cost/parts.h) in the program
  // that is best for it and its neighbours. So layers are consistent: what one hands to the next in
  // another placement than it takes is paid for, which no layer by itself would pay.
  struct LayerCost : PartCost {
    bool feasible = false;
  };
  // Layers of one class cost the same on every group.
  int cost_class(int layer);
  // `lean`: parameters and their state are cut wherever they can be.
  const LayerCost& layer_cost(int layer, const DeviceGroups::Kind& group, int micro_batches,
                              bool lean);
  // Plans all layers on groups, so that layer_cost() knows them; on several threads.
  struct OnGroup {
    const DeviceGroups::Kind* group;
    bool lean = false;
  };
  void plan_layers(const std::vector<OnGroup>& wanted, int micro_batches);
  bool knows(const OnGroup& on, int micro_batches) const {
    return layer_costs_.count({on.group->number, micro_batches, on.lean}) > 0;
  }

  // Neighbouring layers that are planned together; a few stretches stand for the whole model.
  struct Window {
    int first = 0, end = 0;
    std::unique_ptr<StageGraph> cut;  // unless it is the whole model
    std::unique_ptr<Theory> theory;
    std::vector<int> part_of;  // [node] layer - first, or -1
    std::string shape;         // shape_of() its graph, where something was measured
  };
  const std::vector<Window>& windows();
  // The program of such layers, whatever memory it takes. `warm`: where its search begins, in, and
  // ends, out.
  Planned plan_window(const Window& window, const DeviceGroups::Kind& group, int micro_batches,
                      bool lean, solver::WarmStart* warm = nullptr);

  // Of searches from now on.
  void set_deadline(const Deadline& deadline) { request_.limits.deadline = deadline; }

 protected:
  const PlanOptions& request() const { return request_; }
  DeviceGroups& groups() { return groups_; }
  ProgramSearch& search() { return search_; }
  const ProgramSearch& search() const { return search_; }

 private:
  // A layer's graph, cut out; no theory: views alone, nothing to do.
  struct Piece {
    std::unique_ptr<Stages> cut;  // unless all layers are cut at once
    std::unique_ptr<Theory> theory;
  };
  const Piece& piece(int layer);
  // Layers of one kind have the same graph: those of a class, the first and the last by themselves.
  int kind_of(int layer) const;
  void find_windows();
  Window window(int first, int end) const;
  std::vector<LayerCost> find_costs(const Window& window, const DeviceGroups::Kind& group,
                                    int micro_batches, bool lean, solver::WarmStart* warm);
  // Put what was measured in the place of what the model says: of layers on one device, and of all
  // layers of a window on several.
  void measure(const DeviceGroups::Kind& group, std::vector<LayerCost>* costs);
  void measure(const Window& window, const DeviceGroups::Kind& group,
               std::vector<LayerCost>* costs) const;

  PlanOptions request_;
  DeviceGroups& groups_;
  ProgramSearch search_;
  const std::shared_ptr<const Graph> shared_;
  const Graph& graph_;
  const pipeline::Layers layers_;
  std::unique_ptr<Stages> cut_;  // into all layers; null: not yet, or some layer is views alone
  bool cannot_cut_ = false;
  std::map<int, Piece> pieces_;             // by kind of layer
  std::vector<Window> windows_;             // empty: not yet known
  std::vector<std::pair<int, int>> seats_;  // [layer] window, the layer of it that stands for it
  std::map<std::tuple<int, int, bool>, std::vector<LayerCost>> layer_costs_;  // group, count, lean
  Bytes tied_ = -1;                                                           // not yet known
};

}  // namespace motley::planner
