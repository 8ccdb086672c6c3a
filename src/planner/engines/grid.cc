// The grid engine: AMP's degrees of parallelism, found by formulas (grid/search.h) and made into
// plans.
//
// Context and expert parallelism, and parameters that replicas divide (ZeRO 3), become stages on
// all devices concerned, whose programs are searched. A group of several device types is at each
// layer as slow as its slowest member, so that bounds by types hold for it.
#include <algorithm>
#include <chrono>
#include <numeric>
#include <set>
#include <utility>

#include "core/error.h"
#include "graph/op.h"
#include "grid/search.h"
#include "planner/compose.h"
#include "planner/engines.h"
#include "planner/grid_model.h"
#include "planner/joint_placement.h"
#include "spmd/recompute.h"

namespace motley::planner {

namespace {

constexpr double kSearching = 0.5;  // of the time, until strategies are planned stage by stage
constexpr int kComposed = 4;        // of each: one stage a device, several
constexpr int kParted = 2;          // of each, in addition: with context or expert parallelism
constexpr double kWorth = 1.1;      // times the best estimate that one may have
constexpr int kLayers = 48;
constexpr int kContext[] = {2, 4, 8};

// Layers of every stage whose blocks (of the model, by the names of its parameters) are given; what
// comes before the first block or behind a block is with it. Empty: the model has others.
std::vector<int> layers_of_blocks(const PlanBuilder& builder, const std::vector<int>& blocks) {
  const std::vector<int> block_of = spmd::blocks_of(builder.graph());
  const int count = block_of.empty() ? 0 : *std::max_element(block_of.begin(), block_of.end()) + 1;
  if (count != std::accumulate(blocks.begin(), blocks.end(), 0)) return {};
  std::vector<int> layers(blocks.size(), 0);
  size_t stage = 0;
  int end = blocks[0];  // first block of the next stage
  for (const auto& layer : builder.layers().layers) {
    int block = -1;
    for (NodeId n : layer.forward)
      if (block < 0) block = block_of[n.index];
    for (; block >= end; end += blocks[stage]) ++stage;
    ++layers[stage];
  }
  const bool all = std::find(layers.begin(), layers.end(), 0) == layers.end();
  return all ? layers : std::vector<int>();
}

// The levels of ZeRO at which a strategy is planned, one after another until it fits: where less
// does not, parameters are divided too, if that is wanted.
std::vector<int> levels_of(const grid::Strategy& s, const grid::Fixed& fixed, bool divided) {
  if (fixed.zero) return {*fixed.zero == 3 ? 3 : 0};
  if (s.zero == 3) return {3};
  return divided && s.dp > 1 ? std::vector<int>{0, 3} : std::vector<int>{0};
}

}  // namespace

EngineResult plan_grid(const PlanOptions& request, const Cluster& cluster, const GraphOf& graph_of,
                       const grid::Fixed& fixed_choices) {
  const auto start = std::chrono::steady_clock::now();
  EngineResult result{.engine = "grid", .record = request.record};
  grid::Fixed fixed = fixed_choices;
  if (!fixed.micro_batch && request.micro_batches.size() == 1)
    fixed.micro_batch = static_cast<int>(request.micro_batches[0]);
  // The layers do not depend on the micro-batch, up to its size.
  int64_t samples = fixed.micro_batch ? *fixed.micro_batch : 1;
  while (!fixed.micro_batch && samples < 4 && request.batch % (2 * samples) == 0) samples *= 2;
  DeviceGroups groups(cluster);
  SearchCache cache;
  const auto step = step_of(request, graph_of);
  if (!step->of(samples)) {
    result.reason = step->why_not();
    result.refused = true;
    return result;
  }
  std::map<int64_t, std::unique_ptr<PlanBuilder>> builders;
  bool finest = false;
  int wanted = fixed.stages ? std::accumulate(fixed.stages->begin(), fixed.stages->end(), 0) : 0;
  auto builder_of = [&](int64_t size) -> PlanBuilder& {
    auto& builder = builders[size];
    if (!builder) {
      builder = std::make_unique<PlanBuilder>(request, &groups, step, size, wanted, &cache);
      if (wanted == 0 && !finest && builder->size() > kLayers) {
        wanted = kLayers;
        builder = std::make_unique<PlanBuilder>(request, &groups, step, size, wanted, &cache);
      }
    }
    return *builder;
  };
  if (fixed.stages && builder_of(samples).size() != wanted) {
    const int given = std::exchange(wanted, 0);
    finest = true;
    builders.clear();
    const std::vector<int> layers = layers_of_blocks(builder_of(samples), *fixed.stages);
    if (layers.empty()) {
      wanted = given;
      finest = false;
      builders.clear();
    } else {
      fixed.stages = layers;
    }
  }
  PlanBuilder& builder = builder_of(samples);
  const grid::Model model = grid_model(builder, samples);
  const grid::Estimator estimator = estimator_of(model, cluster);
  grid::SearchOptions options;
  options.global_batch = static_cast<int>(request.batch);
  options.fixed = fixed;
  options.memory = request.memory_limit;
  options.zero = request.memory_limit ? std::vector<int>{0, 1, 2, 3} : std::vector<int>{0};
  options.least_zero = true;
  options.interleave = {1, 2};
  for (int cp : kContext)
    if (cp <= cluster.size() && model.tokens % cp == 0) options.cp.push_back(cp);
  for (int ep = 2; ep <= std::min(model.experts, cluster.size()); ++ep)
    if (model.experts % ep == 0) options.ep.push_back(ep);
  options.keep *= 4;
  options.recompute = {grid::Recompute::none};
  if (request.memory_limit && request.recompute) options.recompute.push_back(grid::Recompute::full);
  options.seed = request.limits.seed;
  options.deadline = request.limits.deadline.part(kSearching);
  const grid::SearchResult found = grid::search(estimator, options);
  result.lower_bound = found.lower_bound;
  result.reason = found.ranked.empty() ? found.reason : found.stop_reason;
  int composed[2][2] = {};
  std::set<std::string> seen;
  std::vector<int> everywhere(cluster.size());
  std::iota(everywhere.begin(), everywhere.end(), 0);
  // Plans of a strategy at the levels of ZeRO that its replicas, or the devices of its stages (3),
  // can have. Whether there are any; if it was not even tried, *skipped.
  const auto compose = [&](grid::Strategy s, bool* skipped) {
    *skipped = true;
    const int merged = merged_replicas(s);
    bool even = s.dp % merged == 0 && (merged == 1 || s.zero == 3 || s.ep % s.cp == 0);
    for (int r = 0; even && r < s.dp; r += merged) even = taken_by(s, r, merged) % merged == 0;
    if (!even) {
      if (result.candidates.empty() && (s.zero < 3 || fixed.zero))
        result.reason =
            "replicas that divide experts or parameters cannot take whole micro-batches together";
      return false;
    }
    int64_t total = 0;
    for (int m : s.micro_batches) total += m;
    if (total * s.micro_batch != request.batch) return false;
    // The same devices in the same stages are the same plan.
    grid::Strategy group = s;
    group.tp *= s.cp * merged;
    group.dp /= merged;
    group.micro_batch *= merged;
    group.cp = group.ep = 1;
    group.micro_batches.clear();
    for (int r = 0; r < s.dp; r += merged)
      group.micro_batches.push_back(taken_by(s, r, merged) / merged);
    if (!seen.insert(
                 fmt::format("{} {}", grid::to_string(group), fmt::join(group.micro_batches, " ")))
             .second)
      return false;
    if (!step->of(s.micro_batch * merged)) {
      if (result.candidates.empty()) result.reason = step->why_not();
      return false;
    }
    PlanBuilder& own = builder_of(s.micro_batch * merged);
    if (own.size() != builder.size()) return false;
    *skipped = false;
    Composition composition = composition_of(s);
    // The least level at which it fits.
    const bool any = !fixed.zero && composition.replicas.size() > 1;
    const int least = s.zero == 3 ? 3 : fixed.zero.value_or(0),
              most = any && request.memory_limit ? 2 : least;
    composition.try_zero = any;
    composition.zero = least;
    std::string reason;
    std::unique_ptr<Plan> plan = own.compose_divided(&composition, most, "grid", &reason);
    if (!plan) {
      if (result.candidates.empty()) result.reason = reason;
      return false;
    }
    std::unique_ptr<Plan> jointly;
    if (!fixed.devices && s.interleave == 1 &&
        place_jointly(cluster, {everywhere}, *plan, &composition,
                      request.limits.deadline.part(kPlacing)))
      jointly = own.compose(composition, "grid", &reason);
    auto note = [&](const Plan& made) {
      if (s.zero < 3) s.zero = made.pipeline->level(0);
      return grid::to_string(s);
    };
    std::string its_note = note(*plan);
    result.add(std::move(plan), std::move(its_note));
    if (!jointly) return true;
    its_note = note(*jointly) + " placed jointly";
    result.add(std::move(jointly), std::move(its_note));
    return true;
  };
  for (const grid::Candidate& candidate : found.ranked) try {
      grid::Strategy s = candidate.strategy;
      const bool parts = s.cp > 1 || s.ep > 1;
      int& tried = composed[s.interleave > 1][parts];
      if (tried >= (parts ? kParted : kComposed)) continue;
      if (!result.candidates.empty() &&
          candidate.estimate.step > kWorth * found.ranked[0].estimate.step)
        break;
      const bool divided = request.memory_limit && result.candidates.empty();
      for (int level : levels_of(s, fixed, divided)) {
        s.zero = level;
        bool skipped = false;
        const bool made = compose(s, &skipped);
        if (made) ++tried;
        if (made || skipped) break;
      }
    } catch (const TimeIsUp&) {
      if (result.candidates.empty()) result.reason = kNoTime;
      break;
    }
  rank(&result);
  if (!result.candidates.empty()) result.reason = found.stop_reason;
  for (const auto& [size, b] : builders)
    if (b) result.planned += b->planned();
  result.search_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return result;
}

}  // namespace motley::planner
