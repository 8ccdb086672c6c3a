// State of parameters that replicas divide.
#include <algorithm>

#include "comm/subgroup.h"
#include "runtime/pipeline_worker_parts.h"

namespace motley {

void PipelineWorker::gather_parameters(Local& local) {
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

void PipelineWorker::scatter(const Local& local, const std::vector<size_t>& which,
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

void PipelineWorker::sum_pass(Local& local, int64_t number) {
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

std::vector<at::Tensor> PipelineWorker::take_sums(Local& local) {
  std::vector<at::Tensor> gradients(local.sums.size());
  std::swap(gradients, local.sums);
  const Graph& of_stage = graph(local);
  for (size_t i = 0; i < gradients.size(); ++i)
    if (gradients[i].defined())
      gradients[i] =
          gradients[i].to(to_torch(of_stage.spec(of_stage.parameters[i].gradient).dtype));
  return gradients;
}

void PipelineWorker::scatter_tied(const Local& local, std::vector<at::Tensor>& gradients) {
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

at::Tensor PipelineWorker::gathered(int parameter, const at::Tensor& local) {
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

}  // namespace motley
