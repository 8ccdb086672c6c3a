#include "runtime/pipeline_worker.h"

#include <algorithm>
#include <deque>
#include <numeric>

#include "comm/moment.h"
#include "comm/reducing.h"
#include "comm/subgroup.h"
#include "core/error.h"
#include "runtime/pipeline_worker_parts.h"

namespace motley {

PipelineWorker::PipelineWorker(const Plan& plan, Communicator& group,
                               const ExecutorOptions& options)
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
    for (int s : stages) taken_before_[s].resize(replica().micro_batches, replica().micro_batches);
    for (const Pass& pass : order) {
      if (pass.kind != PassKind::forward) {
        if (pass.kind == PassKind::backward) waiting[pass.stage].push_back(pass.micro_batch);
        continue;
      }
      for (int m : waiting[pass.stage]) taken_before_[pass.stage][m] = pass.micro_batch;
      waiting[pass.stage].clear();
    }
  }
}

at::Tensor PipelineWorker::parameter_piece(size_t i, const at::Tensor& whole) const {
  const Place& place = parameter_at_[i];
  const at::Tensor local = piece(place, parameter_value(i), whole);
  return divides(place) ? own_part(*place.local, local) : local;
}

void PipelineWorker::set_parameter(size_t i, at::Tensor local) {
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

Part PipelineWorker::parameter_part(size_t i) const {
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

Worker::Result PipelineWorker::step(int64_t number, const std::vector<at::Tensor>& inputs) {
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
        if (place.local == locals_[l].get()) result.gradients.push_back(gradients[l][place.index]);
    for (auto& local : locals_) local->executor->commit();
  }
  group_.all_reduce(loss);
  result.loss = loss;
  return result;
}

bool PipelineWorker::counts(size_t i) const {
  const Owner& owner = owners_[parameters_[i]];
  const Local& local = *parameter_at_[i].local;
  return (replica_ == 0 || divides(parameter_at_[i])) && local.stage == owner.stage &&
         (rank_ == 0 || local.executor->stored(parameter_value(i)).is_shard());
}

Layout PipelineWorker::sent_layout(const Transfer& t) const {
  const Theory& from = pipeline_.theory(t.from);
  return layout_of(from, t.made, output_placement(from, stage(replica_, t.from).program, t.made),
                   shares_.at(replica_)[t.from]);
}

Layout PipelineWorker::stored_layout(int r, int s, ValueId source) const {
  const Theory& theory = pipeline_.theory(s);
  return layout_of(theory, source, stored_placements(theory, stage(r, s).program)[source.index],
                   shares_.at(r)[s]);
}

void PipelineWorker::find_owners() {
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

PipelineWorker::Local& PipelineWorker::of(int s) {
  for (auto& local : locals_)
    if (local->stage == s) return *local;
  MOTLEY_CHECK(false, "stage {} is not of this worker", s);
}

std::vector<int> PipelineWorker::peers_of(const Local& local) const {
  std::vector<int> ranks;
  for (const ReplicaPlan& other : pipeline_.replicas)
    ranks.push_back(other.stages[local.stage].devices[rank_]);
  return ranks;
}

std::pair<PartCut, size_t> PipelineWorker::part_cut(const std::string& input) const {
  const auto& inputs = pipeline_.part().graph.inputs;
  for (size_t i = 0; i < inputs.size(); ++i)
    if (inputs[i].name == input) return {pipeline_.part().inputs[i], i};
  MOTLEY_CHECK(false, "no input {}", input);
}

void PipelineWorker::compute_before(TensorMap* batch) const {
  if (!needs_before_) return;
  const MicroBatch& micro = pipeline_.part();
  if (before_) before_(true);
  Feeds feeds;
  for (const Input& i : micro.before.inputs)
    feeds.inputs[i.name] = moved_to(batch->at(i.name), device_);
  InterpretOptions options;
  options.device = device_;
  const std::vector<at::Tensor> made = interpret(micro.before, feeds, options).outputs;
  const size_t first = plan_.graph->inputs.size();
  for (size_t i = 0; i < made.size(); ++i) (*batch)[micro.graph.inputs[first + i].name] = made[i];
  if (after_) after_(true, &micro);
}

void PipelineWorker::set_inputs(const TensorMap& batch, Local& local, int m) {
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
    executor.set(
        input.value,
        moved_to(executor.piece(input.value, executor.stored(input.value), part), device_));
  }
}

void PipelineWorker::run_passes(int64_t number, const TensorMap& batch, at::Tensor& loss) {
  using Key = std::pair<int, int>;  // stage, micro-batch
  std::map<Key, Executor::Flight> flights;
  std::map<Key, std::vector<std::pair<ValueId, at::Tensor>>> kept;  // for recomputation
  std::vector<Pass> ways[2];
  for (const Pass& pass : order_)
    if (pass.kind != PassKind::weights) ways[pass.kind == PassKind::backward].push_back(pass);
  std::deque<std::vector<Incoming>> coming[2];
  size_t next[2] = {0, 0};
  for (const Pass& pass : order_) {
    const int m = pass.micro_batch;
    const Key key = {pass.stage, m};
    Local& local = of(pass.stage);
    Executor& executor = *local.executor;
    const StagePlan& planned = stage(replica_, pass.stage);
    const bool again = planned.recompute, splits = has_later(planned.program);
    const auto end = [&](Executor::Flight& flight) {
      if (graph(local).loss.valid()) {
        const Executor::Loss part = executor.loss(flight);
        if (part.partial || rank_ == 0) loss += part.value.to(at::kDouble);
      }
      flights.erase(key);
      if (in_every_pass(local)) sum_pass(local, number);
    };
    if (pass.kind == PassKind::weights) {
      executor.weights(&flights[key], number, first_ + m);
      end(flights[key]);
      continue;
    }
    const bool backward = pass.kind == PassKind::backward;
    for (int way : {0, 1})
      while (coming[way].size() < kAhead && next[way] + coming[way].size() < ways[way].size())
        coming[way].push_back(post(ways[way][next[way] + coming[way].size()]));
    auto received = take_in(pass, coming[backward].front());
    coming[backward].pop_front();
    ++next[backward];
    if (!backward) {
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
      send_out(&flight, pass);
      if (!splits) end(flight);
    }
    arrived(pass);
  }
  for (Outgoing& out : going_) wait(out.messages);
  going_.clear();
}
std::unique_ptr<Worker> make_pipeline_worker(const Plan& plan, Communicator& group,
                                             const ExecutorOptions& options) {
  return std::make_unique<PipelineWorker>(plan, group, options);
}

}  // namespace motley
