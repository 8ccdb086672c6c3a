// The pipeline engine: HAPT's search of stages and sub-meshes.
//
// For every size of micro-batches the search (pipeline/search.h) adds up layers. A layer costs its
// share of the program that is best for it and its neighbours (cost/parts.h): planned by itself it
// would not pay for handing on values in another placement than the next layer takes. Where layers
// repeat, a few repeats are planned for all. What a profile measured takes the place of the model.
//
// The best found is planned stage by stage, as long as it seems worth it, and ranked by the event
// simulator. Sub-clusters are left out where that is faster, one by one where they are many. Sizes
// and choices whose computation alone takes too long are not planned for. The default cuts the
// model as finely as it goes: what looks equal as a sum of layers need not be when planned stage by
// stage (bert:layers=12 on hap-64 was 12% slower with coarser layers).
#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <set>

#include "core/error.h"
#include "pipeline/search.h"
#include "planner/compose.h"
#include "planner/engines.h"
#include "planner/joint_placement.h"
#include "planner/stage_costs.h"
#include "planner/sub_clusters.h"

namespace motley::planner {

namespace {

constexpr int kComposed = 6;            // plans that are planned stage by stage
constexpr int kUnequalComposed = 3;     // and those with stages in unequal devices
constexpr double kUnequalWorth = 1.03;  // times the best plan's time that such a one may take
constexpr double kWorth = 1.1;          // times the best plan's time that one may seem to take
// Times the best plan's of larger micro-batches, of a bound by their costs.
constexpr double kWorthSmaller = 1.02;
constexpr double kWorthKnown = 1.2;  // times the best plan's of other engines
constexpr int kPool = 3;             // of one search
constexpr int kMicroBatches = 512;   // most of a step that are tried
constexpr int kOrdered = 6;          // most sub-clusters of which all orders are tried
constexpr int kLeftOut = 4;          // most sub-clusters of which any may be left out
constexpr int kUnequalSizes = 2;     // micro-batch sizes at which unequal devices are tried
constexpr int kLayers = 160;         // at most, unless the model has fewer heavy operators
constexpr int64_t kFirstCount = 32;  // micro-batches of a step that are tried first
constexpr double kHeld = 16;         // of these there should be room for, on all devices
constexpr double kSearching = 0.8;   // of the time, until pipelines are planned stage by stage
constexpr int kCoarsest = 8;         // layers that automatic granularity begins with
constexpr double kGranularityGain = 0.002;  // of balance or time, for which finer layers are tried

class PipelineSearch {
 public:
  PipelineSearch(const PlanOptions& request, const Cluster& cluster, const GraphOf& graph_of,
                 Seconds known)
      : request_(request),
        known_(known),
        cluster_(cluster),
        step_(step_of(request, graph_of)),
        topology_(cluster),
        groups_(cluster),
        parts_(equal_parts(cluster)),
        equal_(static_cast<int>(parts_.size())),
        layers_(request.measured.empty() ? request.layers : std::max(0, request.layers)) {
    for (Part& part : unequal_parts(cluster, parts_)) parts_.push_back(std::move(part));
  }

  EngineResult run() {
    const auto start = std::chrono::steady_clock::now();
    result_.engine = "pipeline";
    result_.record = request_.record;
    const Deadline end = request_.limits.deadline;
    request_.limits.deadline = end.part(kSearching);
    try {
      search_sizes();
      search_unequal();
    } catch (const TimeIsUp&) {
      stop_ = result_.reason = "time ran out";
      if (found_.empty() && rough_) found_.push_back(*std::move(rough_));
    }
    request_.limits.deadline = end;
    for (const auto& [size, builder] : builders_)
      if (builder) builder->set_deadline(end);
    // The best two of every micro-batch size, then the next: their like fare alike when they are
    // planned stage by stage.
    std::stable_sort(found_.begin(), found_.end(), faster);
    std::map<std::pair<int64_t, bool>, int> before;
    for (Found& f : found_) f.place = before[{f.micro_batch, f.unequal}]++;
    std::stable_sort(found_.begin(), found_.end(),
                     [](const Found& a, const Found& b) { return a.place / 2 < b.place / 2; });
    for (const bool unequal : {false, true}) {
      int composed = 0;
      for (const Found& f : found_) {
        if (f.unequal != unequal) continue;
        if (composed == (unequal ? kUnequalComposed : kComposed)) break;
        if (!unequal && f.plan.makespan > kWorth * best_step()) continue;
        composed += compose_in_time(f);
      }
    }
    try {
      refine();
    } catch (const TimeIsUp&) {
      stop_ = "time ran out";
    }
    rank(&result_);
    for (const auto& [size, builder] : builders_)
      if (builder) result_.planned += builder->planned();
    result_.search_s =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (!result_.candidates.empty()) result_.reason = stop_;
    return std::move(result_);
  }

