// Pipeline plans: stages of a micro-batch's graph on disjoint groups of devices, replicated.
//
// The plan's graph is the step of the whole batch. What it is for one micro-batch, so that the
// terms of all add up to it, follows by the theory (shard/micro_batch.h). Of that graph every node
// belongs to a stage (graph/stage.h). A
// replica is one pipeline: for each stage the devices that run it, their shares, and an SPMD
// program over the stage's graph. Replicas take different micro-batches of the global batch,
// replica 0 the first; they need not be alike. Tensor x data x pipeline parallelism is a special
// case, as are stages on unequal devices.
//
// Mostly a device has one stage. Stages of a replica may also share their devices, all of them
// (interleaved, or virtual, stages; Narayanan et al. 2021, section 2.2): such stages form a group,
// and take turns. With G groups in the replica, forward passes go in blocks of G micro-batches: the
// block through the group's first stage, then through its second, and so on; backward passes in the
// same blocks, the last stage first. The group runs `warm_up` forward passes, the same number in
// all its stages, then a backward and a forward pass in turn, then the remaining backward passes.
//
// A stage runs `warm_up` forward passes, then a backward and a forward pass in turn, then the
// remaining backward passes; with `recompute` it keeps of a micro-batch only what came in, and
// runs the forward pass again in front of the backward pass. Layers alone are computed again by
// steps of its program that say `again`. A stage with devices of its own whose
// program has steps that say `later` splits its backward pass: these steps are a pass that follows
// the backward pass of the micro-batch that is `weights_behind` further on, and in the end the
// others (Qi et al. 2023). When a stage is done it reduces its
// gradients: within the stage as its program says, then over replicas and, for tied parameters,
// over stages. Where the plan has a reduction program for the devices of the stage in all replicas,
// ranks and replicas are summed over at once (JointGradients).
//
// Loss and gradients are sums over micro-batches, which are of equal size, and equal those of one
// device at the global batch. Batch normalisation sees one micro-batch at a time, as in any
// pipeline (MicroBatch::by_part); its running averages are those of replica 0.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cluster/cluster.h"
#include "core/pass_kind.h"
#include "cost/cost.h"
#include "graph/stage.h"
#include "net/reduction.h"
#include "shard/micro_batch.h"

namespace motley {

constexpr int64_t kMaxMicroBatches = int64_t{1} << 20;  // of a step

struct StagePlan {
  std::vector<int> devices;    // of the cluster, ascending: the ranks of the stage
  std::vector<double> ratios;  // [rank] shares
  int warm_up = 1;
  int weights_behind = 0;  // micro-batches; of a program with steps that say `later`
  bool recompute = false;
  Program program;  // over the stage's graph, in phases (shard/program.h)
};

// The share of its forward passes that a stage computes again, by what costs floating-point
// operations: all, or some of the model's layers.
double computed_again(const Theory& theory, const StagePlan& stage);

struct ReplicaPlan {
  int micro_batches = 1;
  std::vector<StagePlan> stages;
};

// How the replicas of a stage divide the state of its parameters.
struct Division {
  int level = 0;               // 0, 1 or 2
  std::vector<double> shares;  // [replica]; empty: equal
  friend bool operator==(const Division&, const Division&) = default;
};

// A replica, a stage of it, and a rank among its devices.
struct Seat {
  int replica = 0, stage = 0, rank = 0;
};

struct Pass {
  int stage = 0, micro_batch = 0;
  PassKind kind = PassKind::forward;
  friend bool operator==(const Pass&, const Pass&) = default;
};

class PipelinePlan {
 public:
  std::string schedule;       // where the warm-up counts come from, for people
  int64_t micro_batch = 1;    // samples
  std::vector<int> stage_of;  // [node] of the micro-batch's graph
  std::vector<ReplicaPlan> replicas;
  std::vector<Division> zero;  // [stage]; empty: nothing is divided

  // Derives the step of a micro-batch from that of the batch, or takes it as derived. Throws
  // UserError that starts with `where`.
  void take_parts(const Theory& whole, int64_t batch, const std::string& where);
  void take_parts(std::shared_ptr<const MicroBatch> part) { part_ = std::move(part); }
  // Cuts its graph by stage_of. Throws UserError that starts with `where`.
  void cut(int stages, const std::string& where);
  const MicroBatch& part() const { return *part_; }

  int stages() const { return static_cast<int>(theories_.size()); }
  int micro_batches() const;  // of all replicas
  int level(int stage) const { return zero.empty() ? 0 : zero[stage].level; }
  const Stages& parts() const { return *parts_; }
  const Graph& graph(int stage) const { return parts_->graphs[stage].graph; }
  const Theory& theory(int stage) const { return *theories_[stage]; }
  // The first stage whose graph is the same but for names.
  int like(int stage) const { return like_[stage]; }
  // What a device does, by stage; empty: nothing.
  std::vector<Seat> seats(int device) const;

