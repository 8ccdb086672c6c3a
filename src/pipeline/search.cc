#include "pipeline/search.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/error.h"
#include "pipeline/chain.h"
#include "pipeline/schedules.h"

namespace motley::pipeline {

namespace {

constexpr double kMostCells = 4e7;  // states of orders that are searched at once

// Orders by the chains that search them. Those of many sub-clusters are searched at once, behind
// the one that is listed, which finds plans that the others are held against.
std::vector<Orders> chains_of(const SearchProblem& problem, const SearchOptions& options) {
  const auto count = static_cast<int>(problem.clusters.size());
  std::vector<int> order(count);
  std::iota(order.begin(), order.end(), 0);
  if (!options.any_order) return {{order}};
  std::vector<Orders> chains;
  double cells = problem.layers;
  for (const SubCluster& c : problem.clusters) cells += 1.0 * problem.layers * c.size();
  if (count >= options.joint_orders && std::ldexp(cells, count - 1) <= kMostCells) {
    chains.push_back({order});
    chains.resize(problem.tied_cost ? count + 1 : 2);
    do {
      chains[problem.tied_cost ? 1 + order.back() : 1].push_back(order);
    } while (std::next_permutation(order.begin(), order.end()));
  } else {
    do {
      chains.push_back({order});
    } while (std::next_permutation(order.begin(), order.end()));
  }
  return chains;
}

// Where a slice that starts at a device starts first: on nodes of the same kinds, as far in; if the
// devices of its node are alike, at the beginning.
class FirstPlace {
 public:
  FirstPlace(const SubCluster& cluster, int d) : per_node_(cluster.devices), d_(d) {
    if (cluster.kinds.empty()) return;
    const auto node = [&](int n) { return cluster.kinds.begin() + n * per_node_; };
    for (int n = 0; n < cluster.nodes; ++n) {
      int same = 0;
      while (!std::equal(node(same), node(same + 1), node(n))) ++same;
      like_.push_back(same);
    }
    const int here = d / per_node_;
    uniform_ = std::count(node(here), node(here + 1), cluster.kinds[d]) == per_node_;
  }
  int of_part() const {
    if (like_.empty()) return 0;
    return like_[d_ / per_node_] * per_node_ + (uniform_ ? 0 : d_ % per_node_);
  }
  int of_nodes(int count) const {
    if (like_.empty()) return 0;
    const auto here = like_.begin() + d_ / per_node_;
    int first = 0;
    while (!std::equal(here, here + count, like_.begin() + first)) ++first;
    return first * per_node_;
  }

