#include <algorithm>
#include <array>
#include <chrono>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <tuple>

#include "auto/engines.h"
#include "core/error.h"
#include "net/messages.h"
#include "pipeline/search.h"
#include "sim/simulate.h"

namespace motley::planner {

namespace {

constexpr int kComposed = 6;                // plans that are planned stage by stage
constexpr double kWorth = 1.1;              // times the best plan's time that one may seem to take
constexpr int kMicroBatches = 128;          // most of a step that are tried
constexpr int kOrdered = 6;                 // most sub-clusters of which all orders are tried
constexpr int kLeftOut = 4;                 // most sub-clusters of which any may be left out
constexpr double kIdle = 0.1;               // of the busiest stage, below which one may be given up
constexpr int kLayers = 160;                // at most, unless the model has fewer heavy operators
constexpr double kMuchState = 0.5;          // of a device's memory: it is cut, or divided
constexpr int kCoarsest = 8;                // layers that automatic granularity begins with
constexpr double kGranularityGain = 0.002;  // of balance or time, for which finer layers are tried

// The devices of a sub-cluster, node by node.
struct Part {
  pipeline::SubCluster shape;
  std::vector<int> devices;
};

// The cluster as sub-clusters of equal devices in equal nodes: neighbours that are alike are one.
std::vector<Part> parts_of(const Cluster& cluster) {
  std::vector<Part> parts;
  int parent = -1;  // of the last node
  for (const Group& group : cluster.groups) {
    if (!group.children.empty()) continue;
    for (int d = group.first_device; d < group.first_device + group.device_count;) {
      int end = d;
      while (end < group.first_device + group.device_count &&
             cluster.devices[end].type == cluster.devices[d].type)
        ++end;
      const bool whole = end - d == group.device_count;
      const int above = whole && group.parent.valid() ? group.parent.index : -1;
      Part* last = parts.empty() ? nullptr : &parts.back();
      const bool alike = last && whole && above >= 0 && above == parent &&
                         last->shape.devices == end - d &&
                         cluster.devices[last->devices[0]].type == cluster.devices[d].type;
      if (!alike) {
        parts.emplace_back();
        last = &parts.back();
        last->shape.name = fmt::format("{} from {}", cluster.type_of(d).name, d);
        last->shape.nodes = 0;
        last->shape.devices = end - d;
        last->shape.memory = cluster.type_of(d).memory;
      }
      ++last->shape.nodes;
      parent = above;
      for (; d < end; ++d) last->devices.push_back(d);
    }
  }
  return parts;
}

// The part of `part` that pipeline k of `count` has (as pipeline/search.h divides).
std::vector<int> share_of(const Part& part, int count, int k) {
  const size_t size = part.devices.size() / static_cast<size_t>(count);
  return {part.devices.begin() + static_cast<int64_t>(k * size),
          part.devices.begin() + static_cast<int64_t>((k + 1) * size)};
}

// The first devices of a sub-cluster that make up a mesh.
std::vector<int> devices_of(const Part& part, const pipeline::Mesh& mesh) {
  std::vector<int> devices;
  for (int n = 0; n < mesh.nodes; ++n)
    for (int d = 0; d < mesh.devices; ++d)
      devices.push_back(part.devices[n * part.shape.devices + d]);
  return devices;
}

class Engine {
 public:
  Engine(const Request& request, const Cluster& cluster, const GraphOf& graph_of)
      : request_(request),
        cluster_(cluster),
        graph_of_(graph_of),
        topology_(cluster),
        groups_(cluster),
        parts_(parts_of(cluster)),
        layers_(request.measured.empty() ? request.layers : std::max(0, request.layers)) {}

