// The grid's cost model: seconds and bytes of one strategy (AMP section 3.4, made exact where the
// paper approximates).
//
//   layer      host = kernels * launch (twice that backward)
//              device = products / rate + traffic / memory bandwidth + tensor-parallel all-reduces
//              a pass takes (host^k + device^k)^(1/k): device-bound for large micro-batches, the
//              launch floor for small ones, so that time is sub-linear in the micro-batch
//   stage      sum over its layers, each on the device type of its group that is slowest at it
//   pipeline   exact 1F1B recurrence (schedule.h) per replica, transfers as the runtime does them
//   gradients  when a stage's replicas are done its ranks all-reduce (ZeRO: reduce-scatter, and
//              all-gather of weights). Rings of all stages and tensor-parallel ranks run together
//              and share every link they cross: a ring is as fast as the slowest of its links of
//              bandwidth / rings on that link. So rings of one node share its NIC
//   tied       embedding and head in different stages all-reduce the embedding's gradient first
//   optimizer  memory traffic of the state; then the step ends when the last stage has finished
//
// Memory of a stage's rank: parameters times (weights + gradients + optimizer + buffers), divided
// as ZeRO says; activations of the micro-batches in flight, min(M, pp - stage) of them; what the
// runtime keeps. A strategy that does not fit is costed all the same and says by how much.
//
// Cost: ranks * tree depth for the links (once per Mesh), then O(layers + M * pp) per kind of
// replica; replicas that are alike are simulated once.
#pragma once

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "cluster/cluster.h"
#include "grid/calibration.h"
#include "grid/model.h"
#include "grid/ring_uses.h"
#include "grid/schedule.h"
#include "grid/strategy.h"
#include "net/topology.h"

namespace motley::grid {

// What the placement of ranks on devices fixes, whatever the micro-batch and the layers.
struct Mesh {
  struct Ring {
    int size = 1;
    double seconds_per_byte = 0;  // of the whole buffer, all-reduced
    Seconds latency = 0;          // of one all-reduce
  };
  int pp = 1, dp = 1, tp = 1, cp = 1;
  std::vector<std::vector<int>> mixes;  // device types of a group, ascending; each mix once
  std::vector<int> mix;                 // [stage * dp + replica] which of them the group is
  std::vector<Bytes> memory;            // [stage] least among its devices
  std::vector<Bytes> mean_memory;  // [stage] mean over replicas of the least among their devices
  std::vector<Ring> tensor;        // [stage * dp + replica] worst of its context ranks
  std::vector<Ring> context;       // [stage * dp + replica]
  std::vector<Ring> data;          // [stage] worst of its tensor ranks, over dp * cp
  Ring tied;                       // between the first and the last stage
  std::vector<double> message_seconds_per_byte;  // [boundary * dp + replica], of all a stage sends
  std::vector<Seconds> message_latency;
  // Boundary pp - 1 leads from the last stage back to the first (interleaved schedules).
  std::vector<int> like;  // [replica] the first of which all the above is the same

  const std::vector<int>& types_of(size_t group) const { return mixes[mix[group]]; }
  // Groups of one kind take the same time for a layer: device types, and seconds per byte of the
  // rings.
  using Kind = std::tuple<int, double, double>;
  Kind kind(size_t group) const {
    return {mix[group], tensor[group].seconds_per_byte, context[group].seconds_per_byte};
  }
};

// What makes up the memory of a stage's rank.
struct MemoryParts {
  Bytes state = 0;        // parameters, gradients, optimizer
  Bytes activations = 0;  // of the micro-batches in flight
  Bytes slack = 0;        // of the allocator
  Bytes transient = 0;    // alive for a while
  Bytes context = 0;      // of the driver and of libraries
  Bytes buffers = 0;      // of NCCL's communicators
  Bytes all() const { return state + activations + slack + transient + context + buffers; }
};

struct Estimate {
  Seconds step = 0;
  Seconds pipeline = 0, tied = 0, gradients = 0, optimizer = 0;  // shares of the step
  std::vector<Bytes> memory;                                     // [stage] of one of its devices
  std::vector<MemoryParts> parts;                                // [stage] what that is made of
  bool fits = true;
  std::string reason;  // which stage, how many bytes short
};

class Estimator {
 public:
  Estimator(const Model& model, const Cluster& cluster, const Calibration& calibration,
            const LayerTimes& times = {});

  const Model& model() const { return model_; }
  const Cluster& cluster() const { return cluster_; }
  const Calibration& calibration() const { return calibration_; }

  // Throws UserError if the strategy does not suit the model or the cluster.
  void check(const Strategy& strategy) const;