 private:
  struct Found {
    int64_t micro_batch;
    pipeline::PipelinePlan plan;
    bool unequal = false;  // on sub-clusters of unequal devices
    int place = 0;         // among those of its size
  };

  static bool faster(const Found& a, const Found& b) { return a.plan.makespan < b.plan.makespan; }

  // Sizes of micro-batches: first about kFirstCount of them in a step, or so many that there is room
  // for what a few of them hold, smaller ones as long as that is faster, then larger ones (the whole
  // batch last) and the smaller ones left out: there may be more than one minimum. Bounds spare most
  // of the searches of what is not worth it.
  void search_sizes() {
    if (!request_.micro_batches.empty()) {
      for (int64_t size : request_.micro_batches) search_size(size);
    } else {
      const auto tried = [&](int64_t count) {
        return count <= kMicroBatches && request_.batch % count == 0;
      };
      int64_t first = 1;  // micro-batches
      while (2 * first <= kFirstCount && request_.batch % (2 * first) == 0) first *= 2;
      if (request_.memory_limit && holds_state() && step_->of(request_.batch / first))
        for (const Bytes one = held_by(request_.batch / first) * static_cast<double>(first);
             tried(2 * first) && state_ + kHeld * one / static_cast<double>(first) > memory_;)
          first *= 2;
      Seconds before = std::numeric_limits<double>::infinity();
      int64_t smaller = first;
      for (bool better = true; better && tried(smaller); smaller *= 2) {
        const Seconds found = search_size(request_.batch / smaller);
        better = found_.empty() || found < before;
        before = found;
      }
      for (int64_t count = first / 2; count > 0; count /= 2) search_size(request_.batch / count);
      for (; tried(smaller); smaller *= 2) search_size(request_.batch / smaller);
    }
    if (builders_.empty() && !step_->why_not().empty()) {
      result_.reason = step_->why_not();
      result_.refused = true;
    }
  }

  // Pipelines with micro-batches of a size, of which the best is planned stage by stage at once, so
  // that there is a plan whenever time is up. The seconds of that one, about; infinite: none is
  // worth it.
  Seconds search_size(int64_t size) {
    request_.limits.deadline.check();
    Seconds least = std::numeric_limits<double>::infinity();
    if (size >= too_large_ || !holds_state() || !step_->of(size)) return least;
    parted_ = parted_ || size < request_.batch;
    const bool alone = request_.micro_batches.empty() ? request_.batch % 2 != 0
                                                      : request_.micro_batches.size() == 1;
    if (size == request_.batch && !parted_ && !alone) return least;  // no pipeline
    const size_t before = found_.size();
    if (!try_size(size)) too_large_ = size;
    const Found* best = nullptr;
    for (size_t f = before; f < found_.size(); ++f)
      if (best == nullptr || faster(found_[f], *best)) best = &found_[f];
    if (best == nullptr) return least;
    least = best->plan.objective;
    if (best->plan.makespan < best_step()) compose_in_time(*best);
    return least;
  }

  // Of the plans so far, planned stage by stage; infinite: there is none.
  Seconds best_step() const {
    Seconds best = std::numeric_limits<double>::infinity();
    for (const Candidate& c : result_.candidates) best = std::min(best, c.plan->predicted_step_s);
    return best;
  }

  // Parameters, gradients and optimizer state have to be somewhere, once.
  bool holds_state() {
    if (!request_.memory_limit || !builders_.empty()) return true;
    const Graph& graph = step_->graph();
    state_ = memory_ = 0;
    for (const Parameter& p : graph.parameters) state_ += state_bytes(graph, p, request_.optimizer);
    for (int d = 0; d < cluster_.size(); ++d) memory_ += cluster_.type_of(d).memory;
    if (state_ <= memory_) return true;
    result_.reason = fmt::format("parameters and their state take {}, all devices together have {}",
                                 format_bytes(state_), format_bytes(memory_));
    return false;
  }