  EngineResult run() {
    const auto start = std::chrono::steady_clock::now();
    result_.engine = "pipeline";
    std::set<int64_t> sizes;
    for (int64_t count = 1; count <= kMicroBatches; count *= 2)
      if (request_.batch % count == 0) sizes.insert(request_.batch / count);
    if (!request_.micro_batches.empty())
      sizes = {request_.micro_batches.begin(), request_.micro_batches.end()};
    for (int64_t size : sizes) {
      if (!holds_state(size)) break;
      if (!try_size(size)) break;
    }
    // The best two of every micro-batch size, then the next: their like fare alike when they are
    // planned stage by stage.
    std::stable_sort(found_.begin(), found_.end(), [](const Found& a, const Found& b) {
      return a.plan.makespan < b.plan.makespan;
    });
    std::map<int64_t, int> before;
    for (Found& f : found_) f.place = before[f.micro_batch]++;
    std::stable_sort(found_.begin(), found_.end(),
                     [](const Found& a, const Found& b) { return a.place / 2 < b.place / 2; });
    int composed = 0;
    for (const Found& f : found_) {
      Seconds best = std::numeric_limits<double>::infinity();
      for (const auto& plan : result_.plans) best = std::min(best, plan->predicted_step_s);
      if (composed == kComposed) break;
      if (f.plan.makespan > kWorth * best) continue;
      composed += compose(f);
    }
    refine();
    drop_stages();
    rank(&result_);
    for (const auto& [size, bench] : benches_) result_.planned += bench->planned();
    result_.search_s =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (!result_.plans.empty()) result_.reason = stop_;
    return std::move(result_);
  }

 private:
  struct Found {
    int64_t micro_batch;
    pipeline::PipelinePlan plan;
    int place = 0;  // among those of its size
  };

  // Parameters, gradients and optimizer state have to be somewhere, once.
  bool holds_state(int64_t size) {
    if (!request_.memory_limit || !benches_.empty()) return true;
    const Graph graph = graph_of_(size);
    Bytes state = 0;
    for (const Parameter& p : graph.parameters) state += state_bytes(graph, p, request_.optimizer);
    Bytes memory = 0;
    for (int d = 0; d < cluster_.size(); ++d) memory += cluster_.type_of(d).memory;
    if (state <= memory) return true;
    result_.reason = fmt::format("parameters and their state take {}, all devices together have {}",
                                 format_bytes(state), format_bytes(memory));
    return false;
  }

  // False: neither this size nor a larger one fits.
  bool try_size(int64_t size) {
    std::unique_ptr<Workbench>& bench = benches_[size];
    Graph graph = graph_of_(size);
    if (layers_ == kAutomaticLayers) return find_granularity(size, std::move(graph));
    bench =
        std::make_unique<Workbench>(request_, &groups_, std::move(graph), layers_, &experience_);
    if (layers_ == 0 && bench->size() > kLayers) {
      layers_ = kLayers;
      bench =
          std::make_unique<Workbench>(request_, &groups_, bench->graph(), layers_, &experience_);
    }
    if (!holds_activations(size, *bench)) return false;
    keep(size, search(size, *bench, all_parts()));
    search_fewer(size, *bench);
    return true;
  }

  std::vector<int> all_parts() const {
    std::vector<int> all(parts_.size());
    std::iota(all.begin(), all.end(), 0);
    return all;
  }

  // Pipelines that leave sub-clusters out, which may be faster where links are slow: any of few,
  // one of more.
  void search_fewer(int64_t size, Workbench& bench) {
    const auto count = static_cast<int>(parts_.size());
    for (int left_out = 1; left_out + 1 < (1 << count); ++left_out) {
      std::vector<int> use;
      for (int c = 0; c < count; ++c)
        if ((left_out >> c & 1) == 0) use.push_back(c);
      if (count <= kLeftOut || static_cast<int>(use.size()) + 1 == count)
        keep(size, search(size, bench, use));
    }
  }

