// From a choice of stages to a plan: which layers on which devices, how many micro-batches to whom.
//
// What the choice leaves open is found here: every stage's SPMD program and shares (spmd/), planned
// once per different (stage, group of devices) and cut down to the memory that the micro-batches in
// flight leave; and the warm-up counts, the best in the event simulator among all schedules of
// pipeline/ under the devices' memory.
#pragma once

#include <atomic>
#include <compare>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "cluster/profile.h"
#include "cost/parts.h"
#include "pipeline/layers.h"
#include "plan/plan.h"
#include "spmd/folded.h"
#include "spmd/order.h"
#include "spmd/synthesis.h"

namespace motley::planner {

// The canonical graph of the model at a number of samples. Throws UserError if there is none.
using GraphOf = std::function<Graph(int64_t samples)>;

constexpr int kAutomaticLayers = -1;

struct Request {
  std::string model;
  int64_t batch = 0;  // global
  Optimizer optimizer = Optimizer::adamw;
  bool memory_limit = true;
  bool recompute = true;               // stages may compute activations again where memory is short
  std::vector<int64_t> micro_batches;  // samples, those that may be tried; empty: all
  // Of pipelines, about; 0: the finest, up to 160; kAutomaticLayers: finer until nothing is gained.
  int layers = 0;
  spmd::Limits limits;
  uint64_t seed = 0;
  std::vector<ProfiledStage> measured;  // layers whose costs on one device are not the model's
  int threads = 0;  // that plan layers and stages; 0: one per core. The plan does not depend on it.
};

struct StageChoice {
  int first = 0, last = 0;  // layers, last included
  std::vector<int> devices;
  bool recompute = false;
  int in_flight = 0;  // micro-batches that it has room for, if it can; at least those of 1F1B
};
struct ReplicaChoice {
  int micro_batches = 1;
  // The same layers in every replica. Stages may share their devices, as many on all.
  std::vector<StageChoice> stages;
};
struct Composition {
  int64_t micro_batch = 1;
  std::vector<ReplicaChoice> replicas;
  // Programs are searched for gradients that are reduced over ranks and replicas at once. Plans of
  // other compositions reduce them so where that is faster.
  bool joint = false;
  // The level at which replicas divide the state of parameters (plan/pipeline.h), in shares by the
  // room that their devices have. With `try_zero` level 1 where that is faster than 0. At level 3
  // the stages' own devices do: programs cut all parameters that can be cut, and hold them and
  // their gradients whole no longer than they use them (spmd/recompute.h, hold_pieces).
  int zero = 0;
  bool try_zero = false;
  // Where memory is short, a stage's program is searched for even if the best one with all
  // parameters cut fits and is not much slower than without a limit.
  bool thorough = true;
};

// Groups of devices as clusters of their own, each kind once: groups that look alike are one.
class DeviceGroups {
 public:
  struct Kind {
    int number = 0;
    Cluster cluster;
    std::vector<ReductionProgram> reductions;  // of all its devices
    OverReplicas replicas;
    CostModel model;
    Kind(int n, Cluster c, OverReplicas r);
  };

  explicit DeviceGroups(const Cluster& cluster) : cluster_(cluster) {}
  const Cluster& whole() const { return cluster_; }
  // REQUIRES: devices ascending. The reference stays valid.
  const Kind& of(const std::vector<int>& devices);
  // The k-th of groups that communicate at the same time, a stage's in all replicas: what they
  // share is divided among them. `joint`, if given, prices gradients as reduced over all of them.
  const Kind& of(const net::Groups& groups, size_t k, const ReductionProgram* joint);

 private:
  const Kind& kind_of(Cluster part, OverReplicas replicas);

