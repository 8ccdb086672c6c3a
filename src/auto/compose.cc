#include "auto/compose.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "auto/engines.h"
#include "cluster/part.h"
#include "core/error.h"
#include "core/parallel.h"
#include "net/messages.h"
#include "pipeline/runs.h"
#include "pipeline/schedules.h"
#include "reduce/cluster.h"
#include "sim/pipeline.h"
#include "spmd/recompute.h"

namespace motley::planner {

namespace {

constexpr int kAttempts = 4;  // to fit a stage's program into the memory that is left
// Times the time of the best program.
constexpr double kHardlySlower = 1.02, kLittleSlower = 1.1;
constexpr int64_t kLayerStates = 500;  // of the searches that price layers
// Of searches with few devices, of one kind: a sweep of their bounds costs as much as some hundred
// states (spmd/problem.h, Limits).
constexpr double kRough = 1e-4;
constexpr int64_t kRoughStates = 4000;
constexpr int kCalibrationRuns = 8;  // micro-batches of the step whose programs are measured

int nodes_of(const Cluster& cluster) {
  return static_cast<int>(std::count_if(cluster.groups.begin(), cluster.groups.end(),
                                        [](const Group& g) { return g.children.empty(); }));
}

}  // namespace

Seconds handover(const Cluster& cluster, const std::vector<int>& from, const std::vector<int>& to,
                 Bytes bytes, bool whole) {
  std::vector<net::PairMessage> messages;
  const double receivers = static_cast<double>(to.size());
  for (size_t r = 0; r < to.size(); ++r)
    messages.push_back(
        {from[r * from.size() / to.size()], to[r], whole ? bytes : bytes / receivers});
  return net::messages_time(net::Topology(cluster), messages);
}

DeviceGroups::Kind::Kind(int n, Cluster c, OverReplicas r)
    : number(n),
      cluster(std::move(c)),
      reductions(reduce::reductions_of_all(cluster)),
      replicas(std::move(r)),
      model(cluster, reductions, replicas) {}

const DeviceGroups::Kind& DeviceGroups::kind_of(Cluster part, OverReplicas replicas) {
  std::string text = to_yaml(part);
  if (!replicas.piece.empty())
    text += fmt::format("{} {} {}", replicas.fixed, replicas.seconds_per_byte,
                        fmt::join(replicas.piece, " "));
  std::unique_ptr<Kind>& known = kinds_[text];
  if (!known)
    known = std::make_unique<Kind>(static_cast<int>(kinds_.size()), std::move(part),
                                   std::move(replicas));
  return *known;
}

const DeviceGroups::Kind& DeviceGroups::of(const std::vector<int>& devices) {
  const Kind*& kind = by_devices_[devices];
  if (kind == nullptr) kind = &kind_of(part_of(cluster_, devices), {});
  return *kind;
}

const DeviceGroups::Kind& DeviceGroups::of(const net::Groups& groups, size_t k,
                                           const ReductionProgram* joint) {
  if (groups.size() == 1) return of(groups[0]);
  const Kind*& kind = by_groups_[{groups, k, joint != nullptr}];
  if (kind != nullptr) return *kind;
  Cluster part = part_of(shared_by(cluster_, groups), groups[k]);
  OverReplicas replicas;
  const bool alike = std::all_of(groups.begin(), groups.end(), [&](const std::vector<int>& g) {
    return g.size() == groups[0].size();
  });
  if (joint != nullptr && alike) {
    replicas.fixed = joint->fixed;
    replicas.seconds_per_byte = joint->seconds_per_byte;
    replicas.piece.assign(part.types.size(), 0);
    // Pieces travel on rings through the replicas, those of all ranks at the same time.
    const auto count = static_cast<double>(groups.size());
    const net::Topology topology(cluster_);
    for (size_t t = 0; t < part.types.size(); ++t) {
      std::vector<net::PairMessage> ring;
      for (size_t i = 0; i < groups[0].size(); ++i) {
        if (part.devices[i].type != static_cast<int>(t)) continue;
        for (size_t r = 0; r < groups.size(); ++r)
          ring.push_back(
              {groups[r][i], groups[(r + 1) % groups.size()][i], 2 * (count - 1) / count * 1e6});
      }
      auto twice = ring;
      for (net::PairMessage& m : twice) m.bytes *= 2;
      replicas.piece[t] =
          (net::messages_time(topology, twice) - net::messages_time(topology, ring)) / 1e6;
    }
  }
  return *(kind = &kind_of(std::move(part), std::move(replicas)));
}

Workbench::Workbench(const Request& request, DeviceGroups* groups, Graph graph, int layers,
                     Experience* experience)
    : request_(request),
      groups_(*groups),
      cluster_(groups->whole()),
      graph_(std::move(graph)),
      experience_(experience ? *experience : own_experience_) {
  pipeline::LayerOptions options;
  options.layers = std::max(0, layers);
  layers_ = find_layers(graph_, options);
}

std::vector<int> Workbench::stages_of(const std::vector<int>& cuts) const {
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

Bytes Workbench::tied() {
  if (tied_ >= 0) return tied_;
  tied_ = 0;
  if (size() > 1)
    for (const Tied& t : cut_stages(graph_, stages_of({size() / 2}), 2, "halves").tied)
      tied_ += static_cast<Bytes>(graph_.spec(graph_.parameters[t.parameter].value).bytes());
  return tied_;
}

int Workbench::kind_of(int layer) const {
  return layer == 0 ? -1 : layer + 1 == size() ? -2 : layers_.layers[layer].layer_class;
}

const Workbench::Piece& Workbench::piece(int layer) {
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

// Where layers repeat with a period, three of its repeats behind all that comes before them, and
// two in front of all that comes behind, stand for the whole model: the second repeat for all
// between.
void Workbench::find_windows() {
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

int Workbench::cost_class(int layer) {
  windows();
  const auto& [w, l] = seats_[layer];
  return w * size() + l;
}

Workbench::Window Workbench::window(int first, int end) const {
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

const Workbench::LayerCost& Workbench::layer_cost(int layer, const DeviceGroups::Kind& group,
                                                  int micro_batches, bool lean) {
  const auto it = layer_costs_.find({group.number, micro_batches, lean});
  if (it != layer_costs_.end()) return it->second[layer];
  plan_layers({OnGroup{&group, lean}}, micro_batches);
  return layer_costs_.at({group.number, micro_batches, lean})[layer];
}

void Workbench::plan_layers(const std::vector<OnGroup>& wanted, int micro_batches) {
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
  // One group's searches first where nothing is known: the others begin where they end.
  std::vector<int> first, others;
  std::vector<spmd::WarmStart> warm(tasks.size() * count);
  for (int i = 0; i < static_cast<int>(warm.size()); ++i) {
    const OnGroup& on = *tasks[i / count].on;
    const bool fresh = experience_.on_any.try_emplace({i % count, on.lean}).second;
    (fresh ? first : others).push_back(i);
  }
  for (const std::vector<int>& wave : {first, others}) {
    for (int i : wave) {
      const OnGroup& on = *tasks[i / count].on;
      const auto known = experience_.on_group.find({i % count, on.lean, on.group->number});
      warm[i] = known != experience_.on_group.end() ? known->second
                                                    : experience_.on_any.at({i % count, on.lean});
    }
    parallel_for(static_cast<int>(wave.size()), request_.threads, [&](int k) {
      const int i = wave[k];
      Task& task = tasks[i / count];
      task.found[i % count] =
          find_costs(windows_[i % count], *task.on->group, micro_batches, task.on->lean, &warm[i]);
    });
    for (int i : wave) {
      const OnGroup& on = *tasks[i / count].on;
      spmd::WarmStart& any = experience_.on_any.at({i % count, on.lean});
      if (any.empty()) any = warm[i];
      experience_.on_group[{i % count, on.lean, on.group->number}] = std::move(warm[i]);
    }
  }
  for (Task& task : tasks) {
    for (const auto& [w, l] : seats_) task.costs->push_back(task.found[w][l]);
    measure(*task.on->group, task.costs);
  }
}

std::vector<const Theory*> Workbench::distinct_layers() {
  std::vector<const Theory*> distinct;
  std::set<int> kinds;
  for (int l = 0; l < size(); ++l)
    if (kinds.insert(kind_of(l)).second && piece(l).theory)
      distinct.push_back(piece(l).theory.get());
  return distinct;
}

Workbench::Planned Workbench::plan_window(const Window& w, const DeviceGroups::Kind& group,
                                          int micro_batches, bool lean, spmd::WarmStart* warm) {
  const Theory& theory = *w.theory;
  spmd::SynthesisOptions options;
  options.certify = false;
  options.orders = &experience_.orders;
  options.warm = warm;
  options.optimizer = request_.optimizer;
  options.memory_limit = false;
  options.micro_batches = micro_batches;
  options.limits = request_.limits;
  options.limits.rough = kRough;
  options.limits.rough_states = kRoughStates;
  options.limits.max_states = std::min(options.limits.max_states, kLayerStates);
  if (group.cluster.types.size() == 1) {
    options.ratios = spmd::even_ratios(group.cluster);
    options.polish = false;
  }
  if (lean) options.restriction = spmd::Restriction::zero;
  ++planned_;
  const spmd::Synthesis s = synthesize(theory, group.model, options);
  Planned planned;
  planned.feasible = s.feasible;
  planned.reason = s.reason;
  if (!s.feasible) return planned;
  planned.program = phase_ordered(theory, s.program);
  planned.ratios = s.ratios[0];
  return planned;
}

std::vector<Workbench::LayerCost> Workbench::find_costs(const Window& w,
                                                        const DeviceGroups::Kind& group,
                                                        int micro_batches, bool lean,
                                                        spmd::WarmStart* warm) {
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

const std::vector<Workbench::Window>& Workbench::windows() {
  if (windows_.empty()) find_windows();
  return windows_;
}

void Workbench::measure(const Window& w, const DeviceGroups::Kind& group,
                        std::vector<LayerCost>* costs) const {
  if (group.cluster.size() == 1) return;
  for (const ProfiledStage& m : request_.measured) {
    if (m.shape != w.shape || m.devices != group.cluster.size() ||
        m.nodes != nodes_of(group.cluster) || m.type != types_of(group.cluster))
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

void Workbench::measure(const DeviceGroups::Kind& group, std::vector<LayerCost>* costs) {
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

namespace {

Graph anonymous(const Graph& graph) {
  Graph plain = graph;
  plain.model.clear();
  const auto forget = [](auto& list) {
    for (auto& item : list) item.name.clear();
  };
  forget(plain.parameters);
  forget(plain.buffers);
  forget(plain.inputs);
  for (Node& node : plain.nodes)
    if (is_source(node) && node.op != "motley::constant") node.args = {std::string()};
  return plain;
}

}  // namespace

std::string shape_of(const Graph& graph) {
  return fmt::format("{:016x}", fingerprint(anonymous(graph)));
}

int Workbench::number_of(const Graph& graph) {
  return numbers_.try_emplace(to_text(anonymous(graph)), static_cast<int>(numbers_.size()))
      .first->second;
}

const Workbench::Planned& Workbench::unlimited(const StageTask& task, bool lean,
                                               spmd::WarmStart* warm) {
  std::unique_lock lock(mutex_);
  auto [it, fresh] =
      unlimited_.try_emplace({task.number, task.group->number, task.micro_batches, lean});
  lock.unlock();
  double no_price = 0;
  if (fresh)
    it->second =
        plan(*task.theory, task.group->model, task.micro_batches, false, lean, &no_price, warm);
  return it->second;
}

Workbench::Planned Workbench::plan(const Theory& theory, const CostModel& model, int micro_batches,
                                   bool memory_limit, bool lean, double* memory_price,
                                   spmd::WarmStart* warm) {
  spmd::SynthesisOptions options;
  options.optimizer = request_.optimizer;
  options.certify = false;
  options.orders = &experience_.orders;
  options.warm = warm;
  options.micro_batches = micro_batches;
  options.limits = request_.limits;
  options.limits.rough = kRough;
  options.limits.rough_states = kRoughStates;
  options.memory_limit = memory_limit;
  options.recompute = false;  // all of a stage or nothing (StageChoice::recompute)
  options.memory_price = *memory_price;
  if (lean) options.restriction = spmd::Restriction::zero;
  ++planned_;
  const spmd::Synthesis s = synthesize(theory, model, options);
  Planned planned;
  planned.feasible = s.feasible;
  planned.reason = s.reason;
  if (!s.feasible) return planned;
  if (s.memory_price > 0) *memory_price = s.memory_price;
  planned.program = phase_ordered(theory, s.program);
  planned.ratios = s.ratios[0];
  return planned;
}

Workbench::Planned Workbench::as_run(const StageTask& task, Planned planned) {
  if (task.pieces() && planned.feasible)
    planned.program = spmd::hold_pieces(*task.theory, planned.program);
  return planned;
}

std::vector<Workbench::Room> Workbench::room_of(const StageTask& task, const Planned& p) const {
  const Cluster& cluster = task.group->cluster;
  const Divided& divided = task.divided;
  // As if the pieces of all replicas were alike.
  Kept kept;
  kept.share = divided.share;
  for (const Parameter& parameter : task.theory->graph().parameters) {
    if (divided.level == 1 || divided.level == 2)
      kept.optimizer.push_back(parameter.gradient.valid());
    if (divided.level == 2) kept.gradient.push_back(parameter.gradient.valid());
  }
  const Shares shares(p.ratios);
  const Fractions fractions(cluster, shares);
  const auto memory_with = [&](const Program& program, const Kept& what) {
    return memory_of(*task.theory, program, fractions, task.group->model.types(),
                     request_.optimizer, true, what);
  };
  const MemoryCost memory = memory_with(as_run(task, p).program, kept);
  std::vector<Room> rooms;
  for (size_t t = 0; t < cluster.types.size(); ++t) {
    const Bytes others =
        memory.sums[t] +
        (task.in_flight - 1) * (task.recompute ? memory.held_inputs[t] : memory.held[t]);
    rooms.push_back({memory.peak[t] + others - cluster.types[t].memory / task.laps, others, 0});
  }
  if (divided.level == 0) return rooms;
  const MemoryCost whole = memory_with(p.program, {});
  for (size_t t = 0; t < rooms.size(); ++t) rooms[t].divided = whole.peak[t] - memory.peak[t];
  return rooms;
}

bool Workbench::fits(const StageTask& task, const Planned& planned) const {
  const std::vector<Room> rooms = room_of(task, planned);
  return std::all_of(rooms.begin(), rooms.end(), [](const Room& r) { return r.lack <= 0; });
}

void Workbench::plan_unlimited(const std::vector<StageTask>& tasks) {
  std::vector<const StageTask*> distinct;  // the first of equal ones has most in flight
  std::set<std::tuple<int, int, int, bool>> known;
  for (const StageTask& t : tasks)
    if (known.emplace(t.number, t.group->number, t.micro_batches, t.pieces()).second)
      distinct.push_back(&t);
  parallel_for(static_cast<int>(distinct.size()), request_.threads, [&](int i) {
    const StageTask& task = *distinct[i];
    spmd::WarmStart warm;
    const Planned& best = unlimited(task, task.pieces(), &warm);
    if (!request_.memory_limit || !best.feasible || task.pieces() ||
        task.group->cluster.size() == 1 || fits(task, best))
      return;
    unlimited(task, true, &warm);
  });
}

Workbench::Planned Workbench::plan_stage(const StageTask& task) {
  const Theory& theory = *task.theory;
  const DeviceGroups::Kind& group = *task.group;
  Planned planned = unlimited(task, task.pieces(), nullptr);
  if (!request_.memory_limit || !planned.feasible || fits(task, planned))
    return as_run(task, std::move(planned));
  was_limited_ = true;
  // One that was found for a stage with more in flight does for its equals behind it: they are not
  // slower.
  std::unique_lock lock(mutex_);
  std::vector<Planned>& limited =
      limited_[{task.number, group.number, task.micro_batches, task.pieces()}];
  double& memory_price = memory_price_[group.number];
  lock.unlock();
  for (const Planned& known : limited)
    if (fits(task, known)) return as_run(task, known);
  // With all parameters cut: good enough if it is hardly slower, and better than nothing. Where
  // that does not fit, gathered and scattered in every pass.
  const auto seconds_of = [&](const Planned& p) {
    const Shares shares(p.ratios);
    const PhaseSeconds s = phase_seconds(theory, p.program, group.model,
                                         Fractions(group.cluster, shares), request_.optimizer);
    return s.forward * (task.recompute ? 2 : 1) + s.backward +
           (s.reduction + s.update) / task.micro_batches;
  };
  const Planned* lean = nullptr;
  Planned in_pieces;
  if (group.cluster.size() > 1 && !task.pieces()) {
    const Planned& cut = unlimited(task, true, nullptr);
    if (cut.feasible && fits(task, cut)) {
      lean = &cut;
    } else if (cut.feasible) {
      in_pieces = cut;
      in_pieces.program = spmd::hold_pieces(theory, cut.program);
      if (fits(task, in_pieces)) lean = &in_pieces;
    }
    if (lean &&
        seconds_of(*lean) <= (task.thorough ? kHardlySlower : kLittleSlower) * seconds_of(planned))
      return *lean;
  }
  const auto better = [&](const Planned& p) {
    return lean && seconds_of(*lean) < seconds_of(p) ? *lean : p;
  };
  Cluster room = group.cluster;  // with the memory that other micro-batches leave
  spmd::WarmStart warm;
  for (int attempt = 1; attempt < kAttempts; ++attempt) {
    const std::vector<Room> rooms = room_of(task, planned);
    for (size_t t = 0; t < room.types.size(); ++t) {
      const DeviceType& type = group.cluster.types[t];
      const Bytes most = type.memory / task.laps + rooms[t].divided;
      if (attempt == 1) room.types[t].memory = most;
      if (rooms[t].lack <= 0) continue;
      planned.reason = fmt::format("{} lacks {}", type.name, format_bytes(rooms[t].lack));
      room.types[t].memory =
          std::max(0.3 * room.types[t].memory,
                   std::min(attempt > 1 ? room.types[t].memory - rooms[t].lack : most,
                            most - rooms[t].others));
    }
    planned = plan(theory, CostModel(room, group.reductions, group.replicas), task.micro_batches,
                   true, task.pieces(), &memory_price, &warm);
    if (!planned.feasible) break;
    if (fits(task, planned)) {
      limited.push_back(better(planned));
      return as_run(task, limited.back());
    }
  }
  if (lean) return *lean;
  if (!planned.feasible) return planned;
  planned.feasible = false;
  planned.reason =
      fmt::format("no program leaves room for {} micro-batches in flight", task.in_flight);
  return planned;
}

bool place_jointly(const Cluster& cluster, const std::vector<std::vector<int>>& rooms,
                   const Plan& plan, Composition* composition) {
  const PipelinePlan& pipeline = *plan.pipeline;
  auto& replicas = composition->replicas;
  const int dp = static_cast<int>(replicas.size());
  bool moved = false;
  for (std::vector<int> room : rooms) {
    std::sort(room.begin(), room.end());
    // The stages in this room, and what they reduce.
    std::vector<int> stages;
    Bytes gradients = 0, inside = 0, both = 0;
    size_t ranks = 0;
    bool uniform = true;
    for (int s = 0; s < pipeline.stages(); ++s) {
      size_t here = 0, all = 0;
      for (const ReplicaChoice& replica : replicas)
        for (int d : replica.stages[s].devices) {
          ++all;
          here += std::binary_search(room.begin(), room.end(), d);
        }
      if (here == 0) continue;
      if (stages.empty()) ranks = replicas[0].stages[s].devices.size();
      uniform = uniform && here == all;
      for (const ReplicaChoice& replica : replicas)
        uniform = uniform && replica.stages[s].devices.size() == ranks;
      stages.push_back(s);
      const Theory& theory = pipeline.theory(s);
      const Graph& graph = theory.graph();
      const StagePlan& stage = pipeline.replicas[0].stages[s];
      const std::vector<Placement> stored = stored_placements(theory, stage.program);
      const JointGradients joint = joint_gradients(pipeline, s);
      for (size_t i = 0; i < graph.parameters.size(); ++i) {
        const Parameter& p = graph.parameters[i];
        const auto bytes = static_cast<Bytes>(graph.spec(p.value).bytes());
        if (joint.gradient[i]) {
          both += bytes;
          continue;
        }
        const bool cut = stored[p.value.index].is_shard();
        if (p.gradient.valid()) gradients += cut ? bytes / static_cast<double>(ranks) : bytes;
      }
      const int once = phases_of(theory, stage.program).reduction;
      for (int i = 0; i < static_cast<int>(stage.program.steps.size()); ++i) {
        const Step& step = stage.program.steps[i];
        if (step.is_compute() || step.kind == CollectiveKind::slice ||
            step.kind == CollectiveKind::mask ||
            std::binary_search(joint.steps[0].begin(), joint.steps[0].end(), i))
          continue;
        // A ring sends half of what an all-reduce does for the others.
        const double part = step.kind == CollectiveKind::all_reduce ? 1 : 0.5;
        inside += part * static_cast<Bytes>(graph.spec(step.value).bytes()) *
                  (i < once ? replicas[0].micro_batches : 1);
      }
    }
    if (dp == 1 || ranks < 2 || !uniform || stages.size() * dp * ranks != room.size()) continue;
    const double each = static_cast<double>(stages.size());
    const std::vector<int> order = reduce::devices_jointly(
        part_of(cluster, room), {static_cast<int>(stages.size()), dp, static_cast<int>(ranks)},
        {{{1}, gradients / each}, {{2}, inside / each}, {{1, 2}, both / each}});
    if (order.empty()) continue;
    auto next = order.begin();
    for (int s : stages)
      for (ReplicaChoice& replica : replicas) {
        std::vector<int> devices;
        for (size_t t = 0; t < ranks; ++t) devices.push_back(room[*next++]);
        std::sort(devices.begin(), devices.end());
        std::vector<int> before = replica.stages[s].devices;
        std::sort(before.begin(), before.end());
        moved = moved || devices != before;
        replica.stages[s].devices = std::move(devices);
      }
  }
  return moved;
}

// What all-reduces in stages, and those of gradients over replicas, do instead of the plain one.
void Workbench::add_reductions(const std::vector<std::vector<const DeviceGroups::Kind*>>& kinds,
                               Plan* plan) {
  const PipelinePlan& pipeline = *plan->pipeline;
  for (size_t r = 0; r < pipeline.replicas.size(); ++r)
    for (const std::vector<int>& group : stage_groups(pipeline.replicas[r])) {
      const std::vector<StagePlan>& stages = pipeline.replicas[r].stages;
      Bytes largest = 0;
      for (int s : group) {
        const int64_t bytes = largest_all_reduce(pipeline.theory(s), stages[s].program);
        largest = std::max(largest, static_cast<Bytes>(bytes));
      }
      for (ReductionProgram program : kinds[r][group[0]]->reductions) {
        if (program.from > largest) continue;
        program.devices = stages[group[0]].devices;
        plan->reductions.push_back(std::move(program));
      }
    }
  if (pipeline.replicas.size() < 3) return;
  for (int s = 0; s < pipeline.stages(); ++s) {
    const size_t ranks = pipeline.replicas[0].stages[s].devices.size();
    net::Groups groups(ranks);
    bool alike = true;
    for (const ReplicaPlan& replica : pipeline.replicas) {
      const std::vector<int>& devices = replica.stages[s].devices;
      alike = alike && devices.size() == ranks;
      for (size_t i = 0; i < ranks && alike; ++i) groups[i].push_back(devices[i]);
    }
    if (!alike) continue;
    const auto bytes = static_cast<Bytes>(pipeline.graph(s).parameter_bytes());
    // Stages that share their devices reduce alike.
    auto known = [&](const ReductionProgram& program) {
      return std::any_of(plan->reductions.begin(), plan->reductions.end(), [&](const auto& other) {
        return other.devices == program.devices && other.from == program.from;
      });
    };
    for (ReductionProgram& program : reduce::reductions_of(cluster_, groups))
      if (program.from <= bytes && !known(program)) plan->reductions.push_back(std::move(program));
  }
}

const ReductionProgram& Workbench::joint_reduction(const net::Groups& groups, Bytes bytes) {
  auto [it, fresh] = joint_.try_emplace(groups);
  if (fresh) it->second = reduce::joint_reduction(cluster_, groups, bytes);
  return it->second;
}

namespace {

// Gives stages that share their devices the warm-up counts of the interleaved schedule; why there
// are none, if so.
std::string interleave(const PipelinePlan& pipeline, ReplicaPlan* replica, int* laps) {
  const auto groups = stage_groups(*replica);
  if (groups.size() == replica->stages.size()) return "";
  *laps = static_cast<int>(groups[0].size());
  const std::vector<int> counts =
      pipeline::interleaved_counts(static_cast<int>(groups.size()), *laps, replica->micro_batches);
  for (size_t g = 0; g < groups.size(); ++g) {
    for (int s : groups[g]) replica->stages[s].warm_up = counts[g];
    for (const Tied& tied : pipeline.parts().tied)
      if (std::count_if(tied.stages.begin(), tied.stages.end(), [&](int s) {
            return std::binary_search(groups[g].begin(), groups[g].end(), s);
          }) > 1)
        return "stages that share a parameter would share devices";
  }
  return ticks_of(*replica).empty() ? "interleaved stages would wait for each other for ever" : "";
}

// [replica] Shares of something of `size` bytes such that the least room left is as large as it can
// be.
std::vector<double> shares_by_room(const std::vector<Bytes>& room, Bytes size) {
  std::vector<double> shares(room.size(), 1.0 / static_cast<double>(room.size()));
  if (size <= 0) return shares;
  const auto [least, most] = std::minmax_element(room.begin(), room.end());
  Bytes low = *least - size, high = *most;  // what is left
  for (int i = 0; i < 60; ++i) {
    const Bytes left = (low + high) / 2;
    Bytes sum = 0;
    for (Bytes r : room) sum += std::max(0.0, r - left);
    (sum > size ? low : high) = left;
  }
  double sum = 0;
  for (size_t r = 0; r < room.size(); ++r) sum += shares[r] = std::max(0.0, room[r] - low);
  for (double& share : shares) share /= sum;
  return shares;
}

// Gives every stage whose replicas have devices of unlike memories the shares that leave most room.
void divide_by_room(const Cluster& cluster, Optimizer optimizer, PipelinePlan* pipeline) {
  const auto replicas = pipeline->replicas.size();
  for (int s = 0; s < pipeline->stages(); ++s) {
    Division& division = pipeline->zero[s];
    const std::vector<int> devices = devices_of(*pipeline, s);
    if (std::all_of(devices.begin(), devices.end(), [&](int d) {
          return cluster.type_of(d).memory == cluster.type_of(devices[0]).memory;
        }))
      continue;
    // The memory of all but the first replica if that has everything, and the other way round.
    division.shares.assign(replicas, 0);
    division.shares[0] = 1;
    const std::vector<Bytes> first = pipeline_memory(*pipeline, cluster, optimizer);
    std::swap(division.shares[0], division.shares[1]);
    const std::vector<Bytes> second = pipeline_memory(*pipeline, cluster, optimizer);
    std::vector<Bytes> room(replicas, std::numeric_limits<double>::infinity());
    Bytes size = 0;
    for (size_t r = 0; r < replicas; ++r)
      for (int d : pipeline->replicas[r].stages[s].devices) {
        const Bytes without = r == 0 ? second[d] : first[d];
        room[r] = std::min(room[r], cluster.type_of(d).memory - without);
        if (r == 0) size = std::max(size, first[d] - without);
      }
    division.shares = shares_by_room(room, size);
  }
}

}  // namespace

std::unique_ptr<Plan> Workbench::compose(const Composition& composition, const std::string& engine,
                                         std::string* reason) {
  auto plan = std::make_unique<Plan>();
  plan->engine = engine;
  plan->model = request_.model;
  plan->batch = request_.batch;
  plan->optimizer = request_.optimizer;
  plan->cluster = cluster_;
  plan->set_graph(graph_);
  plan->pipeline = std::make_unique<PipelinePlan>();
  PipelinePlan& result = *plan->pipeline;
  result.micro_batch = composition.micro_batch;
  std::vector<int> cuts;
  const auto& first = composition.replicas[0].stages;
  for (size_t s = 1; s < first.size(); ++s) cuts.push_back(first[s].first);
  const int stages = static_cast<int>(first.size());
  result.stage_of = stages_of(cuts);
  try {
    result.cut(*plan->graph, stages, "composition");
  } catch (const UserError& e) {
    *reason = e.what();
    return nullptr;
  }

  // Programs and shares; the memory that warm-up counts will need is what the choice says, or else
  // that of 1F1B, then of a single micro-batch.
  std::vector<int> numbers;
  std::vector<net::Groups> seats(stages);  // [stage][replica] devices
  for (int s = 0; s < stages; ++s) {
    numbers.push_back(number_of(result.graph(s)));
    for (const ReplicaChoice& choice : composition.replicas) {
      seats[s].push_back(choice.stages[s].devices);
      std::sort(seats[s].back().begin(), seats[s].back().end());
    }
  }
  auto joint_of = [&](int s) -> const ReductionProgram* {
    const bool ranks = std::any_of(seats[s].begin(), seats[s].end(),
                                   [](const std::vector<int>& d) { return d.size() > 1; });
    if (seats[s].size() == 1 || !ranks) return nullptr;
    return &joint_reduction(seats[s], static_cast<Bytes>(result.graph(s).parameter_bytes()));
  };
  std::vector<std::vector<const DeviceGroups::Kind*>> kinds(composition.replicas.size());
  for (size_t r = 0; r < kinds.size(); ++r)
    for (int s = 0; s < stages; ++s)
      kinds[r].push_back(&groups_.of(seats[s], r, composition.joint ? joint_of(s) : nullptr));
  for (size_t r = 0; r < kinds.size(); ++r) {
    const ReplicaChoice& choice = composition.replicas[r];
    ReplicaPlan replica;
    replica.micro_batches = choice.micro_batches;
    for (int s = 0; s < stages; ++s) {
      StagePlan stage;
      stage.devices = seats[s][r];
      stage.recompute = choice.stages[s].recompute;
      replica.stages.push_back(std::move(stage));
    }
    result.replicas.push_back(std::move(replica));
  }
  int laps = 1;  // stages on the same devices
  for (ReplicaPlan& replica : result.replicas)
    if (*reason = interleave(result, &replica, &laps); !reason->empty()) return nullptr;
  const bool divides =
      (composition.zero == 1 || composition.zero == 2) && result.replicas.size() > 1;
  if (divides) result.zero.assign(stages, {composition.zero, {}});
  if (divides && composition.zero > 1)
    for (const ReplicaPlan& replica : result.replicas)
      if (replica.micro_batches != result.replicas[0].micro_batches) {
        *reason = "replicas that divide gradients cannot take unequal numbers of micro-batches";
        return nullptr;
      }
  // Shares of devices of unlike memories follow from what is planned; until then they are free.
  auto divided_of = [&](int s) {
    if (!divides) return composition.zero == 3 ? Divided{3, 1} : Divided{};
    const std::vector<int> devices = devices_of(result, s);
    const bool alike = std::all_of(devices.begin(), devices.end(), [&](int d) {
      return cluster_.type_of(d).memory == cluster_.type_of(devices[0]).memory;
    });
    return Divided{composition.zero, alike ? 1 / static_cast<double>(result.replicas.size()) : 0};
  };
  // What is found for one stage helps the next on a group of its kind; kinds are independent.
  struct Planning {
    StageTask task;
    size_t replica;
    int stage;
    const Planned* planned;
  };
  std::vector<std::vector<Planning>> chains;  // stages on groups that look alike, in order
  std::map<int, size_t> chain_of;             // [group]
  std::vector<StageTask> fresh;
  const auto key_of = [](const StageTask& t) {
    return std::tuple(t.number, t.group->number, t.laps, t.micro_batches, t.in_flight, t.recompute,
                      t.thorough, t.divided);
  };
  for (size_t r = 0; r < kinds.size(); ++r) {
    const ReplicaPlan& replica = result.replicas[r];
    for (int s = 0; s < stages; ++s) {
      const int count = replica.micro_batches,
                wanted = std::max(stages - s, composition.replicas[r].stages[s].in_flight),
                most = laps > 1 ? in_flight(replica, s) : std::min(wanted, count);
      const StageTask task{
          &result.theory(s),           numbers[s],           kinds[r][s],  laps, count, most,
          replica.stages[s].recompute, composition.thorough, divided_of(s)};
      const size_t chain = chain_of.try_emplace(task.group->number, chains.size()).first->second;
      if (chain == chains.size()) chains.emplace_back();
      chains[chain].push_back({task, r, s, nullptr});
      if (!stages_.count(key_of(task))) fresh.push_back(task);
    }
  }
  plan_unlimited(fresh);
  parallel_for(static_cast<int>(chains.size()), request_.threads, [&](int c) {
    for (Planning& planning : chains[c]) {
      StageTask task = planning.task;
      std::unique_lock lock(mutex_);
      auto [it, unknown] = stages_.try_emplace(key_of(task));
      lock.unlock();
      planning.planned = &it->second;
      if (unknown) {
        std::set<int, std::greater<>> tries = {task.in_flight, 1};
        if (laps == 1) tries.insert(std::min(stages - planning.stage, task.micro_batches));
        for (int held : tries) {
          task.in_flight = held;
          it->second = plan_stage(task);
          if (it->second.feasible) break;
        }
      }
      if (!it->second.feasible) break;
    }
  });
  for (const auto& chain : chains)
    for (const Planning& planning : chain) {
      if (!planning.planned->feasible) {
        *reason = fmt::format("stage {}: {}", planning.stage, planning.planned->reason);
        return nullptr;
      }
      StagePlan& stage = result.replicas[planning.replica].stages[planning.stage];
      stage.program = planning.planned->program;
      stage.ratios = planning.planned->ratios;
    }

  if (divides) divide_by_room(cluster_, request_.optimizer, &result);
  const std::vector<DividedState> state = divided_states(result);
  add_reductions(kinds, plan.get());
  const size_t separate = plan->reductions.size();
  // Stages that share their devices share the program.
  auto add_joint = [&](int s, std::vector<ReductionProgram>* to) {
    const ReductionProgram* program = joint_of(s);
    if (program && programs_for(*to, program->devices, cluster_.size()).empty())
      to->push_back(*program);
  };
  if (composition.joint)
    for (int s = 0; s < stages; ++s) add_joint(s, &plan->reductions);

  // Each replica's times, and how many micro-batches its stages can hold.
  std::vector<pipeline::Pipeline> times(result.replicas.size());
  for (size_t r = 0; r < result.replicas.size(); ++r) {
    pipeline::Pipeline& p = times[r];
    for (int s = 0; s < stages; ++s) {
      const StagePlan& stage = result.replicas[r].stages[s];
      const CostModel& model = kinds[r][s]->model;
      const Shares shares(stage.ratios);
      const Fractions fractions(model.cluster(), shares);
      const PhaseSeconds seconds =
          phase_seconds(result.theory(s), stage.program, model, fractions, request_.optimizer);
      p.stages.push_back(
          {seconds.forward, seconds.backward + (stage.recompute ? seconds.forward : 0)});
      p.epilogue.push_back(seconds.reduction + seconds.update);
      int limit = composition.replicas[r].micro_batches;
      if (request_.memory_limit) {
        const MemoryCost memory =
            memory_of(result.theory(s), stage.program, fractions, model.types(), request_.optimizer,
                      true, state[s].kept(static_cast<int>(r)));
        for (int t = 0; t < model.types(); ++t) {
          const Bytes one = memory.peak[t] + memory.sums[t],
                      more = stage.recompute ? memory.held_inputs[t] : memory.held[t],
                      room = model.cluster().types[t].memory - one;
          if (room < 0) {
            *reason = fmt::format("stage {}: {} lacks {}", s, model.cluster().types[t].name,
                                  format_bytes(-room));
            return nullptr;
          }
          if (more > 0) limit = std::min(limit, 1 + static_cast<int>(std::min(1e6, room / more)));
        }
      }
      p.in_flight_limit.push_back(limit);
      if (s + 1 == stages) continue;
      pipeline::LinkTime link;
      const auto& next = result.replicas[r].stages[s + 1];
      std::vector<net::PairMessage> down, up;
      for (const Transfer& t : result.parts().transfers) {
        const bool is_down = t.from == s && t.to == s + 1, is_up = t.from == s + 1 && t.to == s;
        if (!is_down && !is_up) continue;
        const StagePlan &from = is_down ? stage : next, &to = is_down ? next : stage;
        const Shares from_shares(from.ratios), to_shares(to.ratios);
        const Theory &made = result.theory(t.from), &taken = result.theory(t.to);
        const Placement a = output_placement(made, from.program, t.made),
                        b = stored_placements(taken, to.program)[t.taken.index];
        add_messages({&from.devices, &from_shares, a, a.is_shard() ? made.cut_size(t.made, a) : 0},
                     {&to.devices, &to_shares, b, b.is_shard() ? taken.cut_size(t.taken, b) : 0},
                     static_cast<Bytes>(graph_.spec(t.value).bytes()), is_down ? &down : &up);
      }
      const net::Topology topology(cluster_);
      link.forward = net::messages_time(topology, down);
      link.backward = net::messages_time(topology, up);
      p.links.push_back(link);
    }
  }

  // Warm-up counts: every schedule that is one, in the simulator.
  Seconds best = std::numeric_limits<double>::infinity();
  int held = 0;
  std::vector<std::vector<int>> best_counts;
  std::set<std::vector<std::vector<int>>> tried;
  if (laps > 1) {
    result.schedule = "interleaved";
    best = simulate(*plan).step;
  }
  const auto steps = laps > 1 ? nullptr : std::make_unique<PipelineSteps>(*plan);
  for (const pipeline::ScheduleDef& def : pipeline::schedule_table()) {
    if (def.counts == nullptr || !steps) continue;
    int sum = 0;
    std::vector<std::vector<int>> all;  // [replica]
    for (size_t r = 0; r < times.size(); ++r)
      all.push_back(pipeline::within_limits(times[r], def.counts(times[r]),
                                            result.replicas[r].micro_batches));
    // Replicas that meet in every backward pass take passes in the same order.
    for (int s = 0; s < stages && divides && composition.zero > 1; ++s) {
      int least = all[0][s];
      for (const std::vector<int>& counts : all) least = std::min(least, counts[s]);
      for (std::vector<int>& counts : all) counts[s] = least;
    }
    for (size_t r = 0; r < times.size(); ++r)
      for (int s = 0; s < stages; ++s) {
        result.replicas[r].stages[s].warm_up = all[r][s];
        sum += all[r][s];
      }
    if (!tried.insert(all).second) continue;
    const Seconds step = steps->step();
    if (step > best * (1 + 1e-9) || (step > best * (1 - 1e-9) && sum >= held)) continue;
    best = step;
    held = sum;
    result.schedule = def.name;
    best_counts.clear();
    for (const ReplicaPlan& replica : result.replicas) {
      best_counts.emplace_back();
      for (const StagePlan& stage : replica.stages) best_counts.back().push_back(stage.warm_up);
    }
  }
  for (size_t r = 0; r < best_counts.size(); ++r)
    for (int s = 0; s < stages; ++s) result.replicas[r].stages[s].warm_up = best_counts[r][s];
  // Gradients summed over ranks and replicas at once, or not, whichever is faster.
  std::vector<ReductionProgram> others = plan->reductions;
  if (composition.joint)
    others.resize(separate);
  else
    for (int s = 0; s < stages; ++s)
      if (joint_of(s) && joint_gradients(result, s).any()) add_joint(s, &others);
  if (others.size() != plan->reductions.size()) {
    std::swap(others, plan->reductions);
    const Seconds step = simulate(*plan).step;
    if (step < best * (1 - 1e-9))
      best = step;
    else
      std::swap(others, plan->reductions);
  }
  if (composition.zero == 0 && composition.try_zero && result.replicas.size() > 1) {
    others = plan->reductions;
    if (!composition.joint) plan->reductions.resize(separate);
    result.zero.assign(stages, {1, {}});
    if (const Seconds step = simulate(*plan).step; step < best * (1 - 1e-9)) {
      best = step;
    } else {
      result.zero.clear();
      std::swap(others, plan->reductions);
    }
  }
  plan->predicted_step_s = best;
  plan->peak_memory_bytes = pipeline_memory(result, cluster_, request_.optimizer);
  if (request_.memory_limit)
    for (int d = 0; d < cluster_.size(); ++d)
      if (plan->peak_memory_bytes[d] > cluster_.type_of(d).memory) {
        *reason =
            fmt::format("device {} lacks {}", d,
                        format_bytes(plan->peak_memory_bytes[d] - cluster_.type_of(d).memory));
        return nullptr;
      }
  return plan;
}

LayerShapes::LayerShapes(const Request& request, const Cluster& cluster, const GraphOf& graph_of)
    : groups_(cluster) {
  std::set<std::string> known;
  std::set<std::pair<std::string, int>> known_on;  // shape, group
  const std::vector<std::vector<int>> meshes = stage_meshes(cluster);
  for (int64_t size : request.micro_batches) {
    benches_.push_back(std::make_unique<Workbench>(request, &groups_, graph_of(size),
                                                   std::max(0, request.layers)));
    Workbench& bench = *benches_.back();
    for (const Theory* theory : bench.distinct_layers()) {
      const std::string shape = shape_of(theory->graph());
      if (known.insert(shape).second) shapes.push_back({shape, size, theory});
    }
    for (const Workbench::Window& window : bench.windows()) {
      const std::string shape = shape_of(window.theory->graph());
      for (const std::vector<int>& mesh : meshes) {
        if (mesh.size() == 1) continue;
        const DeviceGroups::Kind& group = groups_.of(mesh);
        if (!known_on.emplace(shape, group.number).second) continue;
        Workbench::Planned planned = bench.plan_window(window, group, kCalibrationRuns, false);
        if (planned.feasible)
          shapes.push_back({shape, size, window.theory.get(), mesh, nodes_of(group.cluster),
                            std::move(planned.program), std::move(planned.ratios)});
      }
    }
  }
}

Cluster corrected(const Cluster& cluster, const Request& request, const GraphOf& graph_of) {
  std::set<int64_t> sizes;
  for (const ProfiledStage& m : request.measured)
    if (request.batch % m.micro_batch == 0) sizes.insert(m.micro_batch);
  Request plain = request;  // by the model alone
  plain.measured.clear();
  DeviceGroups groups(cluster);
  std::map<std::string, std::pair<Seconds, Seconds>> seconds;  // by type: measured, by the model
  for (int64_t size : sizes) {
    Workbench bench(plain, &groups, graph_of(size), std::max(0, request.layers));
    std::vector<std::string> shapes(bench.size());
    for (int l = 0; l < bench.size(); ++l)
      if (const Theory* theory = bench.layer_theory(l)) shapes[l] = shape_of(theory->graph());
    for (size_t t = 0; t < cluster.types.size(); ++t) {
      int device = 0;
      while (cluster.devices[device].type != static_cast<int>(t)) ++device;
      const DeviceGroups::Kind& one = groups.of({device});
      auto& [measured, modelled] = seconds[cluster.types[t].name];
      for (int l = 0; l < bench.size(); ++l)
        for (const ProfiledStage& m : request.measured) {
          if (m.shape != shapes[l] || m.devices > 1 || m.type != cluster.types[t].name) continue;
          const auto& cost =
              bench.layer_cost(l, one, static_cast<int>(request.batch / size), false);
          measured += m.forward + m.backward;
          modelled += cost.seconds.forward + cost.seconds.backward;
        }
    }
  }
  Cluster result = cluster;
  for (DeviceType& type : result.types) {
    const auto [measured, modelled] = seconds[type.name];
    if (!(measured > 0 && modelled > 0)) continue;
    const double slower = measured / modelled;
    type.flops /= slower;
    type.half_flops /= slower;
    type.memory_bandwidth /= slower;
    type.overhead *= slower;
    for (OpRate& op : type.ops) {
      op.overhead *= slower;
      op.flops /= slower;
      op.memory_bandwidth /= slower;
    }
  }
  return result;
}

}  // namespace motley::planner
