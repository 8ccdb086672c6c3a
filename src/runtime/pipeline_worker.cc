#include "runtime/pipeline_worker.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <deque>
#include <iterator>
#include <list>
#include <map>
#include <numeric>
#include <optional>

#include "comm/reducing.h"
#include "comm/reshard.h"
#include "comm/subgroup.h"
#include "core/error.h"
#include "cost/storage.h"
#include "interpret/dispatch.h"
#include "interpret/interpret.h"

namespace motley {

namespace {

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
  PipelineWorker(const Plan& plan, Communicator& group, const ExecutorOptions& options)
      : plan_(plan),
        pipeline_(*plan.pipeline),
        group_(group),
        device_(options.device),
        before_(options.before),
        after_(options.after) {
    for (size_t r = 0; r < pipeline_.replicas.size(); ++r)
      for (const StagePlan& s : pipeline_.replicas[r].stages) shares_[r].emplace_back(s.ratios);
    find_owners();
    const std::vector<Seat> seats = pipeline_.seats(group.rank());
    if (seats.empty()) return;
    replica_ = seats[0].replica;
    rank_ = seats[0].rank;
    for (int r = 0; r < replica_; ++r) first_ += pipeline_.replicas[r].micro_batches;
    const std::vector<int>& devices = stage(replica_, seats[0].stage).devices;
    stage_messages_ = subgroup(group, devices, kStageTag);
    stage_group_ = reducing(*stage_messages_, programs_of(devices));
    for (const Seat& seat : seats) {
      locals_.push_back(std::make_unique<Local>(seat.stage));
      Local& local = *locals_.back();
      ExecutorOptions execution = options;
      const StageGraph& part = pipeline_.parts().graphs[seat.stage];
      const MicroBatch& micro = pipeline_.part();
      for (NodeId id : part.node_of) {  // of the micro-batch's graph
        const NodeId whole = id.valid() ? micro.node_of[id.index] : NodeId();
        execution.random_stream.push_back(whole.index);
        execution.random_part.push_back(id.valid() ? micro.random[id.index] : PartCut());
      }
      execution.parts = micro.parts;
      for (int b : pipeline_.parts().buffer_of[seat.stage])
        execution.updated_by_part.push_back(micro.updated_by_part[b]);
      local.joint = joint_gradients(pipeline_, seat.stage, plan.reductions, plan.cluster.size());
      local.divided = divided_state(pipeline_, seat.stage);
      local.whole.resize(part.graph.parameters.size());
      local.sums.resize(part.graph.parameters.size());
      execution.left_out = local.joint.steps[replica_];
      local.executor.emplace(pipeline_.theory(seat.stage), stage(replica_, seat.stage).program,
                             shares_[replica_][seat.stage], *stage_group_, execution);
      const auto& p = pipeline_.parts().parameter_of[seat.stage];
      for (size_t i = 0; i < p.size(); ++i) parameter_at_.push_back({p[i], &local, i});
      const auto& b = pipeline_.parts().buffer_of[seat.stage];
      for (size_t i = 0; i < b.size(); ++i) buffer_at_.push_back({b[i], &local, i});
      for (const Input& i : part.graph.inputs)
        if (is_source(micro.graph.node(micro.graph.value(part.value_of[i.value.index]).producer))) {
          local.inputs.push_back(i);
          needs_before_ = needs_before_ || part_cut(i.name).second >= plan.graph->inputs.size();
        }
      const auto& transfers = pipeline_.parts().transfers;
      for (size_t k = 0; k < transfers.size(); ++k) {
        if (transfers[k].from == seat.stage)
          local.routes.emplace_back(*this, transfers[k], static_cast<int>(k), true);
        if (transfers[k].to == seat.stage)
          local.routes.emplace_back(*this, transfers[k], static_cast<int>(k), false);
      }
    }
    // Stages of one worker share no parameter (plan.cc); buffers may be there twice.
    const auto by_index = [](const Place& a, const Place& b) { return a.of_plan < b.of_plan; };
    std::stable_sort(parameter_at_.begin(), parameter_at_.end(), by_index);
    std::stable_sort(buffer_at_.begin(), buffer_at_.end(), by_index);
    for (const Place& place : parameter_at_) parameters_.push_back(place.of_plan);
    for (const Place& place : buffer_at_) buffers_.push_back(place.of_plan);
    const auto groups = stage_groups(replica());
    taken_before_.resize(pipeline_.stages());
    for (const auto& stages : groups) {
      const std::vector<Pass> order = passes_of(replica(), stages, static_cast<int>(groups.size()));
      if (stages[0] == seats[0].stage) order_ = order;
      // Micro-batches, of which backward passes come before the next forward pass.
      std::vector<std::vector<int>> waiting(pipeline_.stages());
      for (int s : stages)
        taken_before_[s].resize(replica().micro_batches, replica().micro_batches);
      for (const Pass& pass : order) {
        if (pass.backward) {
          waiting[pass.stage].push_back(pass.micro_batch);
          continue;
        }
        for (int m : waiting[pass.stage]) taken_before_[pass.stage][m] = pass.micro_batch;
        waiting[pass.stage].clear();
      }
    }
  }

