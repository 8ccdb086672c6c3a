#include <algorithm>
#include <chrono>
#include <limits>
#include <map>
#include <set>

#include "auto/engines.h"
#include "cluster/part.h"
#include "core/error.h"
#include "pipeline/search.h"

namespace motley::planner {

namespace {

constexpr int kComposed = 4;       // plans that are planned stage by stage
constexpr int kMicroBatches = 64;  // most of a step that are tried
constexpr int kLayers = 32;        // at most, unless the model has fewer heavy operators

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

class Engine {
 public:
  Engine(const Request& request, const Cluster& cluster, const GraphOf& graph_of)
      : request_(request), cluster_(cluster), graph_of_(graph_of), parts_(parts_of(cluster)) {}

  EngineResult run() {
    const auto start = std::chrono::steady_clock::now();
    result_.engine = "pipeline";
    std::set<int64_t> sizes;
    for (int64_t count = 1; count <= kMicroBatches; count *= 2)
      if (request_.batch % count == 0) sizes.insert(request_.batch / count);
    for (int64_t size : sizes) {
      if (!holds_state(size)) break;
      try_size(size);
    }
    std::stable_sort(found_.begin(), found_.end(), [](const Found& a, const Found& b) {
      return a.plan.makespan < b.plan.makespan;
    });
    for (size_t i = 0; i < found_.size() && i < kComposed; ++i) compose(found_[i]);
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
  };

  // Parameters, gradients and optimizer state have to be somewhere, once.
  bool holds_state(int64_t size) {
    if (!request_.memory_limit || !benches_.empty()) return true;
    const Graph graph = graph_of_(size);
    const Bytes state =
        static_cast<Bytes>(graph.parameter_bytes()) * (2 + state_factor(request_.optimizer));
    Bytes memory = 0;
    for (int d = 0; d < cluster_.size(); ++d) memory += cluster_.type_of(d).memory;
    if (state <= memory) return true;
    result_.reason = fmt::format("parameters and their state take {}, all devices together have {}",
                                 format_bytes(state), format_bytes(memory));
    return false;
  }

  void try_size(int64_t size) {
    auto bench = std::make_unique<Workbench>(request_, cluster_, graph_of_(size), layers_);
    Workbench& w = *bench;
    benches_[size] = std::move(bench);
    if (layers_ == 0 && w.size() > kLayers) {
      layers_ = kLayers;
      benches_[size] = std::make_unique<Workbench>(request_, cluster_, w.graph(), layers_);
    }
    search(size, *benches_[size]);
  }

  // The first devices of a sub-cluster that make up a mesh.
  std::vector<int> devices_of(const pipeline::Mesh& mesh) const {
    const Part& part = parts_[mesh.cluster];
    std::vector<int> devices;
    for (int n = 0; n < mesh.nodes; ++n)
      for (int d = 0; d < mesh.devices; ++d)
        devices.push_back(part.devices[n * part.shape.devices + d]);
    return devices;
  }