  // Automatic granularity (HAPT section 5.1): twice as many layers, until neither the load balance
  // (Eq. 25) nor the time gains anything worth having; the best of these serves all micro-batch
  // sizes. Where no plan fits, the finest decides.
  bool find_granularity(int64_t size, Graph graph) {
    std::vector<double> speed;
    for (const Part& part : parts_) speed.push_back(cluster_.type_of(part.devices[0]).flops);
    std::unique_ptr<Workbench>& bench = benches_[size];
    const auto cut = [&](int layers) {
      return std::make_unique<Workbench>(request_, &groups_, graph, layers, &experience_);
    };
    bench = cut(0);
    if (bench->size() > kLayers) bench = cut(kLayers);
    const int finest = bench->size();
    if (!holds_activations(size, *bench)) return false;
    std::unique_ptr<Workbench> finest_bench = std::move(bench);
    pipeline::SearchResult best;
    double balance = 0;
    for (int layers = std::max(kCoarsest, 2 * static_cast<int>(parts_.size()));; layers *= 2) {
      auto next = layers < finest ? cut(layers) : std::move(finest_bench);
      if (bench && layers < finest && next->size() <= bench->size()) continue;
      pipeline::SearchResult found = search(size, *next, all_parts());
      const double found_balance = found.feasible ? pipeline::load_balance(found.best, speed) : 0;
      const bool better = !bench || !best.feasible ||
                          found.best.makespan < best.best.makespan * (1 - kGranularityGain) ||
                          found_balance > balance + kGranularityGain;
      const bool faster = !bench || (found.feasible &&
                                     (!best.feasible || found.best.makespan < best.best.makespan));
      if (faster) {
        layers_ = layers < finest ? layers : finest;
        bench = std::move(next);
        best = std::move(found);
        balance = found_balance;
      }
      if (!better || layers >= finest) break;
    }
    keep(size, std::move(best));
    search_fewer(size, *bench);
    if (found_.empty()) layers_ = kAutomaticLayers;
    return true;
  }

  // The activations of one micro-batch have to be somewhere, beside the state: each stage holds
  // those of its layers at least once, in all its devices together no less than one device would.
  bool holds_activations(int64_t size, Workbench& bench) {
    if (!request_.memory_limit) return true;
    const Graph& graph = bench.graph();
    const DeviceGroups::Kind& one = groups_.of({0});
    const int count = static_cast<int>(request_.batch / size);
    Bytes held = 0, memory = 0;
    for (const Parameter& p : graph.parameters) held += state_bytes(graph, p, request_.optimizer);
    for (int l = 0; l < bench.size(); ++l) {
      const Workbench::LayerCost& cost = bench.layer_cost(l, one, count, false);
      if (cost.feasible) held += cost.held;
    }
    for (int d = 0; d < cluster_.size(); ++d) memory += cluster_.type_of(d).memory;
    if (held <= memory) return true;
    if (found_.empty())
      result_.reason = fmt::format(
          "state and the activations of a micro-batch of {} take {}, all devices together have {}",
          size, format_bytes(held), format_bytes(memory));
    return false;
  }

  void keep(int64_t size, pipeline::SearchResult found) {
    if (!found.feasible) {
      if (found_.empty()) result_.reason = found.reason;
      return;
    }
    stop_ = found.reason;
    for (const pipeline::PipelinePlan& plan : found.pool) found_.push_back({size, plan});
  }

  // The best pipelines on all devices of the sub-clusters `use` (into parts_). Nothing is planned
  // where computation alone, divided among the devices of a mesh without any loss, makes plans that
  // are not worth it beside those found.
  pipeline::SearchResult search(int64_t size, Workbench& bench, const std::vector<int>& use) {
    Seconds worth = pipeline::SearchOptions().worth;
    for (const Found& f : found_) worth = std::min(worth, kWorth * f.plan.objective);
    if (!found_.empty() && request_.measured.empty()) {
      pipeline::SearchResult bound = search(size, bench, use, worth, true);
      if (!bound.feasible) return bound;
    }
    return search(size, bench, use, worth, false);
  }