  const std::vector<int>& parameters() const override { return parameters_; }
  const std::vector<int>& buffers() const override { return buffers_; }
  at::Tensor parameter_piece(size_t i, const at::Tensor& whole) const override {
    const Place& place = parameter_at_[i];
    const at::Tensor local = piece(place, parameter_value(i), whole);
    return divides(place) ? own_part(*place.local, local) : local;
  }
  at::Tensor buffer_piece(size_t i, const at::Tensor& whole) const override {
    return piece(buffer_at_[i], buffer_value(i), whole);
  }
  void set_parameter(size_t i, at::Tensor local) override {
    const Place& place = parameter_at_[i];
    Executor& executor = *place.local->executor;
    if (!divides(place)) {
      executor.set(parameter_value(i), local.detach());
      return;
    }
    // The part lives on in the piece.
    at::NoGradGuard no_grad;
    at::Tensor& whole = place.local->whole[place.index];
    if (!whole.defined()) {
      const ValueId v = parameter_value(i);
      whole = at::zeros(executor.local_shape(v, executor.stored(v)), local.options());
      executor.set(v, whole);
    }
    at::Tensor part = own_part(*place.local, whole);
    part.copy_(local);
    local.set_data(part);
  }
  void set_buffer(size_t i, at::Tensor local) override {
    buffer_at_[i].local->executor->set(buffer_value(i), std::move(local));
  }
  at::Tensor buffer(size_t i) const override {
    return buffer_at_[i].local->executor->get(buffer_value(i));
  }

  Placement input_placement(size_t) const override { return Placement::replicated(); }
  at::Tensor input_piece(size_t, const at::Tensor& whole) const override { return whole; }

  Part parameter_part(size_t i) const override {
    const Place& place = parameter_at_[i];
    Part result = part(place, parameter_value(i));
    if (!divides(place)) return result;
    const int replicas = static_cast<int>(pipeline_.replicas.size());
    const std::vector<int64_t> parts = parts_of(*place.local, result.count);
    result.group = replicas * pipeline_.stages() + place.local->stage;
    result.first = std::accumulate(parts.begin(), parts.begin() + replica_, int64_t{0});
    result.count = parts[replica_];
    return result;
  }
  Part buffer_part(size_t i) const override { return part(buffer_at_[i], buffer_value(i)); }

  Result step(int64_t number, const std::vector<at::Tensor>& inputs) override {
    at::NoGradGuard no_grad;
    MOTLEY_CHECK(inputs.size() == plan_.graph->inputs.size());
    TensorMap batch;
    for (size_t i = 0; i < inputs.size(); ++i) batch[plan_.graph->inputs[i].name] = inputs[i];
    Result result;
    at::Tensor loss = at::zeros({1}, at::TensorOptions(device_).dtype(at::kDouble));
    if (working()) {
      compute_before(&batch);
      for (auto& local : locals_) gather_parameters(*local);
      run_passes(number, batch, loss);
      // [stage of this worker][parameter of its graph]
      std::vector<std::vector<at::Tensor>> gradients;
      for (auto& local : locals_)
        gradients.push_back(in_every_pass(*local) ? take_sums(*local)
                                                  : local->executor->reduce(number));
      for (size_t l = 0; l < locals_.size(); ++l) reduce_over_replicas(*locals_[l], gradients[l]);
      reduce_tied(gradients);
      for (size_t l = 0; l < locals_.size(); ++l) scatter_tied(*locals_[l], gradients[l]);
      for (const Place& place : parameter_at_)
        for (size_t l = 0; l < locals_.size(); ++l)
          if (place.local == locals_[l].get())
            result.gradients.push_back(gradients[l][place.index]);
      for (auto& local : locals_) local->executor->commit();
    }
    group_.all_reduce(loss);
    result.loss = loss.item<double>();
    return result;
  }