  // What a micro-batch's layers hold for the backward pass, on one device each.
  Bytes held_by(int64_t size) {
    PlanBuilder builder(request_, &groups_, step_, size, layers_ > 0 ? layers_ : kLayers, &cache_);
    return held_by(size, builder);
  }
  Bytes held_by(int64_t size, PlanBuilder& builder) {
    const DeviceGroups::Kind& one = groups_.of({0});
    Bytes held = 0;
    for (int l = 0; l < builder.size(); ++l) {
      const PlanBuilder::LayerCost& cost =
          builder.layer_cost(l, one, static_cast<int>(request_.batch / size), false);
      if (cost.feasible) held += cost.held;
    }
    return held;
  }

  // False: neither this size nor a larger one fits.
  bool try_size(int64_t size) {
    std::unique_ptr<PlanBuilder>& builder = builders_[size];
    if (layers_ == kAutomaticLayers) return find_granularity(size);
    builder = std::make_unique<PlanBuilder>(request_, &groups_, step_, size, layers_, &cache_);
    if (layers_ == 0 && builder->size() > kLayers) {
      layers_ = kLayers;
      builder = std::make_unique<PlanBuilder>(request_, &groups_, step_, size, layers_, &cache_);
    }
    if (!holds_activations(size, *builder)) return false;
    keep(size, search(size, *builder, equals()));
    search_fewer(size, *builder, equals());
    return true;
  }

  std::vector<int> equals() const {
    std::vector<int> all(equal_);
    std::iota(all.begin(), all.end(), 0);
    return all;
  }

  // Pipelines that leave sub-clusters out, which may be faster where links are slow: any of few; of
  // more one at a time, the one without which it is best, as long as that is faster.
  void search_fewer(int64_t size, PlanBuilder& builder, std::vector<int> all) {
    const auto count = static_cast<int>(all.size());
    const auto without = [&](const auto& left_out) {
      std::vector<int> use;
      for (size_t i = 0; i < all.size(); ++i)
        if (!left_out(i)) use.push_back(all[i]);
      return use;
    };
    if (count <= kLeftOut) {
      for (size_t left_out = 1; left_out + 1 < size_t{1} << count; ++left_out)
        keep(size, search(size, builder, without([&](size_t i) { return left_out >> i & 1; })));
      return;
    }
    for (Seconds least = std::numeric_limits<double>::infinity(); all.size() > 1;) {
      std::vector<int> best;
      for (size_t c = 0; c < all.size(); ++c) {
        const std::vector<int> use = without([&](size_t i) { return i == c; });
        pipeline::SearchResult found = search(size, builder, use);
        if (found.feasible && found.objective < least) {
          least = found.objective;
          best = use;
        }
        keep(size, std::move(found));
      }
      if (best.empty()) break;
      all = std::move(best);
    }
  }

  // Pipelines with stages in unequal devices, of the micro-batch sizes that did best without.
  void search_unequal() {
    std::stable_sort(found_.begin(), found_.end(), faster);
    std::vector<int64_t> sizes;
    for (const Found& f : found_)
      if (f.plan.makespan <= kUnequalWorth * found_[0].plan.makespan &&
          std::find(sizes.begin(), sizes.end(), f.micro_batch) == sizes.end())
        sizes.push_back(f.micro_batch);
    if (sizes.size() > kUnequalSizes) sizes.resize(kUnequalSizes);
    if (sizes.empty())
      for (const auto& [size, builder] : builders_) sizes.push_back(size);
    for (int64_t size : sizes)
      for (const std::vector<int>& use : uses_of_unequal(parts_, equal_)) {
        keep(size, search(size, *builders_.at(size), use));
        search_fewer(size, *builders_.at(size), use);
      }
  }

