// The grid engine: AMP's degrees of parallelism, found by formulas (grid/search.h) and made into
// plans.
//
// Context and expert parallelism, and parameters that replicas divide (ZeRO 3), become stages on
// all devices concerned, whose programs are searched. A group of several device types is at each
// layer as slow as its slowest member, so that bounds by types hold for it.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <utility>

#include "core/error.h"
#include "core/parallel.h"
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
constexpr int kHurried = 3;         // of each, looked at before those that take long to plan
constexpr double kWorth = 1.1;      // times the best estimate that one may have
// Times its estimate that a plan may take, for the estimate to be one that others are compared with.
constexpr double kFarOff = 1.5;
constexpr int kLayers = 48;
constexpr int kContext[] = {2, 4, 8};
// Of graphs of which threads plan several strategies at a time: of larger ones, the first should not
// have to wait.
constexpr size_t kFewNodes = 20'000;

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

class GridPlanner {
 public:
  GridPlanner(const PlanOptions& request, const Cluster& cluster, const GraphOf& graph_of,
              const grid::Fixed& fixed)
      : request_(request),
        cluster_(cluster),
        fixed_(fixed),
        groups_(cluster),
        step_(step_of(request, graph_of)),
        small_(request.threads != 1 && step_->graph().nodes.size() < kFewNodes),
        everywhere_(cluster.size()) {
    result_.engine = "grid";
    result_.record = request.record;
    std::iota(everywhere_.begin(), everywhere_.end(), 0);
    if (!fixed_.micro_batch && request.micro_batches.size() == 1)
      fixed_.micro_batch = static_cast<int>(request.micro_batches[0]);
    if (fixed_.stages) wanted_ = std::accumulate(fixed_.stages->begin(), fixed_.stages->end(), 0);
  }

  EngineResult run() {
    const auto start = std::chrono::steady_clock::now();
    // The layers do not depend on the micro-batch, up to its size.
    int64_t samples = fixed_.micro_batch ? *fixed_.micro_batch : 1;
    while (!fixed_.micro_batch && samples < 4 && request_.batch % (2 * samples) == 0) samples *= 2;
    PlanBuilder* builder = nullptr;
    beside([&] { builder = first_builder(samples); }, [&](int64_t size) { step_->of(size); });
    if (!builder) {
      step_->of(samples);  // so that it says why of this size, not of those beside
      result_.reason = step_->why_not();
      result_.refused = true;
      return std::move(result_);
    }
    layers_ = builder->size();
    const grid::Model model = grid_model(*builder, samples);
    grid::SearchResult found;
    beside([&] { found = grid::search(estimator_of(model, cluster_), search_options(model)); },
           [&](int64_t size) { prepare(size); });
    result_.lower_bound = found.lower_bound;
    result_.reason = found.ranked.empty() ? found.reason : found.stop_reason;
    // First strategies whose stages fit with their best programs, as the others take long to plan;
    // if there are none worth it, with programs that cut all parameters.
    std::vector<Seconds> made(found.ranked.size(), 0);
    for (const Effort effort : {Effort::none, Effort::lean, Effort::all}) try {
        effort_ = effort;
        const bool wanted =
            effort == Effort::all || (request_.memory_limit && (effort == Effort::none || !near_));
        if (wanted) compose_all(found.ranked, &made);
      } catch (const TimeIsUp&) {
        if (result_.candidates.empty()) result_.reason = kNoTime;
        break;
      }
    rank(&result_);
    if (!result_.candidates.empty()) result_.reason = found.stop_reason;
    for (const auto& [size, b] : builders_)
      if (b) result_.planned += b->planned();
    result_.search_s =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return std::move(result_);
  }

 private:
  PlanBuilder& builder_of(int64_t size) {
    auto& builder = builders_[size];
    if (!builder) {
      if (wanted_ == 0 && !finest_) {
        wanted_ = step_->at_most(size, kLayers);
        finest_ = wanted_ == 0;
      }
      builder = std::make_unique<PlanBuilder>(request_, &groups_, step_, size, wanted_, &cache_);
    }
    return *builder;
  }