  bool counts(size_t i) const override {
    const Owner& owner = owners_[parameters_[i]];
    const Local& local = *parameter_at_[i].local;
    return (replica_ == 0 || divides(parameter_at_[i])) && local.stage == owner.stage &&
           (rank_ == 0 || local.executor->stored(parameter_value(i)).is_shard());
  }

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
    // NCCL has reductions of its own.
    if (device_.is_cuda()) return {};
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

  Layout sent_layout(const Transfer& t) const {
    const Theory& from = pipeline_.theory(t.from);
    return layout_of(from, t.made, output_placement(from, stage(replica_, t.from).program, t.made),
                     shares_.at(replica_)[t.from]);
  }
  Layout taken_layout(const Transfer& t) const { return stored_layout(replica_, t.to, t.taken); }
  Layout stored_layout(int r, int s, ValueId source) const {
    const Theory& theory = pipeline_.theory(s);
    return layout_of(theory, source, stored_placements(theory, stage(r, s).program)[source.index],
                     shares_.at(r)[s]);
  }

  void find_owners() {
    owners_.resize(plan_.graph->parameters.size());
    buffer_owners_.resize(plan_.graph->buffers.size());
    for (int s = pipeline_.stages(); s-- > 0;) {
      const auto& p = pipeline_.parts().parameter_of[s];
      for (size_t i = 0; i < p.size(); ++i)
        owners_[p[i]] = {s, pipeline_.graph(s).parameters[i].value};
      const auto& b = pipeline_.parts().buffer_of[s];
      for (size_t i = 0; i < b.size(); ++i)
        buffer_owners_[b[i]] = {s, pipeline_.graph(s).buffers[i].value};
    }
  }

  Local& of(int s) {
    for (auto& local : locals_)
      if (local->stage == s) return *local;
    MOTLEY_CHECK(false, "stage {} is not of this worker", s);
  }

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
  std::vector<int> peers_of(const Local& local) const {
    std::vector<int> ranks;
    for (const ReplicaPlan& other : pipeline_.replicas)
      ranks.push_back(other.stages[local.stage].devices[rank_]);
    return ranks;
  }

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
  void gather_parameters(Local& local) {
    std::vector<size_t> which;
    for (size_t i = 0; i < local.whole.size(); ++i)
      if (local.whole[i].defined()) which.push_back(i);
    if (which.empty()) return;
    const auto ring = subgroup(group_, peers_of(local), kReplicaTag);
    in_buckets(which, local.whole, [&](size_t first, size_t end) {
      std::vector<std::vector<at::Tensor>> parts(pipeline_.replicas.size());  // [replica]
      for (size_t k = first; k < end; ++k) {
        const auto cut = cut_in_parts(local, local.whole[which[k]]);
        for (size_t r = 0; r < cut.size(); ++r) parts[r].push_back(cut[r]);
      }
      std::vector<at::Tensor> pieces;
      for (const auto& list : parts) pieces.push_back(list.size() == 1 ? list[0] : at::cat(list));
      ring->all_gather(pieces);
      for (size_t r = 0; r < parts.size(); ++r) {
        if (parts[r].size() == 1) continue;  // in place
        int64_t at = 0;
        for (at::Tensor& part : parts[r]) {
          part.copy_(pieces[r].narrow(0, at, part.numel()));
          at += part.numel();
        }
      }
    });
  }

  // Sums the gradients of `which` parameters over replicas and leaves each its part.
  void scatter(const Local& local, const std::vector<size_t>& which,
               std::vector<at::Tensor>& gradients) {
    if (which.empty()) return;
    const auto ring = subgroup(group_, peers_of(local), kReplicaTag);
    in_buckets(which, gradients, [&](size_t first, size_t end) {
      std::vector<std::vector<at::Tensor>> parts(pipeline_.replicas.size());
      std::vector<int64_t> sizes;
      for (size_t k = first; k < end; ++k) {
        const auto cut = cut_in_parts(local, gradients[which[k]]);
        for (size_t r = 0; r < cut.size(); ++r) parts[r].push_back(cut[r]);
        sizes.push_back(cut[replica_].numel());
      }
      std::vector<at::Tensor> pieces;
      for (const auto& list : parts) pieces.push_back(at::cat(list));
      parts.clear();  // copies, of gradients that are not in one run
      const std::vector<at::Tensor> own = ring->reduce_scatter(pieces).split_with_sizes(sizes);
      for (size_t k = first; k < end; ++k) gradients[which[k]] = own[k - first];
    });
  }