  Mesh mesh(const Strategy& strategy) const;
  // The same in two steps: types and memory of the groups, then what the links give.
  Mesh groups(const Strategy& strategy) const;
  void add_links(const Strategy& strategy, Mesh* mesh) const;
  // A ring no group of this many devices can beat: it is as fast as the fastest link.
  Mesh::Ring best_ring(int size) const;
  // The same of a strategy's gradients over dp * cp ranks, wherever its groups lie: where they lie
  // inside nodes and a ring is too large for one, tp rings at least share a node's port.
  double best_data_seconds_per_byte(const Strategy& strategy) const;
  // REQUIRES: check() passes; `mesh` is of a strategy with the same degrees, runtime and devices.
  Estimate estimate(const Strategy& strategy, const Mesh& mesh) const;
  Estimate estimate(const Strategy& strategy) const {
    check(strategy);
    return estimate(strategy, mesh(strategy));
  }

  // Seconds of one micro-batch in one layer on one device type, with recomputation in the backward
  // pass.
  LayerTimes::Time layer_time(int layer, int type, const Strategy& strategy,
                              const Mesh::Ring& tensor, const Mesh::Ring& context) const;
  // [layer] The same of all layers on a group of these types, whose devices wait for one another in
  // each; equal layers are worked out once.
  std::vector<LayerTimes::Time> layer_times(const std::vector<int>& types, const Strategy& strategy,
                                            const Mesh::Ring& tensor,
                                            const Mesh::Ring& context) const;
  // [layer] Forward and backward together, on a group of a mesh.
  std::vector<Seconds> group_times(const Strategy& strategy, const Mesh& mesh, size_t group) const;
  // Bytes a parameter in the reduction of gradients at the end of a step, as of an all-reduce.
  Bytes reduced_at_end(const Strategy& strategy) const;
  // Seconds of the optimizer on so many parameters of a rank, at a rate of memory.
  Seconds update_time(double parameters, const Strategy& strategy, BytesPerSecond memory) const;
  // Host work once a step, of the type with the least.
  Seconds host_step() const;
  // Of the fastest device type.
  BytesPerSecond fastest_memory() const;
  // Of the message that carries a micro-batch over a boundary, one way.
  Seconds message_time(int layer_before, int boundary, int replica, const Strategy& strategy,
                       const Mesh& mesh, bool gradient) const;
  // Elements that one rank holds of layers [first, last).
  double parameters(int first, int last, const Strategy& strategy) const;
  // Bytes that stay for the step, and of one micro-batch in flight.
  Bytes state_bytes(int first, int last, const Strategy& strategy) const;
  Bytes activation_bytes(int first, int last, const Strategy& strategy) const;
  // Extra bytes while one layer of a recomputed stage is alive again.
  Bytes transient_bytes(int first, int last, const Strategy& strategy) const;
  // Of a device's stages, how many are given room for that: motley gives each a like part of the
  // memory.
  static int alive_at_once(const Strategy& strategy) {
    return strategy.runtime == Runtime::motley ? strategy.interleave : 1;
  }
  // How many micro-batches a range holds at most.
  double in_flight(int range, const Strategy& strategy) const;
  // Context and buffers are of the device type of the cluster that has most of them.
  MemoryParts memory_parts(int stage, const Strategy& strategy) const;
  // Bytes of the driver, of libraries and of communicators on a rank.
  Bytes context_bytes(const Strategy& strategy, Bytes* buffers = nullptr) const;
  // What a stage's device may take, on average: where motley's runtime divides state, replicas with
  // more memory take more of it, up to all that is divided of an average stage.
  Bytes memory_limit(int stage, const Strategy& strategy, const Mesh& mesh) const;

  // The step is never shorter, whatever the schedule waits for: for pruning.
  Seconds lower_bound(const Strategy& strategy, const Mesh& mesh) const;

 private:
  // With `bound` the pipeline's finish is bounded from below, not simulated.
  Estimate run(const Strategy& strategy, const Mesh& mesh, bool bound) const;
  // [stage] When the slowest replica has taken its last backward pass. `first`: layer of each
  // range, and the end; `weights`: parameters of each.
  std::vector<Seconds> finish(const Strategy& strategy, const Mesh& mesh, bool bound,
                              const std::vector<int>& first,
                              const std::vector<double>& weights) const;

  // Device seconds of a layer's forward pass on one device, by formula.
  Seconds alone(const Layer& layer, const Rates& rates, double samples) const;

  Model model_;
  Cluster cluster_;
  Calibration calibration_;
  LayerTimes times_;
  net::Topology topology_;
  std::shared_ptr<RingUses> ring_uses_ = std::make_shared<RingUses>();
  std::vector<BytesPerSecond> ring_bandwidth_, message_bandwidth_;  // [link] that is reached
  BytesPerSecond fastest_ring_ = 0;                                 // no ring is faster
  std::vector<Seconds> start_;                // [group] of a collective that crosses its link
  BytesPerSecond expert_bandwidth_ = 0;       // of one rank's part of an all-to-all
  std::vector<Rates> rates_;                  // [type]
  std::vector<int> first_like_;               // [layer] the first that takes as long anywhere
  int smallest_node_ = 1, largest_node_ = 1;  // devices of a leaf group
  bool even_nodes_ = false;                   // all leaf groups have as many
  BytesPerSecond widest_port_ = 0;            // of a leaf group, for collectives
};

}  // namespace motley::grid