  // null: the step cannot be cut into parts of so many samples.
  PlanBuilder* first_builder(int64_t samples) {
    if (!step_->of(samples)) return nullptr;
    take_fixed_blocks(samples);
    return &builder_of(samples);
  }

  // What builder_of() will ask for, if there is time.
  void prepare(int64_t size) {
    try {
      if (step_->of(size)) step_->layers(size, wanted_);
    } catch (const TimeIsUp&) {
    }
  }

  // Beside some work, if there is another thread, a part of what the micro-batches take that most
  // strategies have.
  void beside(const std::function<void()>& work, const std::function<void(int64_t)>& part) {
    parallel_for(small_ && !fixed_.micro_batch ? 2 : 1, request_.threads, [&](int i) {
      if (i == 0) return work();
      for (const int64_t size : {1, 2})
        if (request_.batch % size == 0) try {
            part(size);
          } catch (const TimeIsUp&) {
            return;
          }
    });
  }

  // Fixed stages that are not of so many layers as there are may be of blocks.
  void take_fixed_blocks(int64_t samples) {
    if (!fixed_.stages || builder_of(samples).size() == wanted_) return;
    const int given = std::exchange(wanted_, 0);
    finest_ = true;
    builders_.clear();
    const std::vector<int> layers = layers_of_blocks(builder_of(samples), *fixed_.stages);
    if (!layers.empty()) {
      fixed_.stages = layers;
      return;
    }
    wanted_ = given;
    finest_ = false;
    builders_.clear();
  }

  grid::SearchOptions search_options(const grid::Model& model) const {
    grid::SearchOptions options;
    options.global_batch = static_cast<int>(request_.batch);
    options.fixed = fixed_;
    options.memory = request_.memory_limit;
    options.zero = request_.memory_limit ? std::vector<int>{0, 1, 2, 3} : std::vector<int>{0};
    options.least_zero = true;
    options.interleave = {1, 2};
    for (int cp : kContext)
      if (cp <= cluster_.size() && model.tokens % cp == 0) options.cp.push_back(cp);
    for (int ep = 2; ep <= std::min(model.experts, cluster_.size()); ++ep)
      if (model.experts % ep == 0) options.ep.push_back(ep);
    options.keep *= 4;
    options.recompute = {grid::Recompute::none};
    if (request_.memory_limit && request_.recompute)
      options.recompute.push_back(grid::Recompute::full);
    options.threads = request_.threads;
    options.seed = request_.limits.seed;
    options.deadline = request_.limits.deadline.part(kSearching);
    return options;
  }

  // A strategy on its way to plans.
  struct Attempt {
    grid::Strategy strategy;
    PlanBuilder* builder = nullptr;
    StagePrograms::Draft draft;  // of what is planned beside others
    std::unique_ptr<Plan> plan, jointly;
    std::string reason;  // why there is no plan
    bool out_of_time = false;
  };

  // Plans at the same time what compose_all() will in any case, while it hurries.
  void compose_beside(const std::vector<grid::Candidate>& ranked) {
    int tried[2][2] = {};
    std::set<std::string> looks;
    std::set<int64_t> sizes;
    std::vector<Attempt*> attempts;
    for (size_t c = 0; c < ranked.size(); ++c) {
      grid::Strategy s = ranked[c].strategy;
      const bool parts = s.cp > 1 || s.ep > 1;
      if (++tried[s.interleave > 1][parts] > std::min(kHurried, parts ? kParted : kComposed))
        continue;
      if (ranked[c].estimate.step > kWorth * ranked[0].estimate.step) break;
      s.zero = levels_of(s, fixed_, false)[0];
      const int merged = merged_replicas(s);
      if (!even(s, merged) || !looks.insert(look_of(s, merged)).second) continue;
      beside_[c].strategy = s;
      sizes.insert(s.micro_batch * merged);
    }
    const std::vector<int64_t> all(sizes.begin(), sizes.end());
    parallel_for(static_cast<int>(all.size()), request_.threads, [&](int i) { prepare(all[i]); });
    for (auto& [c, attempt] : beside_) {
      const int64_t size = attempt.strategy.micro_batch * merged_replicas(attempt.strategy);
      try {
        if (step_->of(size)) attempt.builder = &builder_of(size);
      } catch (const TimeIsUp&) {
        attempt.out_of_time = true;
      }
      if (!attempt.builder || attempt.builder->size() != layers_) continue;
      attempt.builder->set_effort(Effort::none);
      attempt.draft.backwards = attempts.size() % 2 == 1;
      attempts.push_back(&attempt);
    }
    std::atomic<int> left = static_cast<int>(attempts.size());
    std::atomic<bool> over = false;
    const int threads = threads_of(request_.threads);
    const auto share = [&] {  // threads among those that are left
      for (auto& [size, builder] : builders_)
        if (builder) builder->set_threads(threads / std::clamp<int>(left, 1, threads));
    };
    share();
    parallel_for(left, threads, [&](int i) {
      attempts[i]->out_of_time = true;
      if (!over) try {
          make(attempts[i], &attempts[i]->draft);
          attempts[i]->out_of_time = false;
        } catch (const TimeIsUp&) {
          over = true;
        }
      --left;
      share();
    });
  }

