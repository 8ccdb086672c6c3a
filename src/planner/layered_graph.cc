#include "planner/layered_graph.h"

#include <algorithm>
#include <set>

#include "core/error.h"
#include "core/parallel.h"
#include "pipeline/runs.h"
#include "planner/shape.h"

namespace motley::planner {

namespace {

constexpr int64_t kLayerStates = 500;  // of the searches that price layers

}  // namespace

LayeredGraph::LayeredGraph(const PlanOptions& request, DeviceGroups* groups,
                           std::shared_ptr<const Graph> graph, pipeline::Layers layers,
                           SearchCache* cache)
    : request_(request),
      groups_(*groups),
      search_(request, cache),
      shared_(std::move(graph)),
      graph_(*shared_),
      layers_(std::move(layers)) {}

std::vector<int> LayeredGraph::stages_of(const std::vector<int>& cuts) const {
  std::vector<int> stage(graph_.nodes.size(), -1);
  for (int l = 0; l < size(); ++l) {
    const int s = static_cast<int>(std::upper_bound(cuts.begin(), cuts.end(), l) - cuts.begin());
    for (NodeId n : layers_.layers[l].forward) stage[n.index] = s;
    for (NodeId n : layers_.layers[l].backward) stage[n.index] = s;
  }
  // Sources are where they are read; they follow their neighbour.
  int last = 0;
  for (int& s : stage) s = last = s < 0 ? last : s;
  return stage;
}

Bytes LayeredGraph::tied() {
  if (tied_ >= 0) return tied_;
  tied_ = 0;
  if (size() > 1) try {
      for (const Tied& t : cut_stages(graph_, stages_of({size() / 2}), 2, "halves").tied)
        tied_ += static_cast<Bytes>(graph_.spec(graph_.parameters[t.parameter].value).bytes());
    } catch (const UserError&) {  // the model cannot be cut there
    }
  return tied_;
}

int LayeredGraph::kind_of(int layer) const {
  return layer == 0 ? -1 : layer + 1 == size() ? -2 : layers_.layers[layer].layer_class;
}

const LayeredGraph::Piece& LayeredGraph::piece(int layer) {
  auto [it, fresh] = pieces_.try_emplace(kind_of(layer));
  Piece& piece = it->second;
  if (!fresh) return piece;
  auto cut_at = [&](const std::vector<int>& cuts) {
    return std::make_unique<Stages>(
        cut_stages(graph_, stages_of(cuts), static_cast<int>(cuts.size()) + 1, "layer"));
  };
  if (!cut_ && !cannot_cut_) try {
      std::vector<int> cuts;
      for (int l = 1; l < size(); ++l) cuts.push_back(l);
      cut_ = cut_at(cuts);
    } catch (const UserError&) {
      cannot_cut_ = true;
    }
  if (cut_) {
    piece.theory = std::make_unique<Theory>(cut_->graphs[layer].graph);
    return piece;
  }
  std::vector<int> cuts;
  if (layer > 0) cuts.push_back(layer);
  if (layer + 1 < size()) cuts.push_back(layer + 1);
  try {
    piece.cut = cut_at(cuts);
    piece.theory = std::make_unique<Theory>(piece.cut->graphs[layer > 0 ? 1 : 0].graph);
  } catch (const UserError&) {
    // Views alone.
  }
  return piece;
}

const std::vector<LayeredGraph::Window>& LayeredGraph::windows() {
  if (windows_.empty()) find_windows();
  return windows_;
}

// Where layers repeat with a period, three of its repeats behind all that comes before them, and
// two in front of all that comes behind, stand for the whole model: the second repeat for all
// between.
void LayeredGraph::find_windows() {
  const std::vector<int> classes = layers_.class_of();
  pipeline::Repetition run;
  int spared = 0;  // layers that are not planned
  for (const pipeline::Repetition& r : pipeline::find_runs(classes))
    if (const int more = r.end - r.first - 5 * r.period; more > spared) run = r, spared = more;
  seats_.resize(size());
  for (int l = 0; l < size(); ++l) seats_[l] = {0, l};
  if (spared > 0) try {
      const int m = run.period, front = run.first + 3 * m, back = run.end - 2 * m;
      windows_.push_back(window(0, front));
      windows_.push_back(window(back, size()));
      for (int l = run.first + 2 * m; l < size(); ++l)
        seats_[l] = l < back + m ? std::pair(0, run.first + m + (l - run.first) % m)
                                 : std::pair(1, l - back);
    } catch (const UserError&) {  // the model cannot be cut there
      windows_.clear();
      for (int l = 0; l < size(); ++l) seats_[l] = {0, l};
    }
  if (windows_.empty()) windows_.push_back(window(0, size()));
}

int LayeredGraph::cost_class(int layer) {
  windows();
  const auto& [w, l] = seats_[layer];
  return w * size() + l;
}

LayeredGraph::Window LayeredGraph::window(int first, int end) const {
  Window w;
  w.first = first;
  w.end = end;
  std::vector<int> cuts;
  if (first > 0) cuts.push_back(first);
  if (end < size()) cuts.push_back(end);
  if (!cuts.empty()) {
    Stages stages =
        cut_stages(graph_, stages_of(cuts), static_cast<int>(cuts.size()) + 1, "layers");
    w.cut = std::make_unique<StageGraph>(std::move(stages.graphs[first > 0 ? 1 : 0]));
  }
  const Graph& graph = w.cut ? w.cut->graph : graph_;
  w.theory = std::make_unique<Theory>(graph);
  std::vector<int> layer_of(graph_.nodes.size(), -1);
  for (int l = first; l < end; ++l) {
    for (NodeId n : layers_.layers[l].forward) layer_of[n.index] = l - first;
    for (NodeId n : layers_.layers[l].backward) layer_of[n.index] = l - first;
  }
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    const NodeId whole = w.cut ? w.cut->node_of[n] : NodeId(n);
    w.part_of.push_back(whole.valid() ? layer_of[whole.index] : -1);
  }
  if (!request_.measured.empty()) w.shape = shape_of(graph);
  return w;
}