  // Automatic granularity (HAPT section 5.1): twice as many layers, until neither the load balance
  // (Eq. 25) nor the time gains anything worth having; the best of these serves all micro-batch
  // sizes. Where no plan fits, the finest decides.
  bool find_granularity(int64_t size) {
    std::vector<double> speed;
    for (int c : equals()) speed.push_back(cluster_.type_of(parts_[c].devices[0]).flops);
    std::unique_ptr<PlanBuilder>& builder = builders_[size];
    const auto cut = [&](int layers) {
      return std::make_unique<PlanBuilder>(request_, &groups_, step_, size, layers, &cache_);
    };
    builder = cut(0);
    if (builder->size() > kLayers) builder = cut(kLayers);
    const int finest = builder->size();
    if (!holds_activations(size, *builder)) return false;
    std::unique_ptr<PlanBuilder> finest_builder = std::move(builder);
    pipeline::SearchResult best;
    double balance = 0;
    for (int layers = std::max(kCoarsest, 2 * equal_);; layers *= 2) {
      auto next = layers < finest ? cut(layers) : std::move(finest_builder);
      if (builder && layers < finest && next->size() <= builder->size()) continue;
      pipeline::SearchResult found = search(size, *next, equals());
      const double found_balance = found.feasible ? pipeline::load_balance(found.best, speed) : 0;
      const bool better = !builder || !best.feasible ||
                          found.best.makespan < best.best.makespan * (1 - kGranularityGain) ||
                          found_balance > balance + kGranularityGain;
      const bool faster =
          !builder ||
          (found.feasible && (!best.feasible || found.best.makespan < best.best.makespan));
      if (faster) {
        layers_ = layers < finest ? layers : finest;
        builder = std::move(next);
        best = std::move(found);
        balance = found_balance;
      }
      if (!better || layers >= finest) break;
    }
    keep(size, std::move(best));
    search_fewer(size, *builder, equals());
    if (found_.empty()) layers_ = kAutomaticLayers;
    return true;
  }

  // The activations of one micro-batch have to be somewhere, beside the state: each stage holds
  // those of its layers at least once, in all its devices together no less than one device would.
  bool holds_activations(int64_t size, PlanBuilder& builder) {
    if (!request_.memory_limit) return true;
    const Bytes held = state_ + held_by(size, builder);
    if (held <= memory_) return true;
    if (found_.empty())
      result_.reason = fmt::format(
          "state and the activations of a micro-batch of {} take {}, all devices together have {}",
          size, format_bytes(held), format_bytes(memory_));
    return false;
  }

  void keep(int64_t size, pipeline::SearchResult found) {
    if (!found.feasible) {
      if (found_.empty()) result_.reason = found.reason;
      return;
    }
    stop_ = found.reason;
    for (pipeline::PipelinePlan& plan : found.pool) {
      const bool unequal =
          std::any_of(plan.stages.begin(), plan.stages.end(),
                      [&](const pipeline::Stage& s) { return s.mesh.cluster >= equal_; });
      found_.push_back({size, std::move(plan), unequal});
    }
  }

