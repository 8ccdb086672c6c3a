#include "plan/pipeline.h"

#include <algorithm>
#include <limits>
#include <map>
#include <set>

#include "cluster/part.h"
#include "core/error.h"
#include "cost/storage.h"
#include "plan/alike.h"

namespace motley {

double computed_again(const Theory& theory, const StagePlan& stage) {
  if (stage.recompute) return 1;
  int again = 0, once = 0;
  for (const Step& step : stage.program.steps) {
    if (!step.is_compute()) continue;
    const Node& node = theory.graph().node(step.node);
    const OpDef* op = node.phase == Phase::forward && !is_source(node) ? find_op(node.op) : nullptr;
    if (op && op->flops) ++(step.again ? again : once);
  }
  return once > 0 ? static_cast<double>(again) / once : 0;
}

void PipelinePlan::take_parts(const Theory& whole, int64_t batch, const std::string& where) {
  if (micro_batch < 1 || batch % micro_batch != 0)
    throw user_error("plan", "{}: a batch of {} is not made of micro-batches of {}", where, batch,
                     micro_batch);
  if (whole.segments() > 1)
    throw user_error("plan", "{}: a pipeline has no segments; its stages have ratios of their own",
                     where);
  const int64_t parts = batch / micro_batch;
  if (parts > kMaxMicroBatches)
    throw user_error("plan", "{}: {} micro-batches are more than {}", where, parts,
                     kMaxMicroBatches);
  part_ =
      std::make_shared<MicroBatch>(micro_batch_of(whole, batch, static_cast<int>(parts), where));
}

void PipelinePlan::cut(int stages, const std::string& where) {
  theories_.clear();
  parts_ = std::make_unique<Stages>(cut_stages(part_->graph, stage_of, stages, where));
  like_.clear();
  std::vector<int> firsts;  // of those that are alike
  for (int s = 0; s < stages; ++s) {
    const auto first = std::find_if(firsts.begin(), firsts.end(),
                                    [&](int f) { return same_but_for_names(graph(f), graph(s)); });
    like_.push_back(first == firsts.end() ? s : *first);
    if (like_[s] == s) firsts.push_back(s);
    theories_.push_back(like_[s] == s ? std::make_unique<Theory>(graph(s))
                                      : std::make_unique<Theory>(*theories_[like_[s]], graph(s)));
  }
}

int PipelinePlan::micro_batches() const {
  int sum = 0;
  for (const ReplicaPlan& replica : replicas) sum += replica.micro_batches;
  return sum;
}

std::vector<Seat> PipelinePlan::seats(int device) const {
  std::vector<Seat> list;
  for (size_t r = 0; r < replicas.size() && list.empty(); ++r)
    for (size_t s = 0; s < replicas[r].stages.size(); ++s) {
      const std::vector<int>& devices = replicas[r].stages[s].devices;
      auto it = std::lower_bound(devices.begin(), devices.end(), device);
      if (it == devices.end() || *it != device) continue;
      list.push_back(
          {static_cast<int>(r), static_cast<int>(s), static_cast<int>(it - devices.begin())});
    }
  return list;
}

std::vector<int> devices_of(const PipelinePlan& plan, int stage) {
  std::vector<int> devices;
  for (const ReplicaPlan& replica : plan.replicas)
    devices.insert(devices.end(), replica.stages[stage].devices.begin(),
                   replica.stages[stage].devices.end());
  std::sort(devices.begin(), devices.end());
  return devices;
}

bool JointGradients::any() const {
  return std::find(gradient.begin(), gradient.end(), true) != gradient.end();
}

bool DividedState::any() const {
  return std::find(optimizer.begin(), optimizer.end(), true) != optimizer.end();
}

namespace {

// [parameter of the stage] Whether all replicas hold it in the same pieces.
std::vector<bool> alike_in_replicas(const PipelinePlan& plan, int stage) {
  const Theory& theory = plan.theory(stage);
  const auto& parameters = plan.graph(stage).parameters;
  const StagePlan& first = plan.replicas[0].stages[stage];
  const std::vector<Placement> stored = stored_placements(theory, first.program);
  const Shares shares(first.ratios);
  std::vector<bool> alike(parameters.size(), true);
  for (size_t r = 1; r < plan.replicas.size(); ++r) {
    const StagePlan& other = plan.replicas[r].stages[stage];
    if (other.devices.size() != first.devices.size()) return std::vector<bool>(alike.size(), false);
    if (other.program.steps == first.program.steps && other.ratios == first.ratios) continue;
    const std::vector<Placement> placed = stored_placements(theory, other.program);
    const Shares theirs(other.ratios);
    for (size_t i = 0; i < parameters.size(); ++i) {
      const ValueId v = parameters[i].value;
      const Placement p = stored[v.index];
      alike[i] = alike[i] && placed[v.index] == p &&
                 (!p.is_shard() || shares.of(theory.cut(v, p)) == theirs.of(theory.cut(v, p)));
    }
  }
  return alike;
}

}  // namespace

DividedState divided_state(const PipelinePlan& plan, int stage) {
  DividedState divided;
  const auto replicas = plan.replicas.size();
  divided.shares.assign(replicas, 1.0 / static_cast<double>(replicas));
  if (plan.level(stage) == 0 || replicas == 1) return divided;
  if (const std::vector<double>& shares = plan.zero[stage].shares; !shares.empty()) {
    double sum = 0;
    for (double share : shares) sum += share;
    for (size_t r = 0; r < replicas; ++r) divided.shares[r] = shares[r] / sum;
  }
  divided.optimizer = alike_in_replicas(plan, stage);
  const auto& parameters = plan.graph(stage).parameters;
  for (size_t i = 0; i < parameters.size(); ++i)
    divided.optimizer[i] = divided.optimizer[i] && parameters[i].gradient.valid();
  divided.tied.assign(parameters.size(), false);
  const auto& of_plan = plan.parts().parameter_of[stage];
  for (const Tied& t : plan.parts().tied) {
    const auto it = std::find(of_plan.begin(), of_plan.end(), t.parameter);
    if (it == of_plan.end()) continue;
    const auto i = static_cast<size_t>(it - of_plan.begin());
    divided.tied[i] = true;
    for (int s : t.stages) {
      const auto& theirs = plan.parts().parameter_of[s];
      const auto k = std::find(theirs.begin(), theirs.end(), t.parameter) - theirs.begin();
      divided.optimizer[i] = divided.optimizer[i] && plan.level(s) > 0 &&
                             alike_in_replicas(plan, s)[k] &&
                             plan.graph(s).parameters[k].gradient.valid();
    }
  }
  if (plan.level(stage) < 2) return divided;
  divided.gradient = divided.optimizer;
  for (size_t i = 0; i < divided.tied.size(); ++i)
    divided.gradient[i] = divided.gradient[i] && !divided.tied[i];
  return divided;
}

std::vector<DividedState> divided_states(const PipelinePlan& plan) {
  std::vector<DividedState> list;
  for (int s = 0; s < plan.stages(); ++s) list.push_back(divided_state(plan, s));
  return list;
}

std::vector<std::vector<int>> stage_groups(const ReplicaPlan& replica) {
  std::vector<std::vector<int>> groups;
  std::map<int, size_t> group_of;  // by first device
  for (size_t s = 0; s < replica.stages.size(); ++s) {
    auto [it, fresh] = group_of.try_emplace(replica.stages[s].devices[0], groups.size());
    if (fresh) groups.emplace_back();
    groups[it->second].push_back(static_cast<int>(s));
  }
  return groups;
}

std::vector<Pass> passes_of(const ReplicaPlan& replica, const std::vector<int>& group, int groups) {
  const int count = replica.micro_batches;
  std::vector<Pass> forward, backward, order;
  for (int block = 0; block < count; block += groups)
    for (size_t k = 0; k < group.size(); ++k)
      for (int m = block; m < std::min(block + groups, count); ++m) {
        forward.push_back({group[k], m, PassKind::forward});
        backward.push_back({group[group.size() - 1 - k], m, PassKind::backward});
      }
  const size_t warm_up =
      std::min(static_cast<size_t>(replica.stages[group[0]].warm_up), forward.size());
  order.assign(forward.begin(), forward.begin() + static_cast<std::ptrdiff_t>(warm_up));
  const StagePlan& alone = replica.stages[group[0]];
  const bool splits = group.size() == 1 && has_later(alone.program);
  const auto behind = static_cast<size_t>(alone.weights_behind);
  const auto weights = [&](size_t k) {
    order.push_back({group[0], backward[k].micro_batch, PassKind::weights});
  };
  for (size_t k = 0; k < backward.size(); ++k) {
    order.push_back(backward[k]);
    if (splits && k >= behind) weights(k - behind);
    if (k + warm_up < forward.size()) order.push_back(forward[k + warm_up]);
  }
  for (size_t k = backward.size() - std::min(behind, backward.size());
       splits && k < backward.size(); ++k)
    weights(k);
  return order;
}

Ticks ticks_of(const ReplicaPlan& replica) {
  constexpr int kNever = std::numeric_limits<int>::max();
  const int stages = static_cast<int>(replica.stages.size());
  const auto groups = stage_groups(replica);
  Ticks ticks(stages, std::vector<std::vector<int>>(
                          3, std::vector<int>(static_cast<size_t>(replica.micro_batches), kNever)));
  std::vector<std::vector<Pass>> orders;
  for (const auto& group : groups)
    orders.push_back(passes_of(replica, group, static_cast<int>(groups.size())));
  std::vector<size_t> next(groups.size(), 0);
  for (int now = 0;; ++now) {
    bool moved = false, done = true;
    for (size_t g = 0; g < groups.size(); ++g) {
      if (next[g] == orders[g].size()) continue;
      done = false;
      const Pass& pass = orders[g][next[g]];
      const int m = pass.micro_batch;
      int after = -1;  // the tick of what it reads
      if (pass.kind == PassKind::backward) {
        after = ticks[pass.stage][0][m];
        if (pass.stage + 1 < stages) after = std::max(after, ticks[pass.stage + 1][1][m]);
      } else if (pass.kind == PassKind::forward && pass.stage > 0) {
        after = ticks[pass.stage - 1][0][m];
      }
      if (after >= now) continue;
      ticks[pass.stage][static_cast<int>(pass.kind)][m] = now;
      ++next[g];
      moved = true;
    }
    if (done) return ticks;
    if (!moved) return {};
  }
}

namespace {

// The all-reduces of a program's reduction that lead to whole gradients by views alone.
struct LateSums {
  std::vector<int> step;    // [parameter] -1: none
  std::set<int> otherwise;  // those that something else reads too
};

LateSums late_sums(const Theory& theory, const Program& program) {
  const Graph& graph = theory.graph();
  LateSums late;
  std::map<std::pair<ValueId, Placement>, int> origin;
  const int end = static_cast<int>(program.steps.size());
  for (int s = phases_of(theory, program).reduction; s < end; ++s) {
    const Step& step = program.steps[s];
    if (step.is_compute()) {
      const Triple& triple = theory.triples(step.node)[step.triple];
      const Node& node = graph.node(step.node);
      auto it = origin.find({graph.inputs_of(node)[0], triple.in[0]});
      if (it != origin.end()) origin[{node.outputs[0], triple.out[0]}] = it->second;
      continue;
    }
    if (auto it = origin.find({step.value, step.from}); it != origin.end())
      late.otherwise.insert(it->second);
    if (step.kind == Collective::all_reduce) origin[{step.value, step.to}] = s;
  }
  const std::vector<Placement> stored = stored_placements(theory, program);
  for (const Parameter& p : graph.parameters) {
    auto it = p.gradient.valid() ? origin.find({p.gradient, stored[p.value.index]}) : origin.end();
    late.step.push_back(it == origin.end() ? -1 : it->second);
  }
  return late;
}

// Calls visit(pass, micro-batches of every stage of the group in flight, the pass's own included).
template <typename F>
void follow(const ReplicaPlan& replica, const std::vector<int>& group, int groups, F visit) {
  std::map<int, int> held;
  for (const Pass& pass : passes_of(replica, group, groups)) {
    if (pass.kind == PassKind::forward) ++held[pass.stage];
    visit(pass, held);
    if (pass.kind == PassKind::backward) --held[pass.stage];
  }
}

}  // namespace

JointGradients joint_gradients(const PipelinePlan& plan, int stage) {
  JointGradients joint;
  const size_t replicas = plan.replicas.size(), parameters = plan.graph(stage).parameters.size();
  joint.gradient.assign(parameters, replicas > 1);
  joint.steps.resize(replicas);
  std::vector<LateSums> late;
  for (const ReplicaPlan& replica : plan.replicas) {
    late.push_back(late_sums(plan.theory(stage), replica.stages[stage].program));
    for (size_t p = 0; p < parameters; ++p)
      joint.gradient[p] = joint.gradient[p] && late.back().step[p] >= 0;
  }
  // A sum is left out for all gradients that come of it or for none.
  for (bool changed = true; changed;) {
    changed = false;
    for (LateSums& sums : late)
      for (size_t p = 0; p < parameters; ++p) {
        if (!joint.gradient[p] && sums.step[p] >= 0) sums.otherwise.insert(sums.step[p]);
        if (!joint.gradient[p] || !sums.otherwise.count(sums.step[p])) continue;
        joint.gradient[p] = false;
        changed = true;
      }
  }
  for (size_t r = 0; r < replicas; ++r) {
    std::set<int> steps;
    for (size_t p = 0; p < parameters; ++p)
      if (joint.gradient[p]) steps.insert(late[r].step[p]);
    joint.steps[r].assign(steps.begin(), steps.end());
  }
  return joint;
}

JointGradients joint_gradients(const PipelinePlan& plan, int stage,
                               const std::vector<ReductionProgram>& reductions, int cluster_size) {
  bool ranks = false;
  for (const ReplicaPlan& replica : plan.replicas)
    ranks = ranks || replica.stages[stage].devices.size() > 1;
  if (ranks && plan.replicas.size() > 1 && plan.level(stage) == 0 &&
      !programs_for(reductions, devices_of(plan, stage), cluster_size).empty())
    return joint_gradients(plan, stage);
  JointGradients none;
  none.gradient.assign(plan.graph(stage).parameters.size(), false);
  none.steps.resize(plan.replicas.size());
  return none;
}

int in_flight(const ReplicaPlan& replica, int stage) {
  const auto groups = stage_groups(replica);
  for (const auto& group : groups) {
    if (group.size() == 1 || !std::binary_search(group.begin(), group.end(), stage)) continue;
    int most = 0;
    follow(replica, group, static_cast<int>(groups.size()),
           [&](const Pass&, std::map<int, int>& held) { most = std::max(most, held[stage]); });
    return most;
  }
  return std::min(replica.stages[stage].warm_up, replica.micro_batches);
}

int waiting(const ReplicaPlan& replica, int stage) {
  const StagePlan& plan = replica.stages[stage];
  return has_later(plan.program) ? std::min(plan.weights_behind, replica.micro_batches - 1) : 0;
}

namespace {

// Micro-batches whose gradients may be on their way back from a stage: those that an earlier stage
// takes in before its next forward pass tells that they have arrived.
int on_the_way_back(const PipelinePlan& plan, int replica, int stage) {
  const ReplicaPlan& of = plan.replicas[replica];
  int most = 0;
  for (const Transfer& t : plan.parts().transfers) {
    const Graph& from = plan.graph(t.from);
    if (t.from != stage || from.node(from.value(t.made).producer).phase != Phase::backward)
      continue;
    most = std::max(most, t.to < stage ? in_flight(of, t.to) : of.micro_batches);
  }
  return most;
}

}  // namespace

Bytes whole_batch(const PipelinePlan& plan) {
  const MicroBatch& micro = plan.part();
  Bytes bytes = 0;
  for (size_t i = 0; i < micro.graph.inputs.size(); ++i)
    bytes += static_cast<Bytes>(micro.graph.spec(micro.graph.inputs[i].value).bytes()) *
             (micro.inputs[i].is_whole() ? 1 : micro.parts);
  return bytes;
}

int tied_among(const PipelinePlan& plan, int stage) {
  size_t groups = 1;
  for (const Tied& tied : plan.parts().tied)
    if (std::count(tied.stages.begin(), tied.stages.end(), stage) > 0)
      groups = std::max(groups, tied.stages.size());
  return static_cast<int>(groups);
}

int exchanged_among(const PipelinePlan& plan, int stage) {
  const Classes classes = classes_of(static_cast<int>(plan.replicas.size()), [&](int a, int b) {
    const StagePlan &x = plan.replicas[a].stages[stage], &y = plan.replicas[b].stages[stage];
    return x.devices.size() == y.devices.size() && x.ratios == y.ratios &&
           x.program.steps == y.program.steps;
  });
  return std::max(static_cast<int>(classes.size()), tied_among(plan, stage));
}

std::vector<Bytes> reduction_workspace(const Theory& theory, const Program& program, int groups,
                                       bool replicas, const Fractions& fractions, int types) {
  const Graph& graph = theory.graph();
  const std::vector<Placement> stored = stored_placements(theory, program);
  std::vector<Bytes> all(types, 0), largest(types, 0), result(types, 0);
  Bytes whole = 0;
  for (const Parameter& p : graph.parameters) {
    if (!p.gradient.valid()) continue;
    const auto bytes = static_cast<Bytes>(graph.spec(p.value).bytes());
    const auto& f = fractions.by_type(theory.cut(p.value, stored[p.value.index]));
    whole = std::max(whole, bytes);
    for (int t = 0; t < types; ++t) {
      all[t] += bytes * f[t];
      largest[t] = std::max(largest[t], bytes * f[t]);
    }
  }
  for (int t = 0; t < types; ++t) {
    if (replicas) result[t] = bucket_workspace(all[t], largest[t]);
    if (groups > 1)
      result[t] =
          std::max(result[t], static_cast<Bytes>(groups + 2) * std::min(whole, 2 * largest[t]));
  }
  return result;
}

std::vector<Bytes> group_memory(const PipelinePlan& plan, int replica,
                                const std::vector<int>& group, const Cluster& sub_cluster,
                                Optimizer optimizer, const std::vector<DividedState>& divided,
                                const KnownMemory& known) {
  const ReplicaPlan& of = plan.replicas[replica];
  const int types = static_cast<int>(sub_cluster.types.size());
  std::map<int, MemoryCost> memory;  // [stage]
  std::map<int, int> back;           // [stage]
  std::vector<Bytes> bytes(types, 0);
  for (int s : group) {
    const Shares shares(of.stages[s].ratios);
    const Fractions fractions(sub_cluster, shares);
    const ZeroShare kept = divided[s].kept(replica);
    const MemoryCost* whole =
        known && kept.optimizer.empty() && kept.gradient.empty() ? known(replica, s) : nullptr;
    memory[s] = whole ? *whole
                      : memory_of(plan.theory(s), of.stages[s].program, fractions, types, optimizer,
                                  true, kept);
    back[s] = on_the_way_back(plan, replica, s);
    for (int t = 0; t < types; ++t) bytes[t] += memory[s].state[t] + memory[s].sums[t];
  }
  // Beside what stays, a stage's pass needs what is above it at the stage's peak, and what other
  // micro-batches hold.
  std::vector<Bytes> most(types, 0);
  auto take = [&](int stage, const std::map<int, int>& held) {
    for (int t = 0; t < types; ++t) {
      Bytes b = memory.at(stage).peak[t] - memory.at(stage).state[t];
      for (const auto& [s, n] : held)
        b += (n - (s == stage)) * memory.at(s).another(t, of.stages[s].recompute) +
             std::max(0, back.at(s) - n) * memory.at(s).sent_back[t] +
             waiting(of, s) * memory.at(s).waiting[t];
      most[t] = std::max(most[t], b);
    }
  };
  if (group.size() == 1) {
    take(group[0], {{group[0], in_flight(of, group[0])}});
  } else {
    follow(of, group, static_cast<int>(stage_groups(of).size()),
           [&](const Pass& pass, std::map<int, int>& held) { take(pass.stage, held); });
  }
  const Bytes batch = whole_batch(plan);
  std::vector<Bytes> once(types, 0);  // at the end of the step
  for (int s : group) {
    const Shares shares(of.stages[s].ratios);
    const std::vector<Bytes> more =
        reduction_workspace(plan.theory(s), of.stages[s].program, exchanged_among(plan, s),
                            plan.replicas.size() > 1, Fractions(sub_cluster, shares), types);
    for (int t = 0; t < types; ++t) once[t] = std::max(once[t], more[t]);
  }
  for (int t = 0; t < types; ++t) bytes[t] += batch + std::max(most[t], once[t]);
  return bytes;
}

namespace {

// Whether a replica's devices hold what those of another do, rank by rank.
bool held_alike(const PipelinePlan& plan, const Cluster& cluster, size_t a, size_t b,
                const std::vector<DividedState>& divided) {
  const ReplicaPlan &x = plan.replicas[a], &y = plan.replicas[b];
  if (x.micro_batches != y.micro_batches || stage_groups(x) != stage_groups(y)) return false;
  for (int s = 0; s < plan.stages(); ++s) {
    const StagePlan &p = x.stages[s], &q = y.stages[s];
    if (p.devices.size() != q.devices.size() || p.warm_up != q.warm_up ||
        p.weights_behind != q.weights_behind || p.recompute != q.recompute ||
        p.ratios != q.ratios || divided[s].shares[a] != divided[s].shares[b])
      return false;
    for (size_t i = 0; i < p.devices.size(); ++i)
      if (cluster.devices[p.devices[i]].type != cluster.devices[q.devices[i]].type) return false;
  }
  for (int s = 0; s < plan.stages(); ++s)  // last, as programs are long
    if (x.stages[s].program.steps != y.stages[s].program.steps) return false;
  return true;
}

}  // namespace

std::vector<Bytes> pipeline_memory(const PipelinePlan& plan, const Cluster& cluster,
                                   Optimizer optimizer, const KnownMemory& known) {
  std::vector<Bytes> bytes(cluster.size(), 0);
  const std::vector<DividedState> divided = divided_states(plan);
  std::vector<size_t> unlike;  // replicas, each the first of those alike
  for (size_t r = 0; r < plan.replicas.size(); ++r) {
    const auto like = std::find_if(unlike.begin(), unlike.end(), [&](size_t u) {
      return held_alike(plan, cluster, u, r, divided);
    });
    if (like != unlike.end()) {
      for (int s = 0; s < plan.stages(); ++s) {
        const std::vector<int>&from = plan.replicas[*like].stages[s].devices,
              &to = plan.replicas[r].stages[s].devices;
        for (size_t i = 0; i < to.size(); ++i) bytes[to[i]] = bytes[from[i]];
      }
      continue;
    }
    unlike.push_back(r);
    for (const auto& group : stage_groups(plan.replicas[r])) {
      const std::vector<int>& devices = plan.replicas[r].stages[group[0]].devices;
      const Cluster part = part_of(cluster, devices);
      const std::vector<Bytes> by_type =
          group_memory(plan, static_cast<int>(r), group, part, optimizer, divided, known);
      for (size_t i = 0; i < devices.size(); ++i) bytes[devices[i]] = by_type[part.devices[i].type];
    }
  }
  return bytes;
}

}  // namespace motley