  // Reduces the gradients of a pass, the divided ones over replicas too, and adds them up.
  void sum_pass(Local& local, int64_t number) {
    std::vector<at::Tensor> gradients = local.executor->reduce(number);
    std::vector<size_t> which;
    for (size_t i = 0; i < gradients.size(); ++i)
      if (local.divided.gradient[i]) which.push_back(i);
    scatter(local, which, gradients);
    for (size_t i = 0; i < gradients.size(); ++i) {
      at::Tensor& g = gradients[i];
      if (!g.defined()) continue;
      at::Tensor& sum = local.sums[i];
      if (sum.defined())
        sum.add_(g);
      else if (sums_in_f32(g.scalar_type()))
        sum = g.to(at::kFloat);
      else
        sum = g.clone(at::MemoryFormat::Contiguous);
      g.reset();
    }
  }
  std::vector<at::Tensor> take_sums(Local& local) {
    std::vector<at::Tensor> gradients(local.sums.size());
    std::swap(gradients, local.sums);
    const Graph& of_stage = graph(local);
    for (size_t i = 0; i < gradients.size(); ++i)
      if (gradients[i].defined())
        gradients[i] =
            gradients[i].to(to_torch(of_stage.spec(of_stage.parameters[i].gradient).dtype));
    return gradients;
  }

  // Tied parameters that replicas divide: the stages' sums are the same bits everywhere, and stay
  // so if every part is summed by its owner in the order of the replicas.
  void scatter_tied(const Local& local, std::vector<at::Tensor>& gradients) {
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (!gradients[i].defined() || !divides(local, i) || !local.divided.tied[i]) continue;
      const auto replicas = subgroup(group_, peers_of(local), kReplicaTag);
      const std::vector<at::Tensor> send = cut_in_parts(local, gradients[i].contiguous());
      std::vector<at::Tensor> received;
      for (size_t r = 0; r < send.size(); ++r) received.push_back(at::empty_like(send[replica_]));
      replicas->all_to_all(send, received);
      const at::ScalarType type = gradients[i].scalar_type();
      at::Tensor sum = received[0].to(sums_in_f32(type) ? at::kFloat : type);
      for (size_t r = 1; r < received.size(); ++r) sum = sum + received[r];
      gradients[i] = sum.to(type);
    }
  }

  // This worker's piece of a parameter, or of what is placed as it, from the parts of all replicas.
  at::Tensor gathered(int parameter, const at::Tensor& local) {
    for (const Place& place : parameter_at_) {
      if (place.of_plan != parameter || place.local->stage != owners_[parameter].stage ||
          !divides(place))
        continue;
      const Executor& executor = *place.local->executor;
      const ValueId v = owners_[parameter].value;
      const Shape shape = executor.local_shape(v, executor.stored(v));
      int64_t n = 1;
      for (int64_t d : shape) n *= d;
      std::vector<at::Tensor> pieces;
      for (int64_t part : parts_of(*place.local, n))
        pieces.push_back(at::empty({part}, local.options()));
      pieces[replica_] = local.reshape({-1}).contiguous();
      subgroup(group_, peers_of(*place.local), kReplicaTag)->all_gather(pieces);
      return at::cat(pieces).reshape(shape);
    }
    return local;
  }

  // What the waiting takes is not computation.
  void wait(std::vector<std::unique_ptr<Message>>& messages) {
    if (messages.empty()) return;
    if (before_) before_(false);
    for (auto& message : messages) message->wait();
    if (after_) after_(false, nullptr);
  }

  // ---- passes

  std::vector<Incoming> post(const Pass& pass) {
    std::vector<Incoming> list;
    const Local& local = of(pass.stage);
    const Executor& executor = *local.executor;
    for (const Route& route : local.routes) {
      if (route.sends || route.transfer.backward != pass.backward) continue;
      Incoming in;
      in.route = &route;
      const TensorSpec& spec = graph(local).spec(route.transfer.taken);
      int64_t n = 1;
      const Placement stored = executor.stored(route.transfer.taken);
      for (int64_t d : executor.local_shape(route.transfer.taken, stored)) n *= d;
      in.flat = at::empty({n}, options_of(spec));
      for (size_t p = 0; p < route.peers.size(); ++p) {
        const int64_t count = route.resharding.count(static_cast<int>(p), rank_);
        if (count == 0 || route.peers[p] == group_.rank()) continue;
        // A message that is the whole piece goes where it belongs.
        at::Tensor part = count == n ? in.flat : at::empty({count}, options_of(spec));
        in.messages.push_back(group_.receive(part, route.peers[p], route.tag + pass.micro_batch));
        in.parts.push_back({static_cast<int>(p), part});
      }
      list.push_back(std::move(in));
    }
    return list;
  }