 private:
  std::shared_ptr<const MicroBatch> part_;
  std::unique_ptr<Stages> parts_;  // stable addresses: theories refer to graphs
  std::vector<std::unique_ptr<Theory>> theories_;
  std::vector<int> like_;  // [stage]
};

// The devices of a stage in all replicas, ascending.
std::vector<int> devices_of(const PipelinePlan& plan, int stage);

// Gradients that may be summed over the ranks and the replicas of a stage at once: in every replica
// they come out whole by an all-reduce in the reduction, with views alone behind it. It can be left
// out, since views are linear, and their terms summed over all devices of the stage (which a
// reduction program of both axes does in three steps: inside a machine, across, inside).
struct JointGradients {
  std::vector<bool> gradient;           // [parameter of the stage]; none: there is one replica
  std::vector<std::vector<int>> steps;  // [replica] of its program, the all-reduces left out
  bool any() const;
};
JointGradients joint_gradients(const PipelinePlan& plan, int stage);
// The same where they are: `reductions` has a program for the stage's devices in all replicas,
// which divide nothing.
JointGradients joint_gradients(const PipelinePlan& plan, int stage,
                               const std::vector<ReductionProgram>& reductions, int cluster_size);

// What the replicas of a stage divide: parameters with a gradient whose pieces are alike in all.
struct DividedState {
  std::vector<bool> optimizer, gradient;  // as in ZeroShare
  std::vector<bool> tied;                 // [parameter] of those: other stages hold it too
  std::vector<double> shares;             // [replica] sum 1
  bool any() const;
  ZeroShare kept(int replica) const { return {optimizer, gradient, shares[replica]}; }
};
DividedState divided_state(const PipelinePlan& plan, int stage);
std::vector<DividedState> divided_states(const PipelinePlan& plan);  // [stage]

// The groups of stages that share their devices, by first stage; stages ascending.
std::vector<std::vector<int>> stage_groups(const ReplicaPlan& replica);

// The passes of one of these groups, in the order in which it takes them.
std::vector<Pass> passes_of(const ReplicaPlan& replica, const std::vector<int>& group, int groups);

// When a pass is taken if all last one tick and messages none: [stage][kind][micro-batch].
// Passes that a stage does not have are at INT_MAX. Empty if the groups wait for each other for ever. A pass comes after those it reads from, after
// the one before it in its group, and a backward pass of the last stage after its forward pass.
using Ticks = std::vector<std::vector<std::vector<int>>>;
Ticks ticks_of(const ReplicaPlan& replica);

// Micro-batches that a stage holds at most between the start of their forward and the end of their
// backward pass. Alone on its devices: its warm-up count, as far as there are that many.
int in_flight(const ReplicaPlan& replica, int stage);
// Of a stage that splits its backward pass, those that wait for the pass of gradients of weights
// while another has a pass.
int waiting(const ReplicaPlan& replica, int stage);

// What every worker holds of the whole batch: inputs, and what is computed from them before the
// first micro-batch.
Bytes whole_batch(const PipelinePlan& plan);
// Groups that exchange a stage's gradients: classes of replicas that hold them unlike, as those that
// hold them alike reduce them in buckets first (alike.h), or stages that share a parameter with it,
// whichever are more.
int exchanged_among(const PipelinePlan& plan, int stage);
// The same of stages that share a parameter alone.
int tied_among(const PipelinePlan& plan, int stage);
// [type] What summing a stage's gradients over such groups takes at the end of a step: pieces that
// are cut otherwise elsewhere are put together from those of all groups. `replicas`: there are
// several.
std::vector<Bytes> reduction_workspace(const Theory& theory, const Program& program, int groups,
                                       bool replicas, const Fractions& fractions, int types);

// What a stage of a replica holds with nothing divided, where that is known; null: it is not.
using KnownMemory = std::function<const MemoryCost*(int replica, int stage)>;

// Bytes on the fullest device of every type of the sub-cluster of a group of stages: parameters,
// gradients, optimizer, sums of gradients, and the micro-batches in flight. `divided`: of every
// stage.
std::vector<Bytes> group_memory(const PipelinePlan& plan, int replica,
                                const std::vector<int>& group, const Cluster& sub_cluster,
                                Optimizer optimizer, const std::vector<DividedState>& divided,
                                const KnownMemory& known = {});

// [device] of the whole cluster; 0 for a device without a stage.
std::vector<Bytes> pipeline_memory(const PipelinePlan& plan, const Cluster& cluster,
                                   Optimizer optimizer, const KnownMemory& known = {});

}  // namespace motley
