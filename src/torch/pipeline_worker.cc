#include "torch/pipeline_worker.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <deque>
#include <map>
#include <optional>

#include "core/error.h"
#include "pipeline/schedule.h"
#include "torch/dispatch.h"
#include "torch/reducing.h"
#include "torch/reshard.h"
#include "torch/subgroup.h"

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

constexpr int64_t kBucketBytes = int64_t{64} << 20;

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
    working_ = pipeline_.seat(group.rank(), &seat_);
    if (!working_) return;
    for (int r = 0; r < seat_.replica; ++r) first_ += pipeline_.replicas[r].micro_batches;
    const StagePlan& mine = stage(seat_.replica, seat_.stage);
    stage_messages_ = subgroup(group, mine.devices, kStageTag);
    stage_group_ = reducing(*stage_messages_, programs_of(mine.devices));
    ExecutorOptions execution = options;
    for (NodeId id : pipeline_.parts().graphs[seat_.stage].node_of)
      execution.random_stream.push_back(id.index);
    joint_ = joint_gradients(pipeline_, seat_.stage, plan.reductions, plan.cluster.size());
    execution.left_out = joint_.steps[seat_.replica];
    executor_.emplace(theory(), mine.program, shares_[seat_.replica][seat_.stage], *stage_group_,
                      execution);
    for (int p : pipeline_.parts().parameter_of[seat_.stage]) parameters_.push_back(p);
    for (int b : pipeline_.parts().buffer_of[seat_.stage]) buffers_.push_back(b);
    for (const Input& i : graph().inputs) {
      const ValueId v = pipeline_.parts().graphs[seat_.stage].value_of[i.value.index];
      if (is_source(plan.graph->node(plan.graph->value(v).producer))) inputs_.push_back(i);
    }
    const auto& transfers = pipeline_.parts().transfers;
    for (size_t k = 0; k < transfers.size(); ++k)
      if (transfers[k].from == seat_.stage || transfers[k].to == seat_.stage)
        routes_.emplace_back(*this, transfers[k], static_cast<int>(k));
    std::vector<int> counts;
    for (const StagePlan& s : replica().stages)
      counts.push_back(std::min(s.warm_up, replica().micro_batches));
    order_ = pipeline::strict_schedule(pipeline_.schedule, counts, replica().micro_batches)
                 .order[seat_.stage];
    deepest_ = *std::max_element(counts.begin(), counts.end());
  }

  const std::vector<int>& parameters() const override { return parameters_; }
  const std::vector<int>& buffers() const override { return buffers_; }
  at::Tensor parameter_piece(size_t i, const at::Tensor& whole) const override {
    return piece(graph().parameters[i].value, whole);
  }
  at::Tensor buffer_piece(size_t i, const at::Tensor& whole) const override {
    return piece(graph().buffers[i].value, whole);
  }
  void set_parameter(size_t i, at::Tensor local) override {
    executor_->set(graph().parameters[i].value, std::move(local));
  }
  void set_buffer(size_t i, at::Tensor local) override {
    executor_->set(graph().buffers[i].value, std::move(local));
  }
  at::Tensor buffer(size_t i) const override { return executor_->get(graph().buffers[i].value); }

  Placement input_placement(size_t) const override { return Placement::replicated(); }
  at::Tensor input_piece(size_t, const at::Tensor& whole) const override { return whole; }

  Part parameter_part(size_t i) const override { return part(graph().parameters[i].value); }
  Part buffer_part(size_t i) const override { return part(graph().buffers[i].value); }

  Result step(int64_t number, const std::vector<at::Tensor>& inputs) override {
    at::NoGradGuard no_grad;
    MOTLEY_CHECK(inputs.size() == plan_.graph->inputs.size());
    TensorMap batch;
    for (size_t i = 0; i < inputs.size(); ++i) batch[plan_.graph->inputs[i].name] = inputs[i];
    Result result;
    at::Tensor loss = at::zeros({1}, at::TensorOptions(device_).dtype(at::kDouble));
    if (working_) {
      run_passes(number, batch, loss);
      result.gradients = executor_->reduce(number);
      reduce_over_replicas(result.gradients);
      reduce_tied(result.gradients);
      const double part = 1.0 / pipeline_.micro_batches();
      for (at::Tensor& gradient : result.gradients)
        if (gradient.defined()) gradient = gradient * part;
    }
    group_.all_reduce(loss);
    result.loss = loss.item<double>() / pipeline_.micro_batches();
    return result;
  }

  bool counts(size_t i) const override {
    const Owner& owner = owners_[parameters_[i]];
    return seat_.replica == 0 && seat_.stage == owner.stage &&
           (seat_.rank == 0 || executor_->stored(graph().parameters[i].value).is_shard());
  }

  at::Tensor whole_parameter(int parameter, const at::Tensor& local, bool everywhere) override {
    return whole(owners_[parameter], local, everywhere);
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
    Route(PipelineWorker& w, const Transfer& t, int k)
        : transfer(t),
          sends(t.from == w.seat_.stage),
          peers(w.stage(w.seat_.replica, sends ? t.to : t.from).devices),
          resharding(w.sent_layout(t), w.taken_layout(t)),
          tag(kFirstTransferTag + k * w.replica().micro_batches) {}
    Transfer transfer;
    bool sends;
    std::vector<int> peers;  // devices of the other stage
    Resharding resharding;
    int tag;  // of micro-batch 0
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
  const ReplicaPlan& replica() const { return pipeline_.replicas[seat_.replica]; }
  const Theory& theory() const { return pipeline_.theory(seat_.stage); }
  const Graph& graph() const { return pipeline_.graph(seat_.stage); }
  at::TensorOptions options_of(const TensorSpec& spec) const {
    return at::TensorOptions(device_).dtype(to_torch(spec.dtype));
  }
  at::Tensor piece(ValueId value, const at::Tensor& whole) const {
    return executor_->piece(value, executor_->stored(value), whole);
  }
  Part part(ValueId source) const {
    const int group = seat_.replica * pipeline_.stages() + seat_.stage;
    return part_of(stored_layout(seat_.replica, seat_.stage, source), seat_.rank, group);
  }

  Layout sent_layout(const Transfer& t) const {
    const Theory& from = pipeline_.theory(t.from);
    return layout_of(from, t.made,
                     output_placement(from, stage(seat_.replica, t.from).program, t.made),
                     shares_.at(seat_.replica)[t.from]);
  }
  Layout taken_layout(const Transfer& t) const {
    return stored_layout(seat_.replica, t.to, t.taken);
  }
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

  // What the waiting takes is not computation.
  void wait(std::vector<std::unique_ptr<Message>>& messages) {
    if (messages.empty()) return;
    if (before_) before_(false);
    for (auto& message : messages) message->wait();
    if (after_) after_(false);
  }

  // ---- passes

  std::vector<Incoming> post(int m, bool backward) {
    std::vector<Incoming> list;
    for (const Route& route : routes_) {
      if (route.sends || route.transfer.backward != backward) continue;
      Incoming in;
      in.route = &route;
      const TensorSpec& spec = graph().spec(route.transfer.taken);
      int64_t n = 1;
      const Placement stored = executor_->stored(route.transfer.taken);
      for (int64_t d : executor_->local_shape(route.transfer.taken, stored)) n *= d;
      in.flat = at::empty({n}, options_of(spec));
      for (size_t p = 0; p < route.peers.size(); ++p) {
        const int64_t count = route.resharding.count(static_cast<int>(p), seat_.rank);
        if (count == 0) continue;
        // A message that is the whole piece goes where it belongs.
        at::Tensor part = count == n ? in.flat : at::empty({count}, options_of(spec));
        in.messages.push_back(group_.receive(part, route.peers[p], route.tag + m));
        in.parts.push_back({static_cast<int>(p), part});
      }
      list.push_back(std::move(in));
    }
    return list;
  }

  // Waits for what is coming in and makes it the executor's; returns it.
  std::vector<std::pair<ValueId, at::Tensor>> take_in(std::vector<Incoming>& list) {
    std::vector<std::pair<ValueId, at::Tensor>> taken;
    for (Incoming& in : list) {
      wait(in.messages);
      for (auto& [p, part] : in.parts)
        if (part.numel() != in.flat.numel())
          in.route->resharding.insert(p, seat_.rank, part, in.flat);
      const ValueId v = in.route->transfer.taken;
      taken.push_back({v, in.flat.view(executor_->local_shape(v, executor_->stored(v)))});
    }
    list.clear();
    return taken;
  }

  void send_out(Executor::Flight* flight, int m, bool backward,
                std::vector<std::unique_ptr<Message>>* messages) {
    std::map<ValueId, at::Tensor> values;
    for (const Route& route : routes_) {
      if (!route.sends || made_backward(route.transfer) != backward) continue;
      const ValueId v = route.transfer.made;
      if (!values.count(v)) values[v] = executor_->take(flight, v);
      for (size_t p = 0; p < route.peers.size(); ++p)
        if (route.resharding.count(seat_.rank, static_cast<int>(p)) > 0)
          messages->push_back(
              group_.send(route.resharding.extract(seat_.rank, static_cast<int>(p), values[v]),
                          route.peers[p], route.tag + m));
    }
  }
  // The pass that makes a value; it may be sent to the other's backward pass all the same.
  bool made_backward(const Transfer& t) const {
    const Graph& from = pipeline_.graph(t.from);
    return from.node(from.value(t.made).producer).phase == Phase::backward;
  }

  void set_inputs(const TensorMap& batch, int m) {
    for (const Input& input : inputs_) {
      const at::Tensor& all = batch.at(input.name);
      const int64_t rows = graph().spec(input.value).shape.at(0);
      executor_->set(input.value,
                     piece(input.value, all.narrow(0, (first_ + m) * rows, rows)).to(device_));
    }
  }

  void run_passes(int64_t number, const TensorMap& batch, at::Tensor& loss) {
    const int count = replica().micro_batches;
    const bool again = stage(seat_.replica, seat_.stage).recompute;
    std::map<int, Executor::Flight> flights;
    std::map<int, std::vector<std::pair<ValueId, at::Tensor>>> kept;  // for recomputation
    std::map<int, std::vector<Incoming>> coming[2];
    std::map<int, std::vector<std::unique_ptr<Message>>> going[2];
    int posted[2] = {0, 0};
    auto post_until = [&](bool backward, int m) {
      for (int& next = posted[backward]; next <= std::min(m, count - 1); ++next)
        coming[backward][next] = post(next, backward);
    };
    auto arrived = [&](bool backward, int m) {
      for (auto& list = going[backward]; !list.empty() && list.begin()->first <= m;
           list.erase(list.begin()))
        wait(list.begin()->second);
    };
    int next[2] = {0, 0};
    for (const pipeline::Task& task : order_) {
      const int m = task.micro_batch;
      post_until(false, next[0] + kAhead - 1);
      post_until(true, next[1] + kAhead - 1);
      next[task.backward] = m + 1;
      auto received = take_in(coming[task.backward][m]);
      coming[task.backward].erase(m);
      if (!task.backward) {
        set_inputs(batch, m);
        for (auto& [v, tensor] : received) executor_->set(v, tensor);
        Executor::Flight flight = executor_->forward(number, first_ + m);
        for (auto& [v, tensor] : received) executor_->unset(v);
        send_out(&flight, m, false, &going[0][m]);
        if (again)
          kept[m] = std::move(received);
        else
          flights[m] = std::move(flight);
        most_in_flight_ =
            std::max(most_in_flight_, static_cast<int>(again ? kept.size() : flights.size()));
        // Forward passes this far behind have had their backward pass on every earlier stage.
        arrived(true, m - deepest_);
      } else {
        if (again) {
          set_inputs(batch, m);
          for (auto& [v, tensor] : kept[m]) executor_->set(v, tensor);
          flights[m] = executor_->forward(number, first_ + m, /*again=*/true);
          for (auto& [v, tensor] : kept[m]) executor_->unset(v);
          kept.erase(m);
        }
        for (auto& [v, tensor] : received) executor_->set(v, tensor);
        Executor::Flight& flight = flights[m];
        executor_->backward(&flight, number, first_ + m);
        for (auto& [v, tensor] : received) executor_->unset(v);
        if (graph().loss.valid()) {
          const Executor::Loss part = executor_->loss(flight);
          if (part.partial || seat_.rank == 0) loss += part.value.to(at::kDouble);
        }
        send_out(&flight, m, true, &going[1][m]);
        flights.erase(m);
        arrived(false, m);
      }
    }
    arrived(false, count);
    arrived(true, count);
  }

  // ---- gradients

  void reduce_over_replicas(std::vector<at::Tensor>& gradients) {
    const int replicas = static_cast<int>(pipeline_.replicas.size());
    if (replicas == 1) return;
    std::vector<size_t> alike, joint;
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (!gradients[i].defined()) continue;
      if (joint_.gradient[i]) {
        joint.push_back(i);
        continue;
      }
      std::vector<Layout> layouts;
      for (int r = 0; r < replicas; ++r)
        layouts.push_back(stored_layout(r, seat_.stage, graph().parameters[i].value));
      if (std::all_of(layouts.begin(), layouts.end(),
                      [&](const Layout& l) { return l == layouts[0]; })) {
        alike.push_back(i);
        continue;
      }
      std::vector<const std::vector<int>*> devices;
      for (int r = 0; r < replicas; ++r) devices.push_back(&stage(r, seat_.stage).devices);
      gradients[i] = exchange(devices, layouts, std::vector<bool>(replicas, true), seat_.replica,
                              gradient_type(i), graph().parameters[i].value, gradients[i]);
    }
    if (!joint.empty())
      reduce_over(devices_of(pipeline_, seat_.stage), kJointTag, joint, gradients);
    if (alike.empty()) return;
    std::vector<int> ranks;
    for (int r = 0; r < replicas; ++r) ranks.push_back(stage(r, seat_.stage).devices[seat_.rank]);
    reduce_over(ranks, kReplicaTag, alike, gradients);
  }

  // Sums the gradients of `which` parameters over devices that hold equal pieces.
  void reduce_over(const std::vector<int>& ranks, int tag, const std::vector<size_t>& which,
                   std::vector<at::Tensor>& gradients) {
    const auto messages = subgroup(group_, ranks, tag);
    const auto ring = reducing(*messages, programs_of(ranks));
    for (size_t i = 0; i < which.size();) {
      std::vector<at::Tensor> flat;
      int64_t bytes = 0;
      size_t end = i;
      for (; end < which.size(); ++end) {
        const at::Tensor& g = gradients[which[end]];
        const int64_t more = static_cast<int64_t>(g.nbytes());
        if (end > i && (bytes + more > kBucketBytes || g.dtype() != flat[0].dtype())) break;
        bytes += more;
        flat.push_back(g.reshape({-1}));
      }
      at::Tensor bucket = flat.size() == 1 ? flat[0].clone() : at::cat(flat);
      ring->all_reduce(bucket);
      for (int64_t at = 0; i < end; ++i) {
        at::Tensor& g = gradients[which[i]];
        const int64_t n = g.numel();
        g = bucket.narrow(0, at, n).reshape(g.sizes());
        at += n;
      }
    }
  }

  void reduce_tied(std::vector<at::Tensor>& gradients) {
    for (const Tied& tied : pipeline_.parts().tied) {
      auto mine = std::find(tied.stages.begin(), tied.stages.end(), seat_.stage);
      if (mine == tied.stages.end() || !plan_.graph->parameters[tied.parameter].gradient.valid())
        continue;
      std::vector<const std::vector<int>*> devices;
      std::vector<Layout> layouts;
      std::vector<bool> has;
      size_t own = 0;
      for (int s : tied.stages) {
        const auto& held = pipeline_.parts().parameter_of[s];
        const size_t i = std::find(held.begin(), held.end(), tied.parameter) - held.begin();
        const Parameter& parameter = pipeline_.graph(s).parameters[i];
        devices.push_back(&stage(seat_.replica, s).devices);
        layouts.push_back(stored_layout(seat_.replica, s, parameter.value));
        has.push_back(parameter.gradient.valid());
        if (s == seat_.stage) own = i;
      }
      gradients[own] = exchange(devices, layouts, has, static_cast<int>(mine - tied.stages.begin()),
                                gradient_type(own), graph().parameters[own].value, gradients[own]);
    }
  }

  // The type in which the gradient of this stage's i-th parameter is summed over groups.
  at::TensorOptions gradient_type(size_t i) const {
    const int of_plan = pipeline_.parts().parameter_of[seat_.stage][i];
    return options_of(plan_.graph->spec(plan_.graph->parameters[of_plan].gradient));
  }

  // The sum of what several groups hold of a parameter's gradient, in the pieces of `mine`; terms
  // in the order of the groups. Groups that have no term take part as receivers.
  at::Tensor exchange(const std::vector<const std::vector<int>*>& devices,
                      const std::vector<Layout>& layouts, const std::vector<bool>& has, int mine,
                      const at::TensorOptions& type, ValueId parameter, at::Tensor local) {
    const int groups = static_cast<int>(devices.size());
    std::vector<std::unique_ptr<Message>> messages;
    struct Part {
      int group, sender;
      at::Tensor tensor;
    };
    std::vector<Part> parts;
    if (local.defined()) local = local.to(type);
    for (int g = 0; g < groups; ++g) {
      if (g == mine) continue;
      if (has[g]) {
        const Resharding in(layouts[g], layouts[mine]);
        for (int s = 0; s < layouts[g].ranks; ++s)
          if (const int64_t n = in.count(s, seat_.rank); n > 0) {
            at::Tensor part = at::empty({n}, type);
            messages.push_back(group_.receive(part, (*devices[g])[s], kExchangeTag));
            parts.push_back({g, s, part});
          }
      }
      if (has[mine]) {
        const Resharding out(layouts[mine], layouts[g]);
        for (int r = 0; r < layouts[g].ranks; ++r)
          if (out.count(seat_.rank, r) > 0)
            messages.push_back(
                group_.send(out.extract(seat_.rank, r, local), (*devices[g])[r], kExchangeTag));
      }
    }
    wait(messages);
    at::Tensor total;
    for (int g = 0; g < groups; ++g) {
      if (!has[g]) continue;
      at::Tensor term;
      if (g == mine) {
        term = local.reshape({-1});
      } else {
        const Resharding in(layouts[g], layouts[mine]);
        term = at::empty({layouts[mine].numel(seat_.rank)}, type);
        for (const Part& part : parts)
          if (part.group == g) in.insert(part.sender, seat_.rank, part.tensor, term);
      }
      total = total.defined() ? total + term : term.clone();
    }
    return total.reshape(executor_->local_shape(parameter, executor_->stored(parameter)));
  }

  at::Tensor whole(const Owner& owner, const at::Tensor& local, bool everywhere) {
    if (owner.stage < 0) return {};
    const std::vector<int>& devices = stage(0, owner.stage).devices;
    const bool holds = working_ && seat_.replica == 0 && seat_.stage == owner.stage;
    at::Tensor tensor;
    if (holds) tensor = executor_->gather(owner.value, executor_->stored(owner.value), local);
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
  std::map<int, std::vector<Shares>> shares_;         // [replica][stage]
  std::vector<Owner> owners_, buffer_owners_;         // [parameter], [buffer] of the plan's graph
  std::function<void(bool compute)> before_, after_;  // as in ExecutorOptions
  bool working_ = false;
  Seat seat_;
  int64_t first_ = 0;  // micro-batches of earlier replicas
  JointGradients joint_;
  std::unique_ptr<Communicator> stage_messages_, stage_group_;
  std::optional<Executor> executor_;
  std::vector<int> parameters_, buffers_;
  std::vector<Input> inputs_;  // of the model, not of other stages
  std::vector<Route> routes_;
  std::vector<pipeline::Task> order_;
  int deepest_ = 1, most_in_flight_ = 0;
};

}  // namespace

std::unique_ptr<Worker> make_pipeline_worker(const Plan& plan, Communicator& group,
                                             const ExecutorOptions& options) {
  return std::make_unique<PipelineWorker>(plan, group, options);
}

}  // namespace motley
