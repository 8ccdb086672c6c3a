// One worker of a pipeline plan, see pipeline_worker.h: its construction and passes
// (pipeline_worker.cc), messages between stages (pipeline_messages.cc), state that replicas divide
// (pipeline_divided.cc), and sums over groups of workers (pipeline_sums.cc).
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/reshard.h"
#include "cost/storage.h"
#include "interpret/dispatch.h"
#include "interpret/interpret.h"
#include "plan/alike.h"
#include "runtime/pipeline_worker.h"

namespace motley {

// Tags of messages; those of transfers are counted up from the last.
enum Tag : int {
  kStageTag = 1,
  kReplicaTag,
  kExchangeTag,
  kWholeTag,
  kJointTag,
  kFirstTransferTag
};

class PipelineWorker final : public Worker {
 public:
  PipelineWorker(const Plan& plan, Communicator& group, const ExecutorOptions& options);

  const std::vector<int>& parameters() const override { return parameters_; }
  const std::vector<int>& buffers() const override { return buffers_; }
  at::Tensor parameter_piece(size_t i, const at::Tensor& whole) const override;
  at::Tensor buffer_piece(size_t i, const at::Tensor& whole) const override {
    return piece(buffer_at_[i], buffer_value(i), whole);
  }
  void set_parameter(size_t i, at::Tensor local) override;
  void set_buffer(size_t i, at::Tensor local) override {
    buffer_at_[i].local->executor->set(buffer_value(i), std::move(local));
  }
  at::Tensor buffer(size_t i) const override {
    return buffer_at_[i].local->executor->get(buffer_value(i));
  }

  Placement input_placement(size_t) const override { return Placement::replicated(); }
  at::Tensor input_piece(size_t, const at::Tensor& whole) const override { return whole; }

  Part parameter_part(size_t i) const override;
  Part buffer_part(size_t i) const override { return part(buffer_at_[i], buffer_value(i)); }

  Result step(int64_t number, const std::vector<at::Tensor>& inputs) override;

  bool counts(size_t i) const override;

  at::Tensor whole_parameter(int parameter, const at::Tensor& local, bool everywhere) override {
    return whole(owners_[parameter], gathered(parameter, local), everywhere);
  }
  at::Tensor whole_buffer(int buffer, const at::Tensor& local, bool everywhere) override {
    return whole(buffer_owners_[buffer], local, everywhere);
  }

  int most_in_flight() const override { return most_in_flight_; }

 private:
  // The first stage that holds a parameter or buffer, and its value there; stage -1: none.
  struct Owner {
    int stage = -1;
    ValueId value;
  };

  // One value on its way between two stages of this replica, as this worker sees it.
  struct Route {
    Route(PipelineWorker& w, const Transfer& t, int k, bool out)
        : transfer(t),
          sends(out),
          peers(w.stage(w.replica_, sends ? t.to : t.from).devices),
          resharding(w.sent_layout(t), w.taken_layout(t)),
          tag(kFirstTransferTag + k * w.replica().micro_batches) {}
    Transfer transfer;
    bool sends;
    std::vector<int> peers;  // devices of the other stage
    Resharding resharding;
    int tag;  // of micro-batch 0
  };
  // A stage of this worker.
  struct Local {
    explicit Local(int s) : stage(s) {}
    int stage = 0;
    std::optional<Executor> executor;
    std::vector<Input> inputs;  // of the model, not of other stages
    std::vector<Route> routes;
    JointGradients joint;
    DividedState divided;
    // [parameter of the stage] This worker's piece of a divided one, which the executor reads; what
    // the passes of a step have reduced of every gradient.
    std::vector<at::Tensor> whole, sums;
  };
  // Where a parameter or buffer of the plan is.
  struct Place {
    int of_plan = 0;
    Local* local = nullptr;
    size_t index = 0;  // in the stage's graph
  };
  // A value that is coming in.
  struct Incoming {
    const Route* route = nullptr;
    at::Tensor flat;                                // this rank's piece
    std::vector<std::pair<int, at::Tensor>> parts;  // by sender
    std::vector<std::unique_ptr<Message>> messages;
  };