  // The best pipelines on all devices of the sub-clusters `use` (into parts_) that are worth it
  // beside those found. Slices of several types are planned where a plan with bounds of their costs
  // needs them, and equal ones if there is any such plan at all.
  pipeline::SearchResult search(int64_t size, PlanBuilder& builder, const std::vector<int>& use) {
    pipeline::SearchResult result;
    const auto count = static_cast<int>(use.size());
    if (count > pipeline::kMostSubClusters) {
      result.reason =
          fmt::format("{} sub-clusters of equal devices are more than the {} there may be", count,
                      pipeline::kMostSubClusters);
      return result;
    }
    std::vector<const Part*> parts;
    int devices = 0;
    bool unequal = false;
    for (int c : use) {
      parts.push_back(&parts_[c]);
      devices += parts_[c].shape.size();
      unequal = unequal || c >= equal_;
    }
    pipeline::SearchOptions options;
    options.micro_batches = {size};
    options.pipelines = {1};
    for (int d = 2; d <= devices && d <= request_.batch / size; d *= 2)
      options.pipelines.push_back(d);
    StageCosts costs(request_, &groups_, topology_, &builder, std::move(parts), size);
    options.shapes = pipeline::Shapes::both;
    options.any_order = count <= kOrdered;
    options.deadline = request_.limits.deadline;
    options.deadline.check();
    const double worth = unequal ? kUnequalWorth : kWorth;
    options.worth = std::min(options.worth, kWorthKnown * known_);
    for (const Found& f : found_) options.worth = std::min(options.worth, worth * f.plan.objective);
    if (request_.measured.empty()) {
      pipeline::SearchOptions rough = options;
      rough.memory_limit = false;
      rough.pool = 0;
      if (const auto larger = builders_.upper_bound(size); larger != builders_.end()) {
        costs.take_bounds(larger->second.get(), larger->first);
        for (const Found& f : found_)
          if (f.micro_batch > size)
            rough.worth = std::min(rough.worth, kWorthSmaller * f.plan.objective);
      }
      result = pipeline::search(costs.problem(true), rough);
      if (!result.feasible) return result;
      // Where nobody has a plan yet, that of the bounds may do; where time runs out, too.
      if (builders_.at(size).get() == &builder) {
        rough_ = Found{size, result.best, unequal};
        for (pipeline::Stage& stage : rough_->plan.stages)
          stage.mesh.cluster = use[stage.mesh.cluster];
        if (result_.candidates.empty() && std::isinf(known_)) compose_in_time(*rough_);
      }
    }
    options.memory_limit = request_.memory_limit;
    options.recompute = options.memory_limit && request_.recompute;
    options.pool = kPool;
    // What was measured may be below the bounds.
    costs.find_slices(options.pipelines, !request_.measured.empty());
    do {
      result = pipeline::search(costs.problem(false), options);
    } while (costs.plan(result.pool));
    for (pipeline::Stage& stage : result.best.stages) stage.mesh.cluster = use[stage.mesh.cluster];
    for (pipeline::PipelinePlan& plan : result.pool)
      for (pipeline::Stage& stage : plan.stages) stage.mesh.cluster = use[stage.mesh.cluster];
    return result;
  }

  // Into result_.candidates. REQUIRES: there are some.
  size_t best_plan() const {
    size_t best = 0;
    for (size_t i = 1; i < result_.candidates.size(); ++i)
      if (result_.candidates[i].plan->predicted_step_s <
          result_.candidates[best].plan->predicted_step_s)
        best = i;
    return best;
  }

  // Plans the best plan's stages again, with more effort where memory is short.
  void refine() {
    if (result_.candidates.empty()) return;
    const size_t best = best_plan();
    Composition& composition = compositions_[best];
    PlanBuilder& builder = *builders_.at(composition.micro_batch);
    if (!builder.limited()) return;
    composition.thorough = true;
    std::string reason;
    auto plan = builder.compose(composition, "pipeline", &reason);
    if (plan && plan->predicted_step_s < result_.candidates[best].plan->predicted_step_s)
      result_.candidates[best].plan = std::move(plan);
  }

  // compose(), unless time is up.
  bool compose_in_time(const Found& found) {
    try {
      request_.limits.deadline.check();
      return compose(found);
    } catch (const TimeIsUp&) {
      if (result_.candidates.empty()) result_.reason = kNoTime;
      stop_ = "time ran out";
      return false;
    }
  }