  const Cluster& cluster_;
  std::map<std::vector<int>, const Kind*> by_devices_;
  std::map<std::tuple<net::Groups, size_t, bool>, const Kind*> by_groups_;
  std::map<std::string, std::unique_ptr<Kind>> kinds_;  // by text
};

// Numbers the devices of a plan's composition anew: in every room (a set of devices) that stages of
// one size fill, the same in all replicas, along stages, replicas and ranks as P2 places their
// reductions jointly, weighted by the bytes of a step: gradients over replicas, what stages send
// inside, gradients over both at once. Returns whether any device moved. `rooms` are disjoint.
bool place_jointly(const Cluster& cluster, const std::vector<std::vector<int>>& rooms,
                   const Plan& plan, Composition* composition);

// What searches leave to like ones of micro-batches of another size: orders, and for layers where
// to begin, as those on the same group of devices left it, or on any.
struct Experience {
  spmd::OrderMemo orders;
  std::map<std::tuple<int, bool, int>, spmd::WarmStart> on_group;  // window, lean, group
  std::map<std::pair<int, bool>, spmd::WarmStart> on_any;
};

// A micro-batch's graph with its layers, and what was planned of it.
class Workbench {
 public:
  // `groups`: of the cluster; they may serve several benches, and outlive this one, as does
  // `experience` (null: none).
  Workbench(const Request& request, DeviceGroups* groups, Graph graph, int layers,
            Experience* experience = nullptr);

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
  struct Planned {
    bool feasible = false;
    std::string reason;
    Program program;
    std::vector<double> ratios;
  };
  Planned plan_window(const Window& window, const DeviceGroups::Kind& group, int micro_batches,
                      bool lean, spmd::WarmStart* warm = nullptr);

  // The plan, simulated; nothing and the reason if it does not fit.
  std::unique_ptr<Plan> compose(const Composition& composition, const std::string& engine,
                                std::string* reason);

  int planned() const { return planned_; }  // program searches
  // Whether the best program of some stage did not fit into memory.
  bool limited() const { return was_limited_; }

 private:
  // A layer's graph, cut out; no theory: views alone, nothing to do.
  struct Piece {
    std::unique_ptr<Stages> cut;  // unless all layers are cut at once
    std::unique_ptr<Theory> theory;
  };
  const Piece& piece(int layer);
  void find_windows();
  Window window(int first, int end) const;
  std::vector<LayerCost> find_costs(const Window& window, const DeviceGroups::Kind& group,
                                    int micro_batches, bool lean, spmd::WarmStart* warm);
  // Put what was measured in the place of what the model says: of layers on one device, and of all
  // layers of a window on several.
  void measure(const DeviceGroups::Kind& group, std::vector<LayerCost>* costs);
  void measure(const Window& window, const DeviceGroups::Kind& group,
               std::vector<LayerCost>* costs) const;
  // Layers of one kind have the same graph: those of a class, the first and the last by themselves.
  int kind_of(int layer) const;
  // Graphs of one number are the same but for names.
  int number_of(const Graph& graph);

  // `memory_price`: of a like stage, in; of this one, out. `lean`: as of layers. `warm`: where the
  // search begins, in, and ends, out.
  Planned plan(const Theory& theory, const CostModel& model, int micro_batches, bool memory_limit,
               bool lean, double* memory_price, spmd::WarmStart* warm);
  // What replicas divide at a level, and the share of it that one keeps; or level 3.
  struct Divided {
    int level = 0;
    double share = 1;
    auto operator<=>(const Divided&) const = default;
  };
  // A stage on a group, with `in_flight` micro-batches in one part in `laps` of the memory.
  struct StageTask {
    const Theory* theory;
    int number;  // of its graph
    const DeviceGroups::Kind* group;
    int laps, micro_batches, in_flight;
    bool recompute, thorough;
    Divided divided;
    // Whether parameters are cut and gathered, and gradients scattered, in every pass.
    bool pieces() const { return divided.level == 3 && group->cluster.size() > 1; }
  };
  // Of a type of devices: what a program lacks, what other micro-batches take, and what is not
  // there because it is divided.
  struct Room {
    Bytes lack = 0, others = 0, divided = 0;
  };
  std::vector<Room> room_of(const StageTask& task, const Planned& planned) const;
  bool fits(const StageTask& task, const Planned& planned) const;
  // As it runs: with pieces held, if it is to.
  static Planned as_run(const StageTask& task, Planned planned);
  // The best program regardless of memory; of equal graphs and groups once.
  const Planned& unlimited(const StageTask& task, bool lean, spmd::WarmStart* warm);
  // Finds what plan_stage() will ask for first, for all tasks at the same time.
  void plan_unlimited(const std::vector<StageTask>& tasks);
  // The best that fits.
  Planned plan_stage(const StageTask& task);