  const StagePlan& stage(int r, int s) const { return pipeline_.replicas[r].stages[s]; }
  std::vector<ReductionProgram> programs_of(const std::vector<int>& devices) const {
    return programs_for(plan_.reductions, devices, plan_.cluster.size());
  }
  bool working() const { return !locals_.empty(); }
  const ReplicaPlan& replica() const { return pipeline_.replicas[replica_]; }
  const Graph& graph(const Local& local) const { return pipeline_.graph(local.stage); }
  ValueId parameter_value(size_t i) const {
    return graph(*parameter_at_[i].local).parameters[parameter_at_[i].index].value;
  }
  ValueId buffer_value(size_t i) const {
    return graph(*buffer_at_[i].local).buffers[buffer_at_[i].index].value;
  }
  at::TensorOptions options_of(const TensorSpec& spec) const {
    return at::TensorOptions(device_).dtype(to_torch(spec.dtype));
  }
  static at::Tensor piece(const Place& place, ValueId value, const at::Tensor& whole) {
    const Executor& executor = *place.local->executor;
    return executor.piece(value, executor.stored(value), whole);
  }
  Part part(const Place& place, ValueId source) const {
    const int s = place.local->stage, group = replica_ * pipeline_.stages() + s;
    return part_of(stored_layout(replica_, s, source), rank_, group);
  }

  Layout sent_layout(const Transfer& t) const;
  Layout taken_layout(const Transfer& t) const { return stored_layout(replica_, t.to, t.taken); }
  Layout stored_layout(int r, int s, ValueId source) const;

  void find_owners();

  Local& of(int s);

  // ---- state that replicas divide

  static bool divides(const Local& local, size_t i) {
    return !local.divided.optimizer.empty() && local.divided.optimizer[i];
  }
  static bool divides(const Place& place) { return divides(*place.local, place.index); }
  static bool in_every_pass(const Local& local) { return !local.divided.gradient.empty(); }

  // [replica] Elements of a piece of n, in order.
  std::vector<int64_t> parts_of(const Local& local, int64_t n) const {
    return divide(n, local.divided.shares);
  }
  // [replica] The parts of a piece, flat.
  std::vector<at::Tensor> cut_in_parts(const Local& local, const at::Tensor& piece) const {
    return piece.reshape({-1}).split_with_sizes(parts_of(local, piece.numel()));
  }
  at::Tensor own_part(const Local& local, const at::Tensor& piece) const {
    return cut_in_parts(local, piece)[replica_];
  }
  // This rank in all replicas.
  std::vector<int> peers_of(const Local& local) const;

  // Calls visit(first, end) for stretches of `which` whose tensors are of one type and a bucket's
  // bytes together, or one.
  template <typename F>
  static void in_buckets(const std::vector<size_t>& which, const std::vector<at::Tensor>& tensors,
                         F visit) {
    for (size_t i = 0; i < which.size();) {
      size_t end = i;
      Bytes bytes = 0;
      for (; end < which.size(); ++end) {
        const at::Tensor& tensor = tensors[which[end]];
        const auto more = static_cast<Bytes>(tensor.nbytes());
        if (end > i && (bytes + more > kBucketBytes || tensor.dtype() != tensors[which[i]].dtype()))
          break;
        bytes += more;
      }
      visit(i, end);
      i = end;
    }
  }

  // Of the pieces that replicas divide, takes the others' parts.
  void gather_parameters(Local& local);

  // Sums the gradients of `which` parameters over replicas and leaves each its part.
  void scatter(const Local& local, const std::vector<size_t>& which,
               std::vector<at::Tensor>& gradients);

  // Reduces the gradients of a pass, the divided ones over replicas too, and adds them up.
  void sum_pass(Local& local, int64_t number);
  std::vector<at::Tensor> take_sums(Local& local);

  // Tied parameters that replicas divide: the stages' sums are the same bits everywhere, and stay
  // so if every part is summed by its owner in the order of the replicas.
  void scatter_tied(const Local& local, std::vector<at::Tensor>& gradients);

  // This worker's piece of a parameter, or of what is placed as it, from the parts of all replicas.
  at::Tensor gathered(int parameter, const at::Tensor& local);

  // What the waiting takes is not computation.
  void wait(std::vector<std::unique_ptr<Message>>& messages);

  // ---- passes

  std::vector<Incoming> post(const Pass& pass);

  // Waits for what is coming in and makes it the executor's; returns it.
  std::vector<std::pair<ValueId, at::Tensor>> take_in(const Pass& pass,
                                                      std::vector<Incoming>& list);