  // `ideal`: as if a mesh of n devices did everything in one part in n of a device's time, and
  // memory had no end.
  pipeline::SearchResult search(int64_t size, Workbench& bench, const std::vector<int>& use,
                                Seconds worth, bool ideal) {
    const auto part_of = [&](int c) -> const Part& { return parts_[use[c]]; };
    const auto count = static_cast<int>(use.size());
    int devices = 0;
    pipeline::SearchProblem problem;
    for (int c = 0; c < count; ++c) {
      problem.clusters.push_back(part_of(c).shape);
      devices += part_of(c).shape.size();
    }
    problem.layers = bench.size();
    for (int l = 0; l < bench.size(); ++l) problem.layer_class.push_back(bench.cost_class(l));
    problem.batch = request_.batch;
    const Graph& graph = bench.graph();
    const auto parameters = static_cast<Bytes>(graph.parameter_bytes());

    pipeline::SearchOptions options;
    options.micro_batches = {size};
    options.pipelines = {1};
    for (int d = 2; d <= devices && d <= request_.batch / size; d *= 2)
      options.pipelines.push_back(d);
    options.shapes = pipeline::Shapes::both;
    options.memory_limit = request_.memory_limit && !ideal;
    options.recompute = options.memory_limit && request_.recompute;
    options.any_order = count <= kOrdered;
    options.pool = ideal ? 0 : 3;
    options.worth = worth;
    options.time_limit = std::min(20.0, request_.limits.time_limit_s);

    // How often the program runs in a step only says which one is best; about right will do.
    const int runs = static_cast<int>(request_.batch / size);
    const auto on_group = [&](const pipeline::Mesh& mesh, int pipelines) {
      if (ideal) return Workbench::OnGroup{&groups_.of({part_of(mesh.cluster).devices[0]})};
      Workbench::OnGroup on{&groups_.of(devices_of(part_of(mesh.cluster), mesh))};
      // A mesh gets about its share of the model. Where the state of that share, whole on every
      // device, takes most of a device's memory, it is cut.
      const double share = static_cast<double>(mesh.size()) * pipelines / devices;
      on.lean = request_.memory_limit && mesh.size() > 1 &&
                parameters * (2 + state_factor(request_.optimizer)) * share >
                    kMuchState * on.group->cluster.types[0].memory;
      return on;
    };
    std::vector<Workbench::OnGroup> groups;  // those that the search will ask for
    for (int c = 0; c < count; ++c)
      for (pipeline::Shapes shapes : {pipeline::Shapes::paper, pipeline::Shapes::uneven})
        for (int pipelines : options.pipelines)
          pipeline::for_each_mesh(part_of(c).shape, c, shapes, 0,
                                  [&](const pipeline::Mesh& mesh, int) {
                                    if (mesh.size() * pipelines <= part_of(c).shape.size())
                                      groups.push_back(on_group(mesh, pipelines));
                                  });
    bench.plan_layers(groups, runs);

    // A mesh with the costs of all layers on it: sums over the layers in front of each.
    struct OnMesh {
      bool lean = false;
      double devices = 1;
      Bytes memory = 0;  // of one
      std::vector<int> infeasible;
      std::vector<Seconds> forward, backward, once;
      std::vector<Bytes> state, held, late, own;
      std::vector<Bytes> workspace, held_inputs;    // [layer], no sums
      Seconds reduce_latency = 0, reduce_byte = 0;  // of a gradient, over the pipelines
    };
    std::map<std::array<int, 4>, OnMesh> on_mesh;
    auto costs_on = [&](const pipeline::Mesh& mesh, int pipelines) -> const OnMesh& {
      auto [it, fresh] = on_mesh.try_emplace({mesh.cluster, mesh.nodes, mesh.devices, pipelines});
      OnMesh& on = it->second;
      if (!fresh) return on;
      const Workbench::OnGroup group = on_group(mesh, pipelines);
      on.devices = mesh.size();
      on.memory = group.group->cluster.types[0].memory;
      on.lean = group.lean;
      on.infeasible = {0};
      on.forward = on.backward = on.once = on.state = on.held = on.late = on.own = {0.0};
      const auto add = [](auto* sums, auto more) { sums->push_back(sums->back() + more); };
      const double part = ideal ? 1.0 / mesh.size() : 1;
      for (int l = 0; l < bench.size(); ++l) {
        const Workbench::LayerCost& cost = bench.layer_cost(l, *group.group, runs, group.lean);
        add(&on.infeasible, cost.feasible ? 0 : 1);
        add(&on.forward, part * cost.seconds.forward);
        add(&on.backward, part * cost.seconds.backward);
        add(&on.once, ideal ? 0.0 : cost.seconds.reduction + cost.seconds.update);
        add(&on.state, cost.state);
        add(&on.held, cost.held);
        add(&on.late, cost.late);
        add(&on.own, bench.layers().layers[l].parameters);
        on.workspace.push_back(cost.workspace);
        on.held_inputs.push_back(cost.held_inputs);
      }
      if (pipelines > 1 && !ideal) {
        const Part& all = part_of(mesh.cluster);
        std::vector<int> a = share_of(all, pipelines, 0), b = share_of(all, pipelines, 1);
        a.resize(mesh.size());
        b.resize(mesh.size());
        const double rounds = 2.0 * (pipelines - 1) / pipelines;
        const Seconds one = handover(cluster_, a, b, 1e6, true),
                      two = handover(cluster_, a, b, 2e6, true);
        on.reduce_byte = rounds * (two - one) / 1e6;
        on.reduce_latency = rounds * (2 * one - two);
      }
      return on;
    };
    problem.stage_cost = [&](const pipeline::StageQuery& q) {
      pipeline::StageProfile profile;
      const OnMesh& on = costs_on(q.mesh, q.pipelines);
      const auto sum = [&](const auto& sums) { return sums[q.last + 1] - sums[q.first]; };
      profile.feasible = sum(on.infeasible) == 0;
      if (!profile.feasible) return profile;
      const auto times = static_cast<double>(request_.batch / (q.micro_batch * q.pipelines));
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
        workspace += profile.activation;
        profile.activation = on.held_inputs[q.first];
      }
      // Gradients gather while activations are given back.
      Bytes state = sum(on.state);
      if (q.pipelines > 1 && options.memory_limit && state > kMuchState * on.memory) {
        // Pipelines divide optimizer state (ZeRO 1), which costs nothing; where that is not enough,
        // gradients too, which are then reduced in every pass.
        const double optimizer = state_factor(request_.optimizer), all = 2 + optimizer,
                     part = 1.0 / q.pipelines;
        const Bytes whole = state;
        state = whole * (2 + optimizer * part) / all;
        if (state > kMuchState * on.memory) {
          state = whole * (1 + (1 + optimizer) * part) / all;
          profile.backward += profile.reduce / 2;
        }
      }
      profile.state = state + std::max(workspace, sum(on.late) - profile.activation);
      return profile;
    };
    // All pipelines send at once, each from the end of its share of one sub-cluster to the
    // beginning of its share of the next; inside of one, from node to node if there are several.
    const auto crossing = [&](int from, int to, Bytes bytes, int pipelines) {
      std::vector<net::PairMessage> messages;
      for (int k = 0; k < pipelines; ++k) {
        const std::vector<int> a = share_of(part_of(from), pipelines, k),
                               b = share_of(part_of(to), pipelines, k);
        const auto node = static_cast<size_t>(part_of(to).shape.devices);
        const int sender = from == to ? a.front() : a.back(), receiver = from != to ? b.front()
                                                                         : node < b.size()
                                                                             ? b[node]
                                                                             : b.back();
        if (sender != receiver) messages.push_back({sender, receiver, bytes});
      }
      return net::messages_time(topology_, messages);
    };
    std::map<std::tuple<int, int, Bytes, int>, Seconds> links;
    problem.link_cost = [&](int layer, int from, int to, int64_t, int pipelines) {
      const Bytes bytes = bench.layers().layers[layer].boundary;
      auto [it, fresh] = links.try_emplace({from, to, bytes, pipelines});
      if (fresh) it->second = crossing(from, to, bytes, pipelines);
      return pipeline::LinkTime{it->second, it->second};
    };
    const Bytes tied = bench.tied();
    if (tied > 0)
      problem.tied_cost = [&, tied](int first, int last, int pipelines) {
        return crossing(last, first, tied, pipelines);
      };