  // Waits for what is coming in and makes it the executor's; returns it.
  std::vector<std::pair<ValueId, at::Tensor>> take_in(const Pass& pass,
                                                      std::vector<Incoming>& list) {
    const Executor& executor = *of(pass.stage).executor;
    std::vector<std::pair<ValueId, at::Tensor>> taken;
    for (Incoming& in : list) {
      wait(in.messages);
      // What another stage of this worker left here.
      if (auto own = kept_.find(in.route->tag + pass.micro_batch); own != kept_.end()) {
        in.route->resharding.insert(rank_, rank_, own->second, in.flat);
        kept_.erase(own);
      }
      for (auto& [p, part] : in.parts)
        if (part.numel() != in.flat.numel()) in.route->resharding.insert(p, rank_, part, in.flat);
      const ValueId v = in.route->transfer.taken;
      taken.push_back({v, in.flat.view(executor.local_shape(v, executor.stored(v)))});
    }
    list.clear();
    return taken;
  }

  // Messages that others take in a pass of theirs.
  struct Outgoing {
    int from = 0, to = 0;  // stages
    int micro_batch = 0;
    bool backward = false;  // made in a backward pass
    std::vector<std::unique_ptr<Message>> messages;
  };

  void send_out(Executor::Flight* flight, const Pass& pass) {
    Local& local = of(pass.stage);
    std::map<ValueId, at::Tensor> values;
    for (const Route& route : local.routes) {
      if (!route.sends || made_backward(route.transfer) != pass.backward) continue;
      const ValueId v = route.transfer.made;
      if (!values.count(v)) values[v] = local.executor->take(flight, v);
      Outgoing out{pass.stage, route.transfer.to, pass.micro_batch, pass.backward, {}};
      for (size_t p = 0; p < route.peers.size(); ++p) {
        if (route.resharding.count(rank_, static_cast<int>(p)) == 0) continue;
        const int tag = route.tag + pass.micro_batch;
        at::Tensor part = route.resharding.extract(rank_, static_cast<int>(p), values[v]);
        if (route.peers[p] == group_.rank())
          kept_[tag] = std::move(part);
        else
          out.messages.push_back(group_.send(part, route.peers[p], tag));
      }
      if (!out.messages.empty()) going_.push_back(std::move(out));
    }
  }
  // The pass that makes a value; it may be sent to the other's backward pass all the same.
  bool made_backward(const Transfer& t) const {
    const Graph& from = pipeline_.graph(t.from);
    return from.node(from.value(t.made).producer).phase == Phase::backward;
  }

  // Waits for what has arrived when a pass is taken. Of what a stage sends forward, its backward
  // pass tells; of what it sends back, a forward pass that came through the other stage after that
  // one's backward pass.
  void arrived(const Pass& pass) {
    for (auto out = going_.begin(); out != going_.end();) {
      const bool known =
          out->from == pass.stage &&
          (pass.backward ? !out->backward && out->micro_batch <= pass.micro_batch
                         : out->backward && out->to < out->from &&
                               taken_before_[out->to][out->micro_batch] <= pass.micro_batch);
      if (known) wait(out->messages);
      out = known ? going_.erase(out) : std::next(out);
    }
  }

  // What a micro-batch gets of an input, and the input's number.
  std::pair<PartCut, size_t> part_cut(const std::string& input) const {
    const auto& inputs = pipeline_.part().graph.inputs;
    for (size_t i = 0; i < inputs.size(); ++i)
      if (inputs[i].name == input) return {pipeline_.part().inputs[i], i};
    MOTLEY_CHECK(false, "no input {}", input);
  }