  // [candidate] *made: the step of its plan; 0: there is none.
  void compose_all(const std::vector<grid::Candidate>& ranked, std::vector<Seconds>* made) {
    int composed[2][2] = {}, tried[2][2] = {};
    bool any = false, far_off = false;
    const Seconds least = ranked.empty() ? 0 : ranked[0].estimate.step;
    // The estimate that one may have.
    Seconds worth =
        effort_ == Effort::none ? kWorth * least : std::numeric_limits<double>::infinity();
    if (effort_ == Effort::none && small_) compose_beside(ranked);
    for (size_t c = 0; c < ranked.size(); ++c) {
      grid::Strategy s = ranked[c].strategy;
      const bool parts = s.cp > 1 || s.ep > 1;
      int& count = composed[s.interleave > 1][parts];
      if (count >= (parts ? kParted : kComposed)) continue;
      if (effort_ != Effort::all && ++tried[s.interleave > 1][parts] > kHurried) continue;
      const Seconds estimate = ranked[c].estimate.step;
      if (estimate > worth) break;
      const bool divided = request_.memory_limit && !any && effort_ == Effort::all;
      for (int level : levels_of(s, fixed_, divided)) {
        s.zero = level;
        bool skipped = false;
        Seconds& step = (*made)[c];
        if (step == 0) step = compose(c, s, kFarOff * estimate, &skipped);
        if (step > 0 || skipped) break;
      }
      Seconds& step = (*made)[c];
      if (step == 0) continue;
      if (step > kFarOff * estimate) {
        far_off = true;
        if (effort_ != Effort::all) {  // which may do better
          step = 0;
          continue;
        }
      } else {
        near_ = true;
        worth = std::min(worth, kWorth * (effort_ == Effort::all && !far_off ? least : estimate));
      }
      any = true, ++count;
      if (effort_ == Effort::all) worth = std::min(worth, kWorth * step);
    }
  }

  // Whether replicas that work as one can take whole micro-batches, so that their sum is the batch.
  bool even(const grid::Strategy& s, int merged) {
    bool even = s.dp % merged == 0 && (merged == 1 || s.zero == 3 || s.ep % s.cp == 0);
    for (int r = 0; even && r < s.dp; r += merged) even = taken_by(s, r, merged) % merged == 0;
    if (!even && result_.candidates.empty() && (s.zero < 3 || fixed_.zero))
      result_.reason =
          "replicas that divide experts or parameters cannot take whole micro-batches together";
    const int64_t total =
        std::accumulate(s.micro_batches.begin(), s.micro_batches.end(), int64_t{0});
    return even && total * s.micro_batch == request_.batch;
  }

  // Of strategies with the same devices in the same stages, which are the same plan.
  static std::string look_of(const grid::Strategy& s, int merged) {
    grid::Strategy group = s;
    group.tp *= s.cp * merged;
    group.dp /= merged;
    group.micro_batch *= merged;
    group.cp = group.ep = 1;
    group.micro_batches.clear();
    for (int r = 0; r < s.dp; r += merged)
      group.micro_batches.push_back(taken_by(s, r, merged) / merged);
    return fmt::format("{} {}", grid::to_string(group), fmt::join(group.micro_batches, " "));
  }