const LayeredGraph::LayerCost& LayeredGraph::layer_cost(int layer, const DeviceGroups::Kind& group,
                                                        int micro_batches, bool lean) {
  const auto it = layer_costs_.find({group.number, micro_batches, lean});
  if (it != layer_costs_.end()) return it->second[layer];
  plan_layers({OnGroup{&group, lean}}, micro_batches);
  return layer_costs_.at({group.number, micro_batches, lean})[layer];
}

void LayeredGraph::plan_layers(const std::vector<OnGroup>& wanted, int micro_batches) {
  struct Task {
    const OnGroup* on;
    std::vector<LayerCost>* costs;              // [layer]
    std::vector<std::vector<LayerCost>> found;  // [window][layer of it]
  };
  std::vector<Task> tasks;
  const auto count = static_cast<int>(windows().size());
  for (const OnGroup& on : wanted) {
    auto [it, fresh] = layer_costs_.try_emplace({on.group->number, micro_batches, on.lean});
    if (fresh) tasks.push_back({&on, &it->second, std::vector<std::vector<LayerCost>>(count)});
  }
  SearchCache& cache = search_.cache();
  // One group's searches first where nothing is known: the others begin where they end.
  std::vector<int> first, others;
  std::vector<solver::WarmStart> warm(tasks.size() * count);
  for (int i = 0; i < static_cast<int>(warm.size()); ++i) {
    const OnGroup& on = *tasks[i / count].on;
    const bool fresh = cache.on_any.try_emplace({i % count, on.lean}).second;
    (fresh ? first : others).push_back(i);
  }
  for (const std::vector<int>& wave : {first, others}) {
    for (int i : wave) {
      const OnGroup& on = *tasks[i / count].on;
      const auto known = cache.on_group.find({i % count, on.lean, on.group->number});
      warm[i] =
          known != cache.on_group.end() ? known->second : cache.on_any.at({i % count, on.lean});
    }
    try {
      parallel_for(static_cast<int>(wave.size()), request_.threads, [&](int k) {
        const int i = wave[k];
        Task& task = tasks[i / count];
        task.found[i % count] = find_costs(windows_[i % count], *task.on->group, micro_batches,
                                           task.on->lean, &warm[i]);
      });
    } catch (const TimeIsUp&) {  // not known, then
      for (const Task& task : tasks)
        layer_costs_.erase({task.on->group->number, micro_batches, task.on->lean});
      throw;
    }
    for (int i : wave) {
      const OnGroup& on = *tasks[i / count].on;
      solver::WarmStart& any = cache.on_any.at({i % count, on.lean});
      if (any.empty()) any = warm[i];
      cache.on_group[{i % count, on.lean, on.group->number}] = std::move(warm[i]);
    }
  }
  for (Task& task : tasks) {
    for (const auto& [w, l] : seats_) task.costs->push_back(task.found[w][l]);
    measure(*task.on->group, task.costs);
  }
}