  // Adds to a batch what follows from all of it.
  void compute_before(TensorMap* batch) const {
    if (!needs_before_) return;
    const MicroBatch& micro = pipeline_.part();
    if (before_) before_(true);
    Feeds feeds;
    for (const Input& i : micro.before.inputs) feeds.inputs[i.name] = batch->at(i.name);
    InterpretOptions options;
    options.device = device_;
    const std::vector<at::Tensor> made = interpret(micro.before, feeds, options).outputs;
    const size_t first = plan_.graph->inputs.size();
    for (size_t i = 0; i < made.size(); ++i) (*batch)[micro.graph.inputs[first + i].name] = made[i];
    if (after_) after_(true, &micro);
  }

  void set_inputs(const TensorMap& batch, Local& local, int m) {
    for (const Input& input : local.inputs) {
      at::Tensor part = batch.at(input.name);
      const PartCut cut = part_cut(input.name).first;
      if (!cut.is_whole()) {
        const int64_t length = cut.size / pipeline_.part().parts;
        part = part.reshape({cut.outer, cut.size, cut.inner})
                   .narrow(1, (first_ + m) * length, length)
                   .reshape(graph(local).spec(input.value).shape);
      }
      Executor& executor = *local.executor;
      executor.set(input.value,
                   executor.piece(input.value, executor.stored(input.value), part).to(device_));
    }
  }

  void run_passes(int64_t number, const TensorMap& batch, at::Tensor& loss) {
    using Key = std::pair<int, int>;  // stage, micro-batch
    std::map<Key, Executor::Flight> flights;
    std::map<Key, std::vector<std::pair<ValueId, at::Tensor>>> kept;  // for recomputation
    std::vector<Pass> ways[2];
    for (const Pass& pass : order_) ways[pass.backward].push_back(pass);
    std::deque<std::vector<Incoming>> coming[2];
    size_t next[2] = {0, 0};
    for (const Pass& pass : order_) {
      const int m = pass.micro_batch;
      const Key key = {pass.stage, m};
      Local& local = of(pass.stage);
      Executor& executor = *local.executor;
      const bool again = stage(replica_, pass.stage).recompute;
      for (int way : {0, 1})
        while (coming[way].size() < kAhead && next[way] + coming[way].size() < ways[way].size())
          coming[way].push_back(post(ways[way][next[way] + coming[way].size()]));
      auto received = take_in(pass, coming[pass.backward].front());
      coming[pass.backward].pop_front();
      ++next[pass.backward];
      if (!pass.backward) {
        set_inputs(batch, local, m);
        for (auto& [v, tensor] : received) executor.set(v, tensor);
        Executor::Flight flight = executor.forward(number, first_ + m);
        for (auto& [v, tensor] : received) executor.unset(v);
        send_out(&flight, pass);
        if (again)
          kept[key] = std::move(received);
        else
          flights[key] = std::move(flight);
        most_in_flight_ = std::max(most_in_flight_, static_cast<int>(kept.size() + flights.size()));
      } else {
        if (again) {
          set_inputs(batch, local, m);
          for (auto& [v, tensor] : kept[key]) executor.set(v, tensor);
          flights[key] = executor.forward(number, first_ + m, /*again=*/true);
          for (auto& [v, tensor] : kept[key]) executor.unset(v);
          kept.erase(key);
        }
        for (auto& [v, tensor] : received) executor.set(v, tensor);
        Executor::Flight& flight = flights[key];
        executor.backward(&flight, number, first_ + m);
        for (auto& [v, tensor] : received) executor.unset(v);
        if (graph(local).loss.valid()) {
          const Executor::Loss part = executor.loss(flight);
          if (part.partial || rank_ == 0) loss += part.value.to(at::kDouble);
        }
        send_out(&flight, pass);
        flights.erase(key);
        if (in_every_pass(local)) sum_pass(local, number);
      }
      arrived(pass);
    }
    for (Outgoing& out : going_) wait(out.messages);
    going_.clear();
  }

  // ---- gradients