  // Plans of a candidate's strategy at the levels of ZeRO that its replicas, or the devices of its
  // stages (3), can have. The step of the first; 0: none, and if it was not even tried, *skipped. It
  // may be tried again with more effort, unless it takes no longer than `enough`.
  Seconds compose(size_t c, const grid::Strategy& s, Seconds enough, bool* skipped) {
    *skipped = true;
    const int merged = merged_replicas(s);
    if (!even(s, merged)) return 0;
    const std::string look = look_of(s, merged);
    if (seen_.count(look)) return 0;
    if (!step_->of(s.micro_batch * merged)) {
      if (result_.candidates.empty()) result_.reason = step_->why_not();
      return 0;
    }
    PlanBuilder& own = builder_of(s.micro_batch * merged);
    if (own.size() != layers_) return 0;
    own.set_effort(effort_);
    *skipped = false;
    Attempt attempt;
    if (const auto it = beside_.find(c); it != beside_.end() && effort_ == Effort::none) {
      if (it->second.out_of_time) throw TimeIsUp();
      if (own.holds(it->second.draft)) attempt = std::move(it->second);
    }
    if (attempt.builder) {
      own.take(std::move(attempt.draft));
    } else {
      attempt.strategy = s;
      attempt.builder = &own;
      make(&attempt, nullptr);
    }
    if (effort_ == Effort::all || (attempt.plan && attempt.plan->predicted_step_s <= enough))
      seen_.insert(look);
    if (!attempt.plan) {
      if (result_.candidates.empty()) result_.reason = attempt.reason;
      return 0;
    }
    const Seconds step = attempt.plan->predicted_step_s;
    add(std::move(attempt.plan), s, "");
    if (attempt.jointly) add(std::move(attempt.jointly), s, " placed jointly");
    return step;
  }

  void make(Attempt* attempt, StagePrograms::Draft* draft) {
    const grid::Strategy& s = attempt->strategy;
    Composition composition =
        composition_of(s, fixed_.recompute ? Again::always : Again::if_needed);
    // The least level at which it fits.
    const bool any = !fixed_.zero && composition.replicas.size() > 1;
    const int least = s.zero == 3 ? 3 : fixed_.zero.value_or(0),
              most = any && request_.memory_limit ? 2 : least;
    composition.try_zero = any;
    composition.zero = least;
    attempt->plan =
        attempt->builder->compose_divided(&composition, most, "grid", &attempt->reason, draft);
    if (attempt->plan && !fixed_.devices && s.interleave == 1 &&
        place_jointly(cluster_, {everywhere_}, *attempt->plan, &composition,
                      request_.limits.deadline.part(kPlacing)))
      attempt->jointly = attempt->builder->compose(composition, "grid", &attempt->reason, draft);
  }

  void add(std::unique_ptr<Plan> plan, grid::Strategy s, const char* how) {
    if (s.zero < 3) s.zero = plan->pipeline->level(0);
    result_.add(std::move(plan), grid::to_string(s) + how);
  }

  const PlanOptions& request_;
  const Cluster& cluster_;
  grid::Fixed fixed_;
  DeviceGroups groups_;
  SearchCache cache_;
  const std::shared_ptr<BatchStep> step_;
  const bool small_;             // and there are threads
  std::vector<int> everywhere_;  // all devices
  std::map<int64_t, std::unique_ptr<PlanBuilder>> builders_;
  int wanted_ = 0;       // layers; 0: what the model has
  bool finest_ = false;  // however many these are
  int layers_ = 0;
  std::map<size_t, Attempt> beside_;  // by candidate: of those that are planned in any case
  std::set<std::string> seen_;        // looks of what was planned
  Effort effort_ = Effort::all;
  bool near_ = false;  // some plan takes about what its estimate says
  EngineResult result_;
};

}  // namespace

EngineResult plan_grid(const PlanOptions& request, const Cluster& cluster, const GraphOf& graph_of,
                       const grid::Fixed& fixed) {
  return GridPlanner(request, cluster, graph_of, fixed).run();
}

}  // namespace motley::planner
