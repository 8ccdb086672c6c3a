// Sums of gradients over replicas and over the stages that share a parameter.
#include <algorithm>

#include "comm/reducing.h"
#include "comm/subgroup.h"
#include "runtime/pipeline_worker_parts.h"

namespace motley {

void PipelineWorker::reduce_over_replicas(const Local& local, std::vector<at::Tensor>& gradients) {
  const int replicas = static_cast<int>(pipeline_.replicas.size());
  if (replicas == 1) return;
  std::vector<size_t> alike, unlike, joint, divided;
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
    const std::vector<Layout> layouts = layouts_of(local, i);
    (std::equal(layouts.begin() + 1, layouts.end(), layouts.begin()) ? alike : unlike).push_back(i);
  }
  sum_unlike(local, unlike, gradients);
  scatter(local, divided, gradients);
  if (!joint.empty()) reduce_over(devices_of(pipeline_, local.stage), kJointTag, joint, gradients);
  if (!alike.empty()) reduce_over(peers_of(local), kReplicaTag, alike, gradients);
}

std::vector<Layout> PipelineWorker::layouts_of(const Local& local, size_t i) const {
  std::vector<Layout> layouts;
  for (size_t r = 0; r < pipeline_.replicas.size(); ++r)
    layouts.push_back(
        stored_layout(static_cast<int>(r), local.stage, graph(local).parameters[i].value));
  return layouts;
}

void PipelineWorker::sum_unlike(const Local& local, const std::vector<size_t>& which,
                                std::vector<at::Tensor>& gradients) {
  std::map<Classes, std::vector<size_t>> by_classes;  // the same on all workers, in the same order
  for (const size_t i : which) {
    const std::vector<Layout> layouts = layouts_of(local, i);
    by_classes[classes_of(static_cast<int>(layouts.size()), [&](int a, int b) {
      return layouts[a] == layouts[b];
    })].push_back(i);
  }
  for (const auto& [classes, parameters] : by_classes) {
    // Its class, and its place in there.
    size_t mine = 0, place = 0;
    for (size_t c = 0; c < classes.size(); ++c)
      for (size_t k = 0; k < classes[c].size(); ++k)
        if (classes[c][k] == replica_) mine = c, place = k;
    std::vector<int> ranks;
    for (const int r : classes[mine]) ranks.push_back(stage(r, local.stage).devices[rank_]);
    if (ranks.size() > 1) reduce_over(ranks, kReplicaTag, parameters, gradients);
    std::vector<Summand> groups(classes.size());
    for (size_t c = 0; c < classes.size(); ++c) {
      groups[c].from = &stage(met_by(place, classes[c]), local.stage).devices;
      for (size_t k = 0; k < classes[c].size(); ++k)
        if (met_by(k, classes[mine]) == replica_)
          groups[c].to.push_back(&stage(classes[c][k], local.stage).devices);
    }
    for (const size_t i : parameters) {
      const std::vector<Layout> layouts = layouts_of(local, i);
      for (size_t c = 0; c < classes.size(); ++c) groups[c].layout = layouts[classes[c].front()];
      gradients[i] = exchange(local, i, groups, static_cast<int>(mine), gradients[i]);
    }
  }
}

void PipelineWorker::reduce_over(const std::vector<int>& ranks, int tag,
                                 const std::vector<size_t>& which,
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

void PipelineWorker::reduce_tied(std::vector<std::vector<at::Tensor>>& gradients) {
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
    std::vector<Summand> groups;
    size_t own = 0;
    for (int s : tied.stages) {
      const auto& held = pipeline_.parts().parameter_of[s];
      const size_t i = std::find(held.begin(), held.end(), tied.parameter) - held.begin();
      const Parameter& parameter = pipeline_.graph(s).parameters[i];
      const std::vector<int>* devices = &stage(replica_, s).devices;
      groups.push_back({stored_layout(replica_, s, parameter.value),
                        parameter.gradient.valid(),
                        devices,
                        {devices}});
      if (s == local.stage) own = i;
    }
    gradients[l][own] = exchange(local, own, groups, static_cast<int>(mine - tied.stages.begin()),
                                 gradients[l][own]);
  }
}

at::TensorOptions PipelineWorker::gradient_type(const Local& local, size_t i) const {
  const int of_plan = pipeline_.parts().parameter_of[local.stage][i];
  return options_of(plan_.graph->spec(plan_.graph->parameters[of_plan].gradient));
}

Layout PipelineWorker::taken_in(const std::vector<Summand>& groups, int group) {
  const Layout& mine = groups[group].layout;
  if (!mine.pieces.empty() || mine.ranks == 1) return mine;
  Layout even{1, mine.numel(), 1, {}, mine.ranks};
  for (const Summand& other : groups)
    if (!other.layout.pieces.empty()) {  // cut alike, as the pieces of others are
      even = other.layout;
      even.ranks = mine.ranks;
      break;
    }
  even.pieces = divide(even.size, std::vector<double>(mine.ranks, 1));
  return even;
}

at::Tensor PipelineWorker::exchange(const Local& home, size_t i, const std::vector<Summand>& groups,
                                    int mine, at::Tensor local) {
  const at::TensorOptions type = gradient_type(home, i);
  const ValueId parameter = graph(home).parameters[i].value;
  const int count = static_cast<int>(groups.size());
  const Layout& own = groups[mine].layout;
  std::vector<std::unique_ptr<Message>> messages;
  struct Term {
    int group, sender;
    at::Tensor tensor;
  };
  std::vector<Term> parts;
  if (local.defined()) local = local.to(type);
  const Layout taken = taken_in(groups, mine);
  for (int g = 0; g < count; ++g) {
    if (g == mine) continue;
    const Summand& other = groups[g];
    if (other.has) {
      const Resharding in(other.layout, taken);
      for (int s = 0; s < other.layout.ranks; ++s)
        if (const int64_t n = in.count(s, rank_); n > 0) {
          at::Tensor part = at::empty({n}, type);
          messages.push_back(group_.receive(part, (*other.from)[s], kExchangeTag));
          parts.push_back({g, s, part});
        }
    }
    if (groups[mine].has && !other.to.empty()) {
      const Resharding out(own, taken_in(groups, g));
      for (int r = 0; r < other.layout.ranks; ++r) {
        if (out.count(rank_, r) == 0) continue;
        const at::Tensor part = out.extract(rank_, r, local);
        for (const std::vector<int>* devices : other.to)
          messages.push_back(group_.send(part, (*devices)[r], kExchangeTag));
      }
    }
  }
  wait(messages);
  at::Tensor total;
  for (int g = 0; g < count; ++g) {
    if (!groups[g].has) continue;
    const Resharding in(groups[g].layout, taken);
    at::Tensor term;
    if (g == mine) {
      term = in.extract(rank_, rank_, local);
    } else {
      term = at::empty({taken.numel(rank_)}, type);
      for (const Term& part : parts)
        if (part.group == g) in.insert(part.sender, rank_, part.tensor, term);
    }
    total = total.defined() ? total + term : term.clone();
  }
  if (taken != own) total = gather(taken, own, total);
  const Executor& executor = *home.executor;
  return total.reshape(executor.local_shape(parameter, executor.stored(parameter)));
}

at::Tensor PipelineWorker::gather(const Layout& pieces, const Layout& whole,
                                  const at::Tensor& mine) {
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

at::Tensor PipelineWorker::whole(const Owner& owner, const at::Tensor& local, bool everywhere) {
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

}  // namespace motley