    pipeline::SearchResult result = pipeline::search(problem, options);
    for (pipeline::Stage& stage : result.best.stages) stage.mesh.cluster = use[stage.mesh.cluster];
    for (pipeline::PipelinePlan& plan : result.pool)
      for (pipeline::Stage& stage : plan.stages) stage.mesh.cluster = use[stage.mesh.cluster];
    return result;
  }

  // Into result_.plans. REQUIRES: there are some.
  size_t best_plan() const {
    size_t best = 0;
    for (size_t i = 1; i < result_.plans.size(); ++i)
      if (result_.plans[i]->predicted_step_s < result_.plans[best]->predicted_step_s) best = i;
    return best;
  }

  // Stages that hardly compute, such as a last one for devices that are slow, are not worth their
  // messages if the best plan is no slower without them, their layers being a neighbour's.
  void drop_stages() {
    if (result_.plans.empty()) return;
    const size_t best = best_plan();
    for (bool dropped = true; dropped;) {
      dropped = false;
      std::unique_ptr<Plan>& plan = result_.plans[best];
      const Composition whole = compositions_[best];
      const int stages = plan->pipeline->stages();
      const Simulation simulation = simulate(*plan);
      std::vector<Seconds> busy(stages, 0);
      for (const ReplicaPlan& replica : plan->pipeline->replicas)
        for (int s = 0; s < stages; ++s)
          for (int d : replica.stages[s].devices)
            busy[s] = std::max(busy[s], simulation.devices[d].busy);
      const Seconds most = *std::max_element(busy.begin(), busy.end());
      for (int s = 0; s < stages && stages > 1 && !dropped; ++s) {
        if (busy[s] > kIdle * most) continue;
        for (int to : {s - 1, s + 1}) {
          if (to < 0 || to == stages) continue;
          Composition without = whole;
          for (ReplicaChoice& replica : without.replicas) {
            StageChoice& taken = replica.stages[to];
            taken.first = std::min(taken.first, replica.stages[s].first);
            taken.last = std::max(taken.last, replica.stages[s].last);
            replica.stages.erase(replica.stages.begin() + s);
          }
          std::string reason;
          auto smaller = benches_.at(whole.micro_batch)->compose(without, "pipeline", &reason);
          if (!smaller || smaller->predicted_step_s > plan->predicted_step_s) continue;
          plan = std::move(smaller);
          compositions_[best] = std::move(without);
          result_.notes[best] += fmt::format(", stage {} given up", s);
          dropped = true;
          break;
        }
      }
    }
  }