  // Whether it is planned stage by stage, as no other was.
  bool compose(const Found& found) {
    Composition composition;
    composition.micro_batch = found.micro_batch;
    composition.thorough = false;
    std::string note =
        fmt::format("micro-batches of {}, {} pipeline{}, {} layers in stages of", found.micro_batch,
                    found.plan.pipelines, found.plan.pipelines > 1 ? "s" : "",
                    builders_.at(found.micro_batch)->size());
    std::string kinds;  // of devices, by stage
    size_t devices = 0;
    for (int k = 0; k < found.plan.pipelines; ++k) {
      ReplicaChoice replica;
      replica.micro_batches = found.plan.micro_batches;
      const auto seats = seats_of(parts_, found.plan, k);
      for (size_t i = 0; i < seats.size(); ++i) {
        const pipeline::Stage& s = found.plan.stages[i];
        const StageChoice stage{s.first, s.last, seats[i],
                                s.mesh.recompute ? Again::if_needed : Again::never};
        devices += seats[i].size();
        if (k == 0) {
          std::map<int, int> types;  // how many devices
          for (int d : stage.devices) ++types[cluster_.devices[d].type];
          std::vector<int> counts;
          for (const auto& [type, n] : types) {
            counts.push_back(n);
            kinds += fmt::format("{},", type);
          }
          const std::string each = fmt::format("{}", fmt::join(counts, "+"));
          note += fmt::format(" {}x{}", s.last - s.first + 1,
                              counts.size() > 1 ? fmt::format("({})", each) : each);
          kinds += ";";
        }
        replica.stages.push_back(stage);
      }
      composition.replicas.push_back(std::move(replica));
    }
    if (static_cast<int>(devices) < cluster_.size())
      note += fmt::format(" on {} of {} devices", devices, cluster_.size());
    const std::string look = note + kinds;
    if (seen_.count(look) > 0) return false;
    std::string reason;
    PlanBuilder& builder = *builders_.at(found.micro_batch);
    const int most = request_.memory_limit && found.plan.pipelines > 1 ? 2 : 0;
    std::unique_ptr<Plan> plan = builder.compose_divided(&composition, most, "pipeline", &reason);
    seen_.insert(look);  // not before: if time was up, there may be more later
    if (!plan) {
      if (result_.candidates.empty()) result_.reason = reason;
      return true;
    }
    std::unique_ptr<Plan> jointly;
    Composition placed;
    try {
      try_roomy(found, &builder, &composition, &plan);
      placed = composition;
      jointly = place(*plan, &builder, &placed);
    } catch (const TimeIsUp&) {  // it is a plan as it is
      stop_ = "time ran out";
    }
    if (composition.zero > 0) note += fmt::format(", ZeRO {}", composition.zero);
    if (jointly) {
      result_.add(std::move(jointly), note + " placed jointly");
      compositions_.push_back(std::move(placed));
    }
    result_.add(std::move(plan), note);
    compositions_.push_back(std::move(composition));
    return true;
  }

  // With room for as many micro-batches in flight as the search counted on, where that is faster.
  static void try_roomy(const Found& found, PlanBuilder* builder, Composition* composition,
                        std::unique_ptr<Plan>* plan) {
    if (!builder->limited()) return;
    Composition roomy = *composition;
    for (ReplicaChoice& replica : roomy.replicas)
      for (size_t s = 0; s < replica.stages.size(); ++s)
        replica.stages[s].in_flight = found.plan.counts[s];
    std::string reason;
    auto other = builder->compose(roomy, "pipeline", &reason);
    if (!other || other->predicted_step_s >= (*plan)->predicted_step_s) return;
    *plan = std::move(other);
    *composition = std::move(roomy);
  }

  // The plan with devices of sites that are placed jointly; null: that is not faster.
  std::unique_ptr<Plan> place(const Plan& plan, PlanBuilder* builder, Composition* composition) {
    std::vector<std::vector<int>> sites;
    for (int c : equals()) sites.push_back(parts_[c].devices);
    std::string reason;
    const bool other =
        place_jointly(cluster_, sites, plan, composition, request_.limits.deadline.part(kPlacing));
    return other ? builder->compose(*composition, "pipeline", &reason) : nullptr;
  }

  PlanOptions request_;  // its deadline is that of what is being done
  Seconds known_;        // the step of another engine's plan
  const Cluster& cluster_;
  std::shared_ptr<BatchStep> step_;
  net::Topology topology_;
  DeviceGroups groups_;
  SearchCache cache_;
  std::vector<Part> parts_;  // of equal devices, then of unequal ones
  int equal_;                // of the former
  std::map<int64_t, std::unique_ptr<PlanBuilder>> builders_;
  int layers_;
  Bytes state_ = 0, memory_ = 0;  // of all parameters, once; of all devices
  bool parted_ = false;           // the batch can be taken in parts
  int64_t too_large_ = std::numeric_limits<int64_t>::max();  // such micro-batches do not fit
  std::vector<Found> found_;
  std::optional<Found> rough_;             // the last by bounds, before any was found
  std::vector<Composition> compositions_;  // [plan] of result_
  std::set<std::string> seen_;
  std::string stop_;
  EngineResult result_;
};

}  // namespace

EngineResult plan_pipeline(const PlanOptions& request, const Cluster& cluster,
                           const GraphOf& graph_of, Seconds known) {
  return PipelineSearch(request, cluster, graph_of, known).run();
}

}  // namespace motley::planner
