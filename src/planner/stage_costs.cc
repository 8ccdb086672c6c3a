#include "planner/stage_costs.h"

#include <algorithm>
#include <limits>
#include <set>

#include "cluster/backend.h"
#include "cost/cost.h"
#include "net/messages.h"
#include "spmd/recompute.h"

namespace motley::planner {

namespace {

constexpr size_t kTogether = 16;    // slices that are planned at the same time, or more
constexpr double kMuchState = 0.5;  // of a device's memory: it is cut, or divided
// Micro-batches that a stage is taken to hold where its backward passes compute again.
constexpr double kInFlight = 4;

Bytes least_memory(const Cluster& cluster) {
  Bytes least = std::numeric_limits<double>::infinity();
  for (const DeviceType& type : cluster.types) least = std::min(least, type.memory);
  return least;
}

}  // namespace

StageCosts::StageCosts(const PlanOptions& request, DeviceGroups* groups,
                       const net::Topology& topology, LayeredGraph* graph,
                       std::vector<const Part*> use, int64_t micro_batch)
    : request_(request),
      groups_(*groups),
      topology_(topology),
      graph_(*graph),
      use_(std::move(use)),
      micro_batch_(micro_batch),
      runs_(static_cast<int>(request.batch / micro_batch)) {
  const std::vector<int> block = spmd::blocks_of(graph_.graph());
  for (const pipeline::Layer& layer : graph_.layers().layers) {
    block_.push_back(-1);
    for (NodeId n : layer.forward) block_.back() = std::max(block_.back(), block[n.index]);
  }
  std::vector<LayeredGraph::OnGroup> alone;
  for (const Part* p : use_) {
    devices_ += p->shape.size();
    for (int d : p->devices) alone.push_back({&groups_.of({d})});
  }
  graph_.plan_layers(alone, runs_);
  const Backend backend = backend_of(groups_.whole());
  Bytes sent = 0, all = 0;
  for (const Parameter& p : graph_.graph().parameters) {
    if (!p.gradient.valid()) continue;
    const TensorSpec& gradient = graph_.graph().spec(p.gradient);
    sent += static_cast<Bytes>(gradient.bytes()) *
            widening(backend, Collective::all_reduce, is_half(gradient.dtype));
    all += static_cast<Bytes>(graph_.graph().spec(p.value).bytes());
  }
  if (all > 0) travels_ = sent / all;
}

void StageCosts::take_bounds(LayeredGraph* larger, int64_t samples) {
  if (larger->size() != graph_.size()) return;
  larger_ = larger;
  larger_samples_ = samples;
}

pipeline::SearchProblem StageCosts::problem(bool bound) {
  bound_ = bound;
  slices_.clear();
  pipeline::SearchProblem problem;
  for (const Part* p : use_) problem.clusters.push_back(p->shape);
  problem.layers = graph_.size();
  for (int l = 0; l < graph_.size(); ++l) problem.layer_class.push_back(graph_.cost_class(l));
  problem.batch = request_.batch;
  problem.stage_cost = [this](const pipeline::StageQuery& q) { return profile(q); };
  problem.link_cost = [this](int layer, int from, int to, int64_t, int pipelines) {
    const auto seconds = [&](int sender, int receiver, Bytes bytes) {
      auto [it, fresh] = crossings_.try_emplace({sender, receiver, bytes, pipelines});
      if (fresh) it->second = crossing(sender, receiver, bytes, pipelines);
      return it->second;
    };
    const pipeline::Layer& next = graph_.layers().layers[layer];
    return pipeline::LinkTime{seconds(from, to, next.boundary), seconds(to, from, next.gradients)};
  };
  if (const Bytes tied = graph_.tied(); tied > 0)
    problem.tied_cost = [this, tied](int first, int last, int pipelines) {
      return crossing(last, first, tied, pipelines);
    };
  return problem;
}

void StageCosts::find_slices(const std::vector<int>& pipelines, bool all) {
  std::vector<LayeredGraph::OnGroup> wanted;
  unequal_.clear();
  for (int c = 0; c < static_cast<int>(use_.size()); ++c)
    for (pipeline::Shapes shapes : {pipeline::Shapes::paper, pipeline::Shapes::uneven})
      for (int count : pipelines) {
        const int share = part(c).shape.size() / count;
        for (int d = 0; d < (part(c).shape.kinds.empty() ? 1 : share); ++d)
          pipeline::for_each_mesh(part(c).shape, c, shapes, d,
                                  [&](const pipeline::Mesh& mesh, int behind) {
                                    if (behind > share) return;
                                    const LayeredGraph::OnGroup group = on(mesh, count);
                                    const bool equal = group.group->cluster.types.size() == 1;
                                    if (!equal) unequal_.push_back(group);
                                    if (all) wanted.push_back(group);
                                  });
      }
  graph_.plan_layers(wanted, runs_);
}

bool StageCosts::plan(const std::vector<pipeline::PipelinePlan>& plans) {
  std::set<std::pair<int, bool>> wanted;  // number of a group, lean
  std::vector<LayeredGraph::OnGroup> groups;
  const auto want = [&](const LayeredGraph::OnGroup& on) {
    if (!graph_.knows(on, runs_) && wanted.emplace(on.group->number, on.lean).second)
      groups.push_back(on);
  };
  for (const pipeline::PipelinePlan& plan : plans)
    for (const pipeline::Stage& stage : plan.stages) want(on(stage.mesh, plan.pipelines));
  if (groups.empty()) return false;
  if (std::any_of(groups.begin(), groups.end(), [](const LayeredGraph::OnGroup& on) {
        return on.group->cluster.types.size() > 1;
      }))
    for (const LayeredGraph::OnGroup& on : unequal_)
      if (groups.size() < kTogether) want(on);
  graph_.plan_layers(groups, runs_);
  return true;
}

LayeredGraph::OnGroup StageCosts::on(const pipeline::Mesh& mesh, int pipelines) {
  LayeredGraph::OnGroup on{&groups_.of(devices_of(part(mesh.cluster), mesh))};
  // A slice gets about its share of the model. Where the state of that share, whole on every
  // device, takes most of a device's memory, it is cut.
  const double share = static_cast<double>(mesh.size()) * pipelines / devices_;
  const auto parameters = static_cast<Bytes>(graph_.graph().parameter_bytes());
  on.lean = request_.memory_limit && mesh.size() > 1 &&
            parameters * (2 + state_factor(request_.optimizer)) * share >
                kMuchState * least_memory(on.group->cluster);
  return on;
}

std::vector<std::pair<const DeviceGroups::Kind*, int>> StageCosts::types_of(
    const pipeline::Mesh& mesh) {
  std::map<int, std::pair<int, int>> types;  // a device, how many
  for (int d : devices_of(part(mesh.cluster), mesh))
    ++types.try_emplace(groups_.whole().devices[d].type, d, 0).first->second.second;
  std::vector<std::pair<const DeviceGroups::Kind*, int>> result;
  for (const auto& [type, of_type] : types)
    result.emplace_back(&groups_.of({of_type.first}), of_type.second);
  return result;
}

LayeredGraph::LayerCost StageCosts::bound(const pipeline::Mesh& mesh, int layer,
                                          const LayeredGraph::OnGroup& group) {
  LayeredGraph::LayerCost cost;
  if (const int runs = static_cast<int>(request_.batch / std::max<int64_t>(1, larger_samples_));
      larger_ != nullptr && larger_->knows(group, runs)) {
    const LayeredGraph::LayerCost& known =
        larger_->layer_cost(layer, *group.group, runs, group.lean);
    const double part = static_cast<double>(micro_batch_) / static_cast<double>(larger_samples_);
    cost.feasible = known.feasible;
    cost.seconds = known.seconds;
    cost.seconds.forward *= part;
    cost.seconds.backward *= part;
    return cost;
  }
  double forward = 0, backward = 0;  // per second
  for (const auto& [one, count] : types_of(mesh)) {
    const LayeredGraph::LayerCost& alone = graph_.layer_cost(layer, *one, runs_, false);
    if (!alone.feasible) continue;
    cost.feasible = true;
    forward += count / alone.seconds.forward;
    backward += count / alone.seconds.backward;
  }
  cost.seconds.forward = 1 / forward;
  cost.seconds.backward = 1 / backward;
  return cost;
}

StageCosts::Slice StageCosts::slice(const pipeline::Mesh& mesh, int pipelines) {
  request_.limits.deadline.check();
  Slice slice;
  const LayeredGraph::OnGroup group = on(mesh, pipelines);
  const bool bounded = bound_ || !graph_.knows(group, runs_);
  slice.devices = mesh.size();
  slice.memory = part(mesh.cluster).shape.memory;
  slice.lean = group.lean;
  const double scale = slice.memory / least_memory(group.group->cluster);
  const auto add = [](auto* sums, auto more) { sums->push_back(sums->back() + more); };
  for (int l = 0; l < graph_.size(); ++l) {
    const LayeredGraph::LayerCost cost =
        bounded ? bound(mesh, l, group) : graph_.layer_cost(l, *group.group, runs_, group.lean);
    add(&slice.infeasible, cost.feasible ? 0 : 1);
    add(&slice.forward, cost.seconds.forward);
    add(&slice.backward, cost.seconds.backward);
    add(&slice.once, cost.seconds.reduction + cost.seconds.update);
    add(&slice.state, scale * cost.state);
    add(&slice.held, scale * cost.held);
    add(&slice.late, scale * cost.late);
    add(&slice.own, travels_ * graph_.layers().layers[l].parameters);
    slice.workspace.push_back(scale * cost.workspace);
    slice.held_inputs.push_back(scale * cost.held_inputs);
  }
  if (pipelines > 1 && !bounded) {
    std::vector<int> a = share_of(part(mesh.cluster), pipelines, 0),
                     b = share_of(part(mesh.cluster), pipelines, 1);
    a.resize(mesh.size());
    b.resize(mesh.size());
    const double rounds = 2.0 * (pipelines - 1) / pipelines;
    const Seconds one = handover(groups_.whole(), a, b, 1e6, true),
                  two = handover(groups_.whole(), a, b, 2e6, true);
    slice.reduce_byte = rounds * (two - one) / 1e6;
    slice.reduce_latency = rounds * (2 * one - two);
  }
  return slice;
}

void StageCosts::compute_again(const Slice& on, int first, int last, Bytes* workspace,
                               Bytes* activation) const {
  Bytes most = 0, kept = 0;  // of a block that is there again; in front of blocks and outside
  for (int l = first; l <= last;) {
    const int b = l;
    Bytes own = on.workspace[l];
    for (; l <= last && block_[l] == block_[b]; ++l) own = std::max(own, on.workspace[l]);
    const Bytes held = on.held[l] - on.held[b];
    most = std::max(most, block_[b] < 0 ? own : own + held);
    kept += block_[b] < 0 ? held : on.held_inputs[b];
  }
  const Bytes whole = *workspace + *activation, came_in = on.held_inputs[first];
  const bool by_block = most + kInFlight * kept < whole + kInFlight * came_in;
  *workspace = by_block ? most : whole;
  *activation = by_block ? kept : came_in;
}

pipeline::StageProfile StageCosts::profile(const pipeline::StageQuery& q) {
  pipeline::StageProfile profile;
  auto [it, fresh] =
      slices_.try_emplace({q.mesh.cluster, q.mesh.at, q.mesh.nodes, q.mesh.devices, q.pipelines});
  if (fresh) it->second = slice(q.mesh, q.pipelines);
  const Slice& on = it->second;
  const auto sum = [&](const auto& sums) { return sums[q.last + 1] - sums[q.first]; };
  profile.feasible = sum(on.infeasible) == 0;
  if (!profile.feasible) return profile;
  const int64_t micro_batches = request_.batch / (q.micro_batch * q.pipelines);
  const auto times = static_cast<double>(micro_batches);
  profile.forward = sum(on.forward);
  // What is done once per step counts with the passes.
  profile.backward = sum(on.backward) + sum(on.once) / times;
  const Bytes own = sum(on.own);
  if (q.pipelines > 1 && own > 0)
    profile.reduce = on.reduce_latency + on.reduce_byte * own / (on.lean ? on.devices : 1.0);
  Bytes workspace =
      *std::max_element(on.workspace.begin() + q.first, on.workspace.begin() + q.last + 1);
  profile.activation = sum(on.held);
  if (q.mesh.recompute) {
    profile.backward += profile.forward;
    compute_again(on, q.first, q.last, &workspace, &profile.activation);
  }
  // Gradients gather while activations are given back.
  Bytes state = sum(on.state);
  if (q.pipelines > 1 && request_.memory_limit && state > kMuchState * on.memory) {
    // Pipelines divide optimizer state (ZeRO 1), which costs nothing; where that is not enough,
    // gradients too, which are then reduced in every pass.
    const double optimizer = state_factor(request_.optimizer), all = 2 + optimizer,
                 share = 1.0 / q.pipelines;
    const Bytes whole = state;
    state = whole * (2 + optimizer * share) / all;
    if (state > kMuchState * on.memory) {
      state = whole * (1 + (1 + optimizer) * share) / all;
      profile.backward += profile.reduce / 2;
    }
  }
  profile.state = state + std::max(workspace, sum(on.late) - profile.activation);
  return profile;
}

// All pipelines send at once, each from the end of its share of one sub-cluster to the beginning of
// its share of the next; inside of one, from node to node if there are several, of unequal ones the
// two that are farthest apart.
Seconds StageCosts::crossing(int from, int to, Bytes bytes, int pipelines) const {
  const auto node = static_cast<size_t>(part(to).shape.devices),
             share = part(to).devices.size() / static_cast<size_t>(pipelines);
  Seconds longest = 0;
  for (size_t at = 0; at == 0 || (at + node < share && !part(to).shape.kinds.empty()); at += node) {
    std::vector<net::PairMessage> messages;
    for (int k = 0; k < pipelines; ++k) {
      const std::vector<int> a = share_of(part(from), pipelines, k),
                             b = share_of(part(to), pipelines, k);
      const int sender = from == to ? a[at] : a.back(),
                receiver = from == to ? b[std::min(at + node, share - 1)] : b.front();
      if (sender != receiver) messages.push_back({sender, receiver, bytes});
    }
    longest = std::max(longest, net::messages_time(topology_, messages));
    if (from != to) break;
  }
  return longest;
}

}  // namespace motley::planner