  void add_reductions(const std::vector<std::vector<const DeviceGroups::Kind*>>& kinds, Plan* plan);
  // The reduction over all devices of a stage with such groups, of tensors of `bytes` in all.
  const ReductionProgram& joint_reduction(const net::Groups& groups, Bytes bytes);

  Request request_;
  DeviceGroups& groups_;
  const Cluster& cluster_;
  Graph graph_;
  pipeline::Layers layers_;
  std::unique_ptr<Stages> cut_;  // into all layers; null: not yet, or some layer is views alone
  bool cannot_cut_ = false;
  std::map<int, Piece> pieces_;             // by kind of layer
  std::vector<Window> windows_;             // empty: not yet known
  std::vector<std::pair<int, int>> seats_;  // [layer] window, the layer of it that stands for it
  std::map<std::tuple<int, int, bool>, std::vector<LayerCost>> layer_costs_;  // group, count, lean
  std::map<std::string, int> numbers_;                                        // of graphs
  std::map<std::tuple<int, int, int, bool>, Planned> unlimited_;  // graph, group, count, lean
  // Graph, group, count, and whether pieces are held.
  std::map<std::tuple<int, int, int, bool>, std::vector<Planned>> limited_;
  std::map<int, double> memory_price_;  // by group
  std::map<net::Groups, ReductionProgram> joint_;
  // And in flight, recompute, thorough, divided.
  std::map<std::tuple<int, int, int, int, int, bool, bool, Divided>, Planned> stages_;
  std::mutex mutex_;  // of the maps above, while stages are planned: threads have groups of
                      // their own, and so entries
  Experience own_experience_;
  Experience& experience_;
  Bytes tied_ = -1;  // not yet known
  std::atomic<int> planned_ = 0;
  std::atomic<bool> was_limited_ = false;
};

// What calibrate and planning know a stage's graph by: 16 digits, equal where graphs are equal but
// for names.
std::string shape_of(const Graph& graph);

// What `motley calibrate --stages` measures at some micro-batch sizes: the layers of a model, as
// the pipeline engine cuts it, each distinct one once, on every device by itself; and on every kind
// of sub-mesh that it may give a stage neighbouring layers, by the program that it would plan.
struct LayerShapes {
  struct Shape {
    std::string shape;
    int64_t micro_batch;
    const Theory* theory;
    std::vector<int> devices = {};  // that run it together; none: each by itself
    int nodes = 1;
    Program program = {};
    std::vector<double> ratios = {};
  };
  LayerShapes(const Request& request, const Cluster& cluster, const GraphOf& graph_of);
  std::vector<Shape> shapes;

 private:
  DeviceGroups groups_;
  std::vector<std::unique_ptr<Workbench>> benches_;
};

// The cluster with device types as fast as request.measured says: the numbers of a type are scaled
// so that the model's layers take it, together, what they were measured to. Types of which no layer
// was measured stay as they are.
Cluster corrected(const Cluster& cluster, const Request& request, const GraphOf& graph_of);

// Seconds of a value of `bytes` from one group of devices to another, each receiver taking all of
// it (`whole`) or its part.
Seconds handover(const Cluster& cluster, const std::vector<int>& from, const std::vector<int>& to,
                 Bytes bytes, bool whole);

}  // namespace motley::planner