  void reduce_over_replicas(const Local& local, std::vector<at::Tensor>& gradients) {
    const int replicas = static_cast<int>(pipeline_.replicas.size());
    if (replicas == 1) return;
    std::vector<size_t> alike, joint, divided;
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (!gradients[i].defined()) continue;
      if (divides(local, i)) {
        const bool reduced = in_every_pass(local) && local.divided.gradient[i];
        if (!reduced && !local.divided.tied[i]) divided.push_back(i);
        continue;
      }
      if (local.joint.gradient[i]) {
        joint.push_back(i);
        continue;
      }
      std::vector<Layout> layouts;
      for (int r = 0; r < replicas; ++r)
        layouts.push_back(stored_layout(r, local.stage, graph(local).parameters[i].value));
      if (std::all_of(layouts.begin(), layouts.end(),
                      [&](const Layout& l) { return l == layouts[0]; })) {
        alike.push_back(i);
        continue;
      }
      std::vector<const std::vector<int>*> devices;
      for (int r = 0; r < replicas; ++r) devices.push_back(&stage(r, local.stage).devices);
      gradients[i] = exchange(local, i, devices, layouts, std::vector<bool>(replicas, true),
                              replica_, gradients[i]);
    }
    scatter(local, divided, gradients);
    if (!joint.empty())
      reduce_over(devices_of(pipeline_, local.stage), kJointTag, joint, gradients);
    if (alike.empty()) return;
    std::vector<int> ranks;
    for (int r = 0; r < replicas; ++r) ranks.push_back(stage(r, local.stage).devices[rank_]);
    reduce_over(ranks, kReplicaTag, alike, gradients);
  }

  // Sums the gradients of `which` parameters over devices that hold equal pieces.
  void reduce_over(const std::vector<int>& ranks, int tag, const std::vector<size_t>& which,
                   std::vector<at::Tensor>& gradients) {
    const auto messages = subgroup(group_, ranks, tag);
    const auto ring = reducing(*messages, programs_of(ranks));
    in_buckets(which, gradients, [&](size_t first, size_t end) {
      std::vector<at::Tensor> flat;
      for (size_t k = first; k < end; ++k) flat.push_back(gradients[which[k]].reshape({-1}));
      at::Tensor bucket = flat.size() == 1 ? flat[0].clone() : at::cat(flat);
      ring->all_reduce(bucket);
      int64_t at = 0;
      for (size_t k = first; k < end; ++k) {
        at::Tensor& g = gradients[which[k]];
        const int64_t n = g.numel();
        g = bucket.narrow(0, at, n).reshape(g.sizes());
        at += n;
      }
    });
  }

  void reduce_tied(std::vector<std::vector<at::Tensor>>& gradients) {
    for (const Tied& tied : pipeline_.parts().tied) {
      // At most one stage of this worker is among them.
      size_t l = 0;
      auto mine = tied.stages.end();
      for (; l < locals_.size(); ++l) {
        mine = std::find(tied.stages.begin(), tied.stages.end(), locals_[l]->stage);
        if (mine != tied.stages.end()) break;
      }
      if (mine == tied.stages.end() || !plan_.graph->parameters[tied.parameter].gradient.valid())
        continue;
      const Local& local = *locals_[l];
      std::vector<const std::vector<int>*> devices;
      std::vector<Layout> layouts;
      std::vector<bool> has;
      size_t own = 0;
      for (int s : tied.stages) {
        const auto& held = pipeline_.parts().parameter_of[s];
        const size_t i = std::find(held.begin(), held.end(), tied.parameter) - held.begin();
        const Parameter& parameter = pipeline_.graph(s).parameters[i];
        devices.push_back(&stage(replica_, s).devices);
        layouts.push_back(stored_layout(replica_, s, parameter.value));
        has.push_back(parameter.gradient.valid());
        if (s == local.stage) own = i;
      }
      gradients[l][own] = exchange(local, own, devices, layouts, has,
                                   static_cast<int>(mine - tied.stages.begin()), gradients[l][own]);
    }
  }

  // The type in which the gradient of a stage's i-th parameter is summed over groups.
  at::TensorOptions gradient_type(const Local& local, size_t i) const {
    const int of_plan = pipeline_.parts().parameter_of[local.stage][i];
    return options_of(plan_.graph->spec(plan_.graph->parameters[of_plan].gradient));
  }

  // The layout in which a group takes what the others have: its own if that is cut; else even
  // pieces, which it gathers itself, so that a slow link carries everything once.
  static Layout taken_in(const std::vector<Layout>& layouts, int group) {
    const Layout& mine = layouts[group];
    if (!mine.pieces.empty() || mine.ranks == 1) return mine;
    Layout even{1, mine.numel(), 1, {}, mine.ranks};
    for (const Layout& other : layouts)
      if (!other.pieces.empty()) {  // cut alike, as the pieces of others are
        even = other;
        even.ranks = mine.ranks;
        break;
      }
    even.pieces = divide(even.size, std::vector<double>(mine.ranks, 1));
    return even;
  }

  // The sum of what several groups hold of the gradient of the i-th parameter of stage `home`, in
  // the pieces of `mine`; terms in the order of the groups. Groups that have no term take part as
  // receivers. REQUIRES: the devices of `mine` are those of the stage.
  at::Tensor exchange(const Local& home, size_t i,
                      const std::vector<const std::vector<int>*>& devices,
                      const std::vector<Layout>& layouts, const std::vector<bool>& has, int mine,
                      at::Tensor local) {
    const at::TensorOptions type = gradient_type(home, i);
    const ValueId parameter = graph(home).parameters[i].value;
    const int groups = static_cast<int>(devices.size());
    std::vector<std::unique_ptr<Message>> messages;
    struct Part {
      int group, sender;
      at::Tensor tensor;
    };
    std::vector<Part> parts;
    if (local.defined()) local = local.to(type);
    const Layout taken = taken_in(layouts, mine);
    for (int g = 0; g < groups; ++g) {
      if (g == mine) continue;
      if (has[g]) {
        const Resharding in(layouts[g], taken);
        for (int s = 0; s < layouts[g].ranks; ++s)
          if (const int64_t n = in.count(s, rank_); n > 0) {
            at::Tensor part = at::empty({n}, type);
            messages.push_back(group_.receive(part, (*devices[g])[s], kExchangeTag));
            parts.push_back({g, s, part});
          }
      }
      if (has[mine]) {
        const Resharding out(layouts[mine], taken_in(layouts, g));
        for (int r = 0; r < layouts[g].ranks; ++r)
          if (out.count(rank_, r) > 0)
            messages.push_back(
                group_.send(out.extract(rank_, r, local), (*devices[g])[r], kExchangeTag));
      }
    }
    wait(messages);
    at::Tensor total;
    for (int g = 0; g < groups; ++g) {
      if (!has[g]) continue;
      const Resharding in(layouts[g], taken);
      at::Tensor term;
      if (g == mine) {
        term = in.extract(rank_, rank_, local);
      } else {
        term = at::empty({taken.numel(rank_)}, type);
        for (const Part& part : parts)
          if (part.group == g) in.insert(part.sender, rank_, part.tensor, term);
      }
      total = total.defined() ? total + term : term.clone();
    }
    if (taken != layouts[mine]) total = gather(taken, layouts[mine], total);
    const Executor& executor = *home.executor;
    return total.reshape(executor.local_shape(parameter, executor.stored(parameter)));
  }

  // All of something of which every device of this worker's stages has a piece.
  at::Tensor gather(const Layout& pieces, const Layout& whole, const at::Tensor& mine) {
    std::vector<at::Tensor> all;
    for (int r = 0; r < pieces.ranks; ++r)
      all.push_back(r == rank_ ? mine : at::empty({pieces.numel(r)}, mine.options()));
    if (before_) before_(false);
    stage_group_->all_gather(all);
    if (after_) after_(false, nullptr);
    at::Tensor result = at::empty({whole.numel()}, mine.options());
    const Resharding back(pieces, whole);
    for (int r = 0; r < pieces.ranks; ++r)
      if (all[r].numel() > 0) back.insert(r, rank_, all[r], result);
    return result;
  }

  at::Tensor whole(const Owner& owner, const at::Tensor& local, bool everywhere) {
    if (owner.stage < 0) return {};
    const std::vector<int>& devices = stage(0, owner.stage).devices;
    at::Tensor tensor;
    for (const auto& l : locals_)
      if (replica_ == 0 && l->stage == owner.stage)
        tensor = l->executor->gather(owner.value, l->executor->stored(owner.value), local);
    std::vector<std::unique_ptr<Message>> messages;
    for (int r = 0; r < (everywhere ? group_.size() : 1); ++r) {
      if (std::binary_search(devices.begin(), devices.end(), r)) continue;
      if (group_.rank() == devices[0]) {
        messages.push_back(group_.send(tensor.contiguous(), r, kWholeTag));
      } else if (group_.rank() == r) {
        const TensorSpec& spec = pipeline_.graph(owner.stage).spec(owner.value);
        tensor = at::empty(spec.shape, options_of(spec));
        messages.push_back(group_.receive(tensor, devices[0], kWholeTag));
      }
    }
    wait(messages);
    return everywhere || group_.rank() == 0 ? tensor : at::Tensor();
  }

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

}  // namespace

std::unique_ptr<Worker> make_pipeline_worker(const Plan& plan, Communicator& group,
                                             const ExecutorOptions& options) {
  return std::make_unique<PipelineWorker>(plan, group, options);
}

}  // namespace motley