  // Messages that others take in a pass of theirs.
  struct Outgoing {
    int from = 0, to = 0;  // stages
    int micro_batch = 0;
    bool backward = false;  // made in a backward pass
    std::vector<std::unique_ptr<Message>> messages;
  };

  void send_out(Executor::Flight* flight, const Pass& pass);
  // The pass that makes a value; it may be sent to the other's backward pass all the same.
  bool made_backward(const Transfer& t) const;

  // Waits for what has arrived when a pass is taken. Of what a stage sends forward, its backward
  // pass tells; of what it sends back, a forward pass that came through the other stage after that
  // one's backward pass.
  void arrived(const Pass& pass);

  // What a micro-batch gets of an input, and the input's number.
  std::pair<PartCut, size_t> part_cut(const std::string& input) const;

  // Adds to a batch what follows from all of it.
  void compute_before(TensorMap* batch) const;

  void set_inputs(const TensorMap& batch, Local& local, int m);

  void run_passes(int64_t number, const TensorMap& batch, at::Tensor& loss);

  // ---- gradients

  void reduce_over_replicas(const Local& local, std::vector<at::Tensor>& gradients);

  // Sums the gradients of `which` parameters over devices that hold equal pieces.
  void reduce_over(const std::vector<int>& ranks, int tag, const std::vector<size_t>& which,
                   std::vector<at::Tensor>& gradients);

  void reduce_tied(std::vector<std::vector<at::Tensor>>& gradients);

  // The type in which the gradient of a stage's i-th parameter is summed over groups.
  at::TensorOptions gradient_type(const Local& local, size_t i) const;

  // A group that has a term of a sum, or takes it, or both.
  struct Summand {
    Layout layout;
    bool has = true;
    const std::vector<int>* from = nullptr;     // its devices, of which its term is taken
    std::vector<const std::vector<int>*> to{};  // those that take what this worker has
  };

  // The layout in which a group takes what the others have: its own if that is cut; else even
  // pieces, which it gathers itself, so that a slow link carries everything once.
  static Layout taken_in(const std::vector<Summand>& groups, int group);

  // The sum of what several groups hold of the gradient of the i-th parameter of stage `home`, in
  // the pieces of `mine`; terms in the order of the groups. REQUIRES: this worker is of `mine`.
  at::Tensor exchange(const Local& home, size_t i, const std::vector<Summand>& groups, int mine,
                      at::Tensor local);

  // Sums gradients whose pieces are not alike in all replicas: those that hold one alike add it up
  // first, then each takes the sums of the other classes (plan/alike.h).
  void sum_unlike(const Local& local, const std::vector<size_t>& which,
                  std::vector<at::Tensor>& gradients);
  // [replica] Where the pieces of a stage's i-th parameter lie.
  std::vector<Layout> layouts_of(const Local& local, size_t i) const;

  // All of something of which every device of this worker's stages has a piece.
  at::Tensor gather(const Layout& pieces, const Layout& whole, const at::Tensor& mine);

  at::Tensor whole(const Owner& owner, const at::Tensor& local, bool everywhere);

  const Plan& plan_;
  const PipelinePlan& pipeline_;
  Communicator& group_;
  at::Device device_;
  std::map<int, std::vector<Shares>> shares_;  // [replica][stage]
  std::vector<Owner> owners_, buffer_owners_;  // [parameter], [buffer] of the plan's graph
  std::function<void(bool compute)> before_;   // as in ExecutorOptions
  std::function<void(bool compute, const void* instruction)> after_;
  int replica_ = 0, rank_ = 0;  // rank: among the devices of its stages
  bool needs_before_ = false;   // some stage reads what follows from the whole batch
  int64_t first_ = 0;           // micro-batches of earlier replicas
  std::unique_ptr<Communicator> stage_messages_, stage_group_;
  std::vector<std::unique_ptr<Local>> locals_;  // by stage
  std::vector<int> parameters_, buffers_;
  std::vector<Place> parameter_at_, buffer_at_;
  std::vector<Pass> order_;
  // [stage][micro-batch] the first forward pass that the stage takes after a backward pass.
  std::vector<std::vector<int>> taken_before_;
  std::list<Outgoing> going_;
  std::map<int, at::Tensor> kept_;  // by tag: from one stage of this worker to another
  int most_in_flight_ = 0;
};

}  // namespace motley
