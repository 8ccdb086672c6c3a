// Messages between the stages of a pipeline.
#include <iterator>

#include "core/error.h"
#include "runtime/pipeline_worker_parts.h"

namespace motley {

void PipelineWorker::wait(std::vector<std::unique_ptr<Message>>& messages) {
  if (messages.empty()) return;
  if (before_) before_(false);
  for (auto& message : messages) message->wait();
  if (after_) after_(false, nullptr);
}

std::vector<PipelineWorker::Incoming> PipelineWorker::post(const Pass& pass) {
  std::vector<Incoming> list;
  const Local& local = of(pass.stage);
  const Executor& executor = *local.executor;
  for (const Route& route : local.routes) {
    if (route.sends || route.transfer.backward != (pass.kind == PassKind::backward)) continue;
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

std::vector<std::pair<ValueId, at::Tensor>> PipelineWorker::take_in(const Pass& pass,
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

void PipelineWorker::send_out(Executor::Flight* flight, const Pass& pass) {
  Local& local = of(pass.stage);
  std::map<ValueId, at::Tensor> values;
  for (const Route& route : local.routes) {
    if (!route.sends || made_backward(route.transfer) != (pass.kind == PassKind::backward))
      continue;
    const ValueId v = route.transfer.made;
    if (!values.count(v)) values[v] = local.executor->take(flight, v);
    Outgoing out{
        pass.stage, route.transfer.to, pass.micro_batch, pass.kind == PassKind::backward, {}};
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

bool PipelineWorker::made_backward(const Transfer& t) const {
  const Graph& from = pipeline_.graph(t.from);
  return from.node(from.value(t.made).producer).phase == Phase::backward;
}

void PipelineWorker::arrived(const Pass& pass) {
  for (auto out = going_.begin(); out != going_.end();) {
    const bool known = out->from == pass.stage &&
                       (pass.kind == PassKind::backward
                            ? !out->backward && out->micro_batch <= pass.micro_batch
                            : out->backward && out->to < out->from &&
                                  taken_before_[out->to][out->micro_batch] <= pass.micro_batch);
    if (known) wait(out->messages);
    out = known ? going_.erase(out) : std::next(out);
  }
}

}  // namespace motley