std::vector<const Theory*> LayeredGraph::distinct_layers() {
  std::vector<const Theory*> distinct;
  std::set<int> kinds;
  for (int l = 0; l < size(); ++l)
    if (kinds.insert(kind_of(l)).second && piece(l).theory)
      distinct.push_back(piece(l).theory.get());
  return distinct;
}

Planned LayeredGraph::plan_window(const Window& w, const DeviceGroups::Kind& group,
                                  int micro_batches, bool lean, solver::WarmStart* warm) {
  AlternationOptions options = search_.options(micro_batches, warm);
  options.memory_limit = false;
  options.certify_below = 0;
  options.limits.max_states = std::min(options.limits.max_states, kLayerStates);
  if (group.cluster.types.size() == 1) {
    options.ratios = even_ratios(group.cluster);
    options.polish = false;
  }
  if (lean) options.restriction = spmd::Restriction::zero;
  return search_.find(*w.theory, group.model, std::move(options));
}

std::vector<LayeredGraph::LayerCost> LayeredGraph::find_costs(const Window& w,
                                                              const DeviceGroups::Kind& group,
                                                              int micro_batches, bool lean,
                                                              solver::WarmStart* warm) {
  std::vector<LayerCost> costs(w.end - w.first);
  const Planned planned = plan_window(w, group, micro_batches, lean, warm);
  if (!planned.feasible) return costs;
  const Shares shares(planned.ratios);
  const auto parts =
      part_costs(*w.theory, planned.program, group.model, Fractions(group.cluster, shares),
                 request_.optimizer, w.part_of, static_cast<int>(costs.size()));
  for (size_t l = 0; l < costs.size(); ++l) {
    static_cast<PartCost&>(costs[l]) = parts[l];
    costs[l].feasible = true;
  }
  if (!lean) measure(w, group, &costs);
  return costs;
}

void LayeredGraph::measure(const Window& w, const DeviceGroups::Kind& group,
                           std::vector<LayerCost>* costs) const {
  if (group.cluster.size() == 1) return;
  for (const ProfiledStage& m : request_.measured) {
    if (m.shape != w.shape || m.devices != group.cluster.size() ||
        m.nodes != count_nodes(group.cluster) || m.type != types_of(group.cluster))
      continue;
    LayerCost sum;
    for (const LayerCost& cost : *costs) {
      sum.seconds.forward += cost.seconds.forward;
      sum.seconds.backward += cost.seconds.backward;
      sum.held += cost.held;
    }
    for (LayerCost& cost : *costs) {
      if (sum.seconds.forward > 0) cost.seconds.forward *= m.forward / sum.seconds.forward;
      if (sum.seconds.backward > 0) cost.seconds.backward *= m.backward / sum.seconds.backward;
      if (sum.held > 0) cost.held *= std::max(1.0, m.activation / sum.held);
    }
  }
}

void LayeredGraph::measure(const DeviceGroups::Kind& group, std::vector<LayerCost>* costs) {
  if (group.cluster.size() > 1 || request_.measured.empty()) return;
  for (int l = 0; l < size(); ++l) {
    const Theory* theory = layer_theory(l);
    if (theory == nullptr) continue;
    const std::string shape = shape_of(theory->graph());
    LayerCost& cost = (*costs)[l];
    for (const ProfiledStage& m : request_.measured)
      if (m.shape == shape && m.devices == 1 && m.type == group.cluster.types[0].name) {
        cost.seconds.forward = m.forward;
        cost.seconds.backward = m.backward;
        cost.held = std::max(cost.held, m.activation);
      }
  }
}
}  // namespace motley::planner