  // Plans the best plan's stages again, with more effort where memory is short.
  void refine() {
    if (result_.plans.empty()) return;
    const size_t best = best_plan();
    Composition& composition = compositions_[best];
    Workbench& bench = *benches_.at(composition.micro_batch);
    if (!bench.limited()) return;
    composition.thorough = true;
    std::string reason;
    auto plan = bench.compose(composition, "pipeline", &reason);
    if (plan && plan->predicted_step_s < result_.plans[best]->predicted_step_s)
      result_.plans[best] = std::move(plan);
  }

  // Whether it is planned stage by stage, as no other was.
  bool compose(const Found& found) {
    Composition composition;
    composition.micro_batch = found.micro_batch;
    composition.thorough = false;
    std::string note =
        fmt::format("micro-batches of {}, {} pipeline{}, {} layers in stages of", found.micro_batch,
                    found.plan.pipelines, found.plan.pipelines > 1 ? "s" : "",
                    benches_.at(found.micro_batch)->size());
    for (int k = 0; k < found.plan.pipelines; ++k) {
      ReplicaChoice replica;
      replica.micro_batches = found.plan.micro_batches;
      std::vector<size_t> taken(parts_.size(), 0);
      for (const pipeline::Stage& s : found.plan.stages) {
        const std::vector<int> mine = share_of(parts_[s.mesh.cluster], found.plan.pipelines, k);
        size_t& at = taken[s.mesh.cluster];
        StageChoice stage{s.first, s.last, {}, s.mesh.recompute};
        for (int i = 0; i < s.mesh.size(); ++i) stage.devices.push_back(mine[at++]);
        replica.stages.push_back(std::move(stage));
        if (k == 0) note += fmt::format(" {}x{}", s.last - s.first + 1, s.mesh.size());
      }
      composition.replicas.push_back(std::move(replica));
    }
    size_t devices = 0;
    for (const StageChoice& stage : composition.replicas[0].stages) devices += stage.devices.size();
    devices *= composition.replicas.size();
    if (static_cast<int>(devices) < cluster_.size())
      note += fmt::format(" on {} of {} devices", devices, cluster_.size());
    if (!seen_.insert(note).second) return false;
    std::string reason;
    std::unique_ptr<Plan> plan;
    // The least level of ZeRO at which it fits.
    Workbench& bench = *benches_.at(found.micro_batch);
    const int most = request_.memory_limit && found.plan.pipelines > 1 ? 2 : 0;
    for (; composition.zero <= most; ++composition.zero)
      if ((plan = bench.compose(composition, "pipeline", &reason))) break;
    // With room for as many micro-batches in flight as the search counted on, where that is faster.
    if (plan && bench.limited()) {
      Composition roomy = composition;
      for (ReplicaChoice& replica : roomy.replicas)
        for (size_t s = 0; s < replica.stages.size(); ++s)
          replica.stages[s].in_flight = found.plan.counts[s];
      auto other = bench.compose(roomy, "pipeline", &reason);
      if (other && other->predicted_step_s < plan->predicted_step_s) {
        plan = std::move(other);
        composition = std::move(roomy);
      }
    }
    if (plan && composition.zero > 0) note += fmt::format(", ZeRO {}", composition.zero);
    if (!plan) {
      if (result_.plans.empty()) result_.reason = reason;
      return true;
    }
    std::vector<std::vector<int>> rooms;
    for (const Part& part : parts_) rooms.push_back(part.devices);
    std::unique_ptr<Plan> jointly;
    const Composition before = composition;
    if (place_jointly(cluster_, rooms, *plan, &composition))
      jointly = bench.compose(composition, "pipeline", &reason);
    // `plan` has the devices from before.
    const Composition* placed = &composition;
    if (jointly) {
      result_.plans.push_back(std::move(jointly));
      result_.notes.push_back(note + " placed jointly");
      compositions_.push_back(composition);
      placed = &before;
    }
    result_.plans.push_back(std::move(plan));
    result_.notes.push_back(note);
    compositions_.push_back(*placed);
    return true;
  }