  void search(int64_t size, Workbench& bench) {
    pipeline::SearchProblem problem;
    problem.layers = bench.size();
    problem.layer_class = bench.layers().class_of();
    // The first and the last layer stand apart: they have no neighbour on one side.
    problem.layer_class.front() = -1;
    problem.layer_class.back() = -2;
    int next = 0;
    std::map<int, int> numbers;
    for (int& c : problem.layer_class) {
      auto [it, fresh] = numbers.try_emplace(c, next);
      if (fresh) ++next;
      c = it->second;
    }
    for (const Part& p : parts_) problem.clusters.push_back(p.shape);
    problem.batch = request_.batch;
    const Graph& graph = bench.graph();
    Bytes parameters = static_cast<Bytes>(graph.parameter_bytes());
    Bytes memory = 0;
    for (int d = 0; d < cluster_.size(); ++d) memory += cluster_.type_of(d).memory;

    problem.stage_cost = [&](const pipeline::StageQuery& q) {
      pipeline::StageProfile profile;
      const std::vector<int> devices = devices_of(q.mesh);
      const Cluster group = part_of(cluster_, devices);
      const int count = static_cast<int>(request_.batch / (q.micro_batch * q.pipelines));
      // A mesh gets about its share of the model. Where the state of that share, whole on every
      // device, takes most of a device's memory, it is cut.
      const double share = static_cast<double>(devices.size()) * q.pipelines / cluster_.size();
      const bool lean =
          request_.memory_limit && devices.size() > 1 &&
          parameters * (2 + state_factor(request_.optimizer)) * share > 0.5 * group.types[0].memory;
      Bytes workspace = 0, held = 0, inputs = 0, state = 0;
      for (int l = q.first; l <= q.last; ++l) {
        const auto& cost = bench.layer_cost(l, group, count, lean);
        if (!cost.feasible) {
          profile.feasible = false;
          return profile;
        }
        profile.forward += cost.seconds.forward;
        // What is done once per step counts with the passes.
        profile.backward +=
            cost.seconds.backward + (cost.seconds.reduction + cost.seconds.update) / count;
        state += cost.state;
        held += cost.held;
        if (l == q.first) inputs = cost.held_inputs;
        workspace = std::max(workspace, cost.workspace);
        if (q.pipelines > 1) {
          const Bytes own = bench.layers().layers[l].parameters / (lean ? devices.size() : 1.0);
          const Part& part = parts_[q.mesh.cluster];
          std::vector<int> a = share_of(part, q.pipelines, 0), b = share_of(part, q.pipelines, 1);
          a.resize(devices.size());
          b.resize(devices.size());
          profile.reduce +=
              2.0 * (q.pipelines - 1) / q.pipelines * handover(cluster_, a, b, own, /*whole=*/true);
        }
      }
      if (q.mesh.recompute) {
        profile.backward += profile.forward;
        workspace += held;
        held = inputs;
      }
      profile.state = state + workspace;
      profile.activation = held;
      return profile;
    };
    problem.link_cost = [&](int layer, int from, int to, int64_t) {
      const Part &a = parts_[from], &b = parts_[to];
      std::vector<int> sender = {a.devices.back()}, receiver = {b.devices.front()};
      if (from == to)
        sender = {a.devices.front()},
        receiver = {a.shape.nodes > 1 ? a.devices[a.shape.devices] : a.devices.back()};
      const Bytes bytes = bench.layers().layers[layer].boundary;
      const Seconds s = handover(cluster_, sender, receiver, bytes, true);
      return pipeline::LinkTime{s, s};
    };
    // A parameter that both halves of the model read.
    Bytes tied = 0;
    if (bench.size() > 1)
      for (const Tied& t : cut_stages(graph, bench.stages_of({bench.size() / 2}), 2, "halves").tied)
        tied += static_cast<Bytes>(graph.spec(graph.parameters[t.parameter].value).bytes());
    if (tied > 0)
      problem.tied_cost = [&, tied](int first, int last) {
        return handover(cluster_, {parts_[last].devices.back()}, {parts_[first].devices.front()},
                        tied, true);
      };

    pipeline::SearchOptions options;
    options.micro_batches = {size};
    options.pipelines = {1};
    for (int d = 2; d <= cluster_.size() && d <= request_.batch / size; d *= 2)
      options.pipelines.push_back(d);
    options.shapes = pipeline::Shapes::both;
    options.recompute = request_.memory_limit;
    options.memory_limit = request_.memory_limit;
    options.any_order = parts_.size() <= 4;
    options.pool = 3;
    options.time_limit = std::min(20.0, request_.limits.time_limit_s);
    const pipeline::SearchResult found = pipeline::search(problem, options);
    if (!found.feasible) {
      result_.reason = found.reason;
      return;
    }
    stop_ = found.reason;
    for (const pipeline::PipelinePlan& plan : found.pool) found_.push_back({size, plan});
    found_.push_back({size, found.best});
  }

  void compose(const Found& found) {
    Composition composition;
    composition.micro_batch = found.micro_batch;
    std::string note =
        fmt::format("micro-batches of {}, {} pipeline{}, stages of", found.micro_batch,
                    found.plan.pipelines, found.plan.pipelines > 1 ? "s" : "");
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
    if (!seen_.insert(note).second) return;
    std::string reason;
    auto plan = benches_.at(found.micro_batch)->compose(composition, "pipeline", &reason);
    if (!plan) {
      if (result_.plans.empty()) result_.reason = reason;
      return;
    }
    result_.plans.push_back(std::move(plan));
    result_.notes.push_back(note);
  }

  const Request& request_;
  const Cluster& cluster_;
  const GraphOf& graph_of_;
  std::vector<Part> parts_;
  std::map<int64_t, std::unique_ptr<Workbench>> benches_;
  int layers_ = 0;
  std::vector<Found> found_;
  std::set<std::string> seen_;
  std::string stop_;
  EngineResult result_;
};

}  // namespace

EngineResult plan_pipeline(const Request& request, const Cluster& cluster,
                           const GraphOf& graph_of) {
  return Engine(request, cluster, graph_of).run();
}

}  // namespace motley::planner