 private:
  int per_node_, d_;
  bool uniform_ = false;
  std::vector<int> like_;  // [node] the first of the same kinds; empty: devices are alike
};

}  // namespace

void Pool::offer(PipelinePlan plan) {
  if (plan.objective > worth) return;
  for (const PipelinePlan& other : plans)
    if (other.objective == plan.objective && other.stages.size() == plan.stages.size() &&
        std::equal(
            other.stages.begin(), other.stages.end(), plan.stages.begin(),
            [](const Stage& a, const Stage& b) { return a.first == b.first && a.mesh == b.mesh; }))
      return;
  auto at = std::upper_bound(plans.begin(), plans.end(), plan.objective,
                             [](Seconds t, const PipelinePlan& p) { return t < p.objective; });
  plans.insert(at, std::move(plan));
  if (plans.size() > capacity) plans.pop_back();
}

void for_each_mesh(const SubCluster& cluster, int index, Shapes shapes, int d,
                   const std::function<void(const Mesh&, int)>& visit) {
  int per_node = cluster.devices, in_node = d % per_node;
  bool power = (per_node & (per_node - 1)) == 0;
  // Powers of two up to a node, and whole nodes, pack in any order; other sizes stay in a node.
  bool anywhere = shapes == Shapes::paper && power && cluster.kinds.empty();
  const FirstPlace first(cluster, d);
  for (int m = 1; m < per_node; shapes == Shapes::paper ? m *= 2 : ++m) {
    int behind = d + m;
    if (anywhere ? behind <= cluster.size() : in_node + m <= per_node)
      visit({index, 1, m, false, first.of_part()}, behind);
  }
  if (anywhere || in_node == 0)
    for (int n = 1; d + n * per_node <= cluster.size(); ++n)
      visit({index, n, per_node, false, first.of_nodes(n)}, d + n * per_node);
}

PipelinePlan evaluate(const SearchProblem& problem, const std::vector<Stage>& stages,
                      int64_t micro_batch, int micro_batches, int pipelines, bool memory_limit) {
  PipelinePlan plan;
  plan.stages = stages;
  plan.micro_batch = micro_batch;
  plan.micro_batches = micro_batches;
  plan.pipelines = pipelines;
  Seconds reduce = 0, latency = 0;
  for (size_t i = 0; i < stages.size(); ++i) {
    const Stage& s = stages[i];
    plan.pipeline.stages.push_back({s.profile.forward, s.profile.backward});
    plan.pipeline.in_flight_limit.push_back(
        std::max(1, in_flight_limit(s.profile, problem.clusters[s.mesh.cluster].memory,
                                    micro_batches, memory_limit)));
    plan.pipeline.epilogue.push_back(pipelines > 1 ? s.profile.reduce : 0);
    reduce = std::max(reduce, plan.pipeline.epilogue.back());
    latency += plan.pipeline.stages.back().total();
    if (i + 1 < stages.size()) {
      plan.pipeline.links.push_back(problem.link_cost(
          s.last + 1, s.mesh.cluster, stages[i + 1].mesh.cluster, micro_batch, pipelines));
      latency += plan.pipeline.links.back().total();
    }
  }
  ExactCounts exact = exact_counts(plan.pipeline);
  plan.period = exact.period;
  plan.counts = exact.counts;
  plan.objective = latency + (micro_batches - 1) * exact.period + reduce;
  if (problem.tied_cost && stages.size() > 1)
    plan.objective +=
        problem.tied_cost(stages.front().mesh.cluster, stages.back().mesh.cluster, pipelines);
  return plan;
}

namespace {

// The clusters one of `pipelines` equal pipelines has; false if they do not divide, or not into
// devices of the same kinds.
bool divide(const std::vector<SubCluster>& clusters, int pipelines, std::vector<SubCluster>* part) {
  *part = clusters;
  for (SubCluster& c : *part) {
    if (c.nodes % pipelines == 0)
      c.nodes /= pipelines;
    else if (c.nodes == 1 && c.devices % pipelines == 0)
      c.devices /= pipelines;
    else
      return false;
    if (c.kinds.empty()) continue;
    const auto size = static_cast<size_t>(c.size());
    for (size_t d = size; d < c.kinds.size(); ++d)
      if (c.kinds[d] != c.kinds[d % size]) return false;
    c.kinds.resize(size);
  }
  return true;
}

void check_problem(const SearchProblem& problem, const SearchOptions& options) {
  auto positive = [](const char* field, int64_t value) {
    if (value < 1) throw user_error("pipeline", "{} is {}; give a positive number", field, value);
  };
  positive("layers", problem.layers);
  positive("batch", problem.batch);
  if (problem.layers > 100'000)
    throw user_error("pipeline", "layers is {}; give at most 100000", problem.layers);
  if (problem.clusters.empty() || problem.clusters.size() > kMostSubClusters)
    throw user_error("pipeline", "clusters has {} entries; give 1 to {}", problem.clusters.size(),
                     kMostSubClusters);
  for (const SubCluster& c : problem.clusters) {
    positive("clusters.nodes", c.nodes);
    positive("clusters.devices", c.devices);
    const int64_t size = static_cast<int64_t>(c.nodes) * c.devices;
    if (size >= int64_t{1} << kSizeBits)
      throw user_error("pipeline", "clusters has one of {} x {} devices; give less than {}",
                       c.nodes, c.devices, int64_t{1} << kSizeBits);
    if (!c.kinds.empty() && static_cast<int64_t>(c.kinds.size()) != size)
      throw user_error("pipeline", "clusters.kinds has {} entries; give {}, one per device",
                       c.kinds.size(), size);
  }
  for (int64_t m : options.micro_batches) positive("micro_batches", m);
  for (int d : options.pipelines) positive("pipelines", d);
  if (!problem.layer_class.empty() &&
      static_cast<int>(problem.layer_class.size()) != problem.layers)
    throw user_error("pipeline", "layer_class has {} entries; give {}, one per layer",
                     problem.layer_class.size(), problem.layers);
}

}  // namespace

SearchResult search(const SearchProblem& problem, const SearchOptions& options) {
  check_problem(problem, options);
  SearchResult result;
  result.lower_bound = kInfinity;
  const double start = steady_seconds();
  Pool pool;
  pool.capacity = static_cast<size_t>(std::max(1, options.pool));
  if (options.worth < kLongest) pool.worth = options.worth;
  bool complete = true;
  std::vector<Shapes> families = {options.shapes};
  if (options.shapes == Shapes::both) families = {Shapes::paper, Shapes::uneven};
  for (int pipelines : options.pipelines)
    for (int64_t micro_batch : options.micro_batches) {
      if (problem.batch % (micro_batch * pipelines) != 0) continue;
      int64_t count = problem.batch / (micro_batch * pipelines);
      if (count > kUnlimited / 2)
        throw user_error("pipeline", "batch {} has {} micro-batches; give a larger micro-batch",
                         problem.batch, count);
      int micro_batches = static_cast<int>(count);
      SearchProblem part = problem;
      if (!divide(problem.clusters, pipelines, &part.clusters)) continue;
      CostTable table(part, options, micro_batch, micro_batches, pipelines);
      Shared shared;
      for (Shapes shapes : families) {
        for (const Orders& orders : chains_of(part, options)) {
          ++result.configurations;
          if (options.deadline.over()) {
            complete = false;
            result.lower_bound = 0;
            break;
          }
          const ChainProblem chain{part,        options,       orders,   shapes,
                                   micro_batch, micro_batches, pipelines};
          complete = search_chain(chain, &table, &shared, &pool, &result) && complete;
        }
      }
      result.planned += table.planned;
      result.cost_s += table.seconds;
    }
  result.search_s = steady_seconds() - start - result.cost_s;
  result.feasible = !pool.plans.empty();
  if (!result.feasible) {
    result.reason = result.configurations == 0
                        ? "no micro-batch size and number of pipelines divide the batch and the "
                          "sub-clusters"
                    : complete && pool.worth < kInfinity ? "no plan is worth it"
                    : complete ? "in every plan some stage does not fit its devices with one "
                                 "micro-batch in flight"
                               : "time ran out before a plan was found";
    return result;
  }
  result.reason = complete ? "proven optimal" : "time ran out";
  result.objective = pool.best();
  result.lower_bound = std::min(result.lower_bound, result.objective);
  if (options.pool > 0) {
    double simulate = steady_seconds();
    size_t best = 0;
    for (size_t i = 0; i < pool.plans.size(); ++i) {
      PipelinePlan& plan = pool.plans[i];
      ScheduleRun run = run_best(plan.pipeline, plan.micro_batches);
      plan.schedule = run.schedule.kind;
      plan.makespan = run.timeline.makespan;
      if (problem.tied_cost && plan.stages.size() > 1)
        plan.makespan += problem.tied_cost(plan.stages.front().mesh.cluster,
                                           plan.stages.back().mesh.cluster, plan.pipelines);
      if (plan.makespan < pool.plans[best].makespan) best = i;
    }
    result.best = pool.plans[best];
    result.simulate_s = steady_seconds() - simulate;
  } else {
    result.best = pool.plans[0];
  }
  result.pool = std::move(pool.plans);
  return result;
}

double load_balance(const PipelinePlan& plan, const std::vector<double>& speed) {
  Seconds longest = 0;
  for (const Stage& s : plan.stages)
    longest = std::max(longest, s.profile.forward + s.profile.backward);
  double done = 0, possible = 0;
  for (const Stage& s : plan.stages) {
    double weight = speed[s.mesh.cluster] * s.mesh.size();
    done += (s.profile.forward + s.profile.backward) * weight;
    possible += longest * weight;
  }
  return done / possible;
}

}  // namespace motley::pipeline