  const Request& request_;
  const Cluster& cluster_;
  const GraphOf& graph_of_;
  net::Topology topology_;
  DeviceGroups groups_;
  Experience experience_;
  std::vector<Part> parts_;
  std::map<int64_t, std::unique_ptr<Workbench>> benches_;
  int layers_;
  std::vector<Found> found_;
  std::vector<Composition> compositions_;  // [plan] of result_
  std::set<std::string> seen_;
  std::string stop_;
  EngineResult result_;
};

}  // namespace

std::vector<std::vector<int>> stage_meshes(const Cluster& cluster) {
  std::vector<std::vector<int>> meshes;
  std::set<std::vector<int>> known;
  for (const Part& part : parts_of(cluster))
    for (pipeline::Shapes shapes : {pipeline::Shapes::paper, pipeline::Shapes::uneven})
      pipeline::for_each_mesh(part.shape, 0, shapes, 0, [&](const pipeline::Mesh& mesh, int) {
        std::vector<int> devices = devices_of(part, mesh);
        if (known.insert(devices).second) meshes.push_back(std::move(devices));
      });
  return meshes;
}

EngineResult plan_pipeline(const Request& request, const Cluster& cluster,
                           const GraphOf& graph_of) {
  return Engine(request, cluster, graph_of).run();
}

}  // namespace motley::planner
