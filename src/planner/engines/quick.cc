// Plans that are there at once, before anything is searched for: strategies of the grid, by its
// formulas, whose programs are plain tensor parallelism, or cut all parameters where that does not
// fit. Where no strategy does, parameters that all devices divide (ZeRO 3), in the fewest
// micro-batches that do.
//
// Of models that mix samples, which the grid cannot have: data parallelism.
//
// Where memory is tight formulas refuse what programs may fit. Then strategies are taken that fit
// devices with a little more memory, so that they need least, and their programs gather parameters
// in every pass.
//
// So there soon is a plan, however many devices and layers there are, and other engines know what
// they have to beat.
#include <algorithm>
#include <chrono>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <utility>

#include "core/parallel.h"
#include "grid/search.h"
#include "planner/compose.h"
#include "planner/engines.h"
#include "planner/grid_model.h"

namespace motley::planner {

namespace {

constexpr int kLayers = 48;
constexpr size_t kTried = 12;  // strategies, until enough fit
// Beside activations, in parts of them, as far as one may guess; where nothing fits then, more.
constexpr double kWorkspace[] = {0.5, 1.5};
// Where still nothing fits: times the memory that there is.
constexpr double kMoreMemory[] = {1.25, 1.6, 2, 2.5, 3.2, 4};
// Of those that fit, and more while it is early; of models with many nodes one, of micro-batches of
// one sample.
constexpr size_t kComposed = 4, kMore = 8;
constexpr size_t kManyNodes = 20'000;
constexpr double kSearching = 0.15, kEarly = 0.1, kOfGrid = 0.9;  // of the time

// What programs are restricted to (program_plan.h).
const char* const kTensors = "tensor-parallel";
const char* const kData = "dp-cp";
const char* const kCut = "zero-cp";

class Quick {
 public:
  Quick(const PlanOptions& options, const Cluster& cluster, const GraphOf& graph_of)
      : options_(options),
        cluster_(cluster),
        groups_(cluster, /*planned=*/false),
        step_(step_of(options, graph_of)),
        threads_(options.threads) {
    beside_ = options.threads != 1 && options.micro_batches.empty() &&
              step_->graph().nodes.size() < kManyNodes;
    options_.threads = 1;
    result_.record = options.record;
    result_.engine = "grid";
  }

  EngineResult run() {
    const auto start = std::chrono::steady_clock::now();
    const Deadline whole = options_.limits.deadline;
    early_ = whole.part(kEarly);
    try {
      if (step_->graph().nodes.size() < kManyNodes) options_.limits.deadline = whole.part(kOfGrid);
      parallel_for(beside_ ? 2 : 1, 2, [&](int i) { i == 0 ? grid() : prepare(); });
    } catch (const TimeIsUp&) {
      result_.reason = kNoTime;
    }
    options_.limits.deadline = whole;
    try {
      if (result_.candidates.empty()) mixes_ ? undivided() : divided();
    } catch (const TimeIsUp&) {
      result_.reason = kNoTime;
    }
    rank(&result_);
    result_.search_s =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return std::move(result_);
  }

 private:
  // The micro-batches that most strategies have.
  void prepare() {
    for (const int64_t size : {1, 2}) try {
        if (options_.batch % size == 0 && step_->of(size)) step_->layers(size, kLayers);
      } catch (const TimeIsUp&) {
      }
  }

  void grid() {
    int64_t samples = 1;
    while (step_->graph().nodes.size() < kManyNodes && samples < 4 &&
           options_.batch % (2 * samples) == 0)
      samples *= 2;
    if (!options_.micro_batches.empty()) samples = options_.micro_batches[0];
    const std::shared_ptr<const MicroBatch> part = step_->of(samples);
    if (!part) {
      result_.reason = step_->why_not();
      result_.refused = true;
    }
    mixes_ = !part || !part->exact();
    if (mixes_) return;
    PlanBuilder& builder = builder_of(samples, kTensors);
    const grid::Model model = grid_model(builder, samples);
    grid::SearchOptions search;
    search.global_batch = static_cast<int>(options_.batch);
    if (options_.micro_batches.size() == 1)
      search.fixed.micro_batch = static_cast<int>(options_.micro_batches[0]);
    search.memory = options_.memory_limit;
    search.zero = {0, 1};
    search.least_zero = true;
    search.recompute = {grid::Recompute::none};
    if (options_.memory_limit && options_.recompute)
      search.recompute.push_back(grid::Recompute::full);
    search.heuristic_only = true;
    search.keep = static_cast<int>(kTried);
    for (const double workspace : kWorkspace) {
      search.deadline = options_.limits.deadline.part(kSearching);
      const grid::SearchResult found =
          grid::search(estimator_of(model, cluster_, workspace), search);
      if (result_.reason.empty()) result_.reason = found.reason;
      compose_best(found.ranked, model);
      if (composed_ > 0 || !options_.memory_limit) break;
    }
    if (result_.candidates.empty() && options_.memory_limit) leanest(model, &search);
    for (const grid::Layer& layer : model.layers) saved_ += layer.saved + layer.saved_whole;
  }

  // Whether it can be composed. Experts are cut into no more parts than there are, so that with more
  // devices their parameters take more than the formulas say.
  bool suits(const grid::Strategy& s, const char* strategy, const grid::Model& model) {
    if (model.experts > 0 && s.tp > model.experts) return false;
    return step_->of(s.micro_batch) && builder_of(s.micro_batch, strategy).size() == model.size();
  }

  // Nothing fits as far as one may guess. What would on devices with a little more memory needs
  // least, and may fit if its programs cut all parameters, and gather them where they are used.
  void leanest(const grid::Model& model, grid::SearchOptions* search) {
    for (const double more : kMoreMemory) {
      Cluster larger = cluster_;
      for (DeviceType& type : larger.types) type.memory *= more;
      search->deadline = options_.limits.deadline.part(kSearching);
      const std::vector<grid::Candidate> ranked =
          grid::search(estimator_of(model, larger, kWorkspace[0]), *search).ranked;
      for (size_t i = 0; i < std::min(kTried, ranked.size()); ++i) {
        const grid::Strategy& s = ranked[i].strategy;
        if (!suits(s, kCut, model)) continue;
        if (!gather(s)) continue;
        if (step_->graph().nodes.size() >= kManyNodes) return;
        Composition composition = composition_of(s);
        composition.zero = s.zero;  // whole in a pass, if there is room
        compose(s.micro_batch, kCut, composition, grid::to_string(s) + ", parameters cut");
        return;
      }
    }
  }

  // The first strategy that fits with plain tensor parallelism, which is composed: of models with
  // experts programs that cut all parameters take long to find. kTried: none.
  size_t first_of_tensors(const std::vector<grid::Candidate>& ranked, const grid::Model& model) {
    for (size_t i = 0; i < std::min(kTried, ranked.size()); ++i) {
      const grid::Strategy& s = ranked[i].strategy;
      if (!suits(s, kTensors, model)) continue;
      Composition composition = composition_of(s);
      composition.zero = s.zero;
      if (compose(s.micro_batch, kTensors, composition, grid::to_string(s))) return i;
    }
    return kTried;
  }

  // Programs that cut all parameters, and gather them in every pass.
  bool gather(const grid::Strategy& s) {
    Composition composition = composition_of(s);
    composition.zero = 3;
    return compose(s.micro_batch, kCut, composition,
                   grid::to_string(s) + ", parameters gathered in every pass");
  }

  // Of the best strategies those that fit.
  void compose_best(const std::vector<grid::Candidate>& ranked, const grid::Model& model) {
    const bool many = step_->graph().nodes.size() >= kManyNodes;
    const size_t tensors = model.experts > 0 ? first_of_tensors(ranked, model) : kTried;
    Bytes state = 0, least = std::numeric_limits<double>::infinity();  // of a device
    for (const Parameter& p : step_->graph().parameters)
      state += state_bytes(step_->graph(), p, options_.optimizer);
    for (const DeviceType& type : cluster_.types) least = std::min(least, type.memory);
    for (size_t i = 0; i < std::min(kTried, ranked.size()); ++i) {
      const grid::Strategy& s = ranked[i].strategy;
      if (composed_ >= (many ? 1 : early_.over() ? kComposed : kMore)) break;
      if (!suits(s, kTensors, model)) continue;
      Composition composition = composition_of(s);
      composition.zero = s.zero;
      const auto tensor_parallel = [&] {
        return compose(s.micro_batch, kTensors, composition, grid::to_string(s));
      };
      const auto cut = [&] {
        return s.tp > 1 &&
               compose(s.micro_batch, kCut, composition, grid::to_string(s) + ", parameters cut");
      };
      const bool large = model.experts == 0 && state / s.pp > least;  // if held whole
      if (i == tensors || (large ? cut() || tensor_parallel() : tensor_parallel() || cut()))
        ++composed_;
      else if (s.tp > 1 && result_.candidates.empty())
        gather(s);
    }
  }

  // Of models that mix samples, on the fastest devices and on all: plain data parallelism, or with
  // parameters cut.
  void undivided() {
    if (!step_->of(options_.batch)) return;
    std::vector<std::vector<int>> wanted = {everywhere()};
    if (cluster_.types.size() > 1) wanted.insert(wanted.begin(), fastest_of(cluster_));
    for (const std::vector<int>& devices : wanted)
      for (const char* strategy : {kData, kCut}) {
        Composition composition;
        composition.micro_batch = options_.batch;
        composition.replicas = {
            {1, {{0, builder_of(options_.batch, strategy).size() - 1, devices, Again::never}}}};
        if (compose(options_.batch, strategy, composition,
                    fmt::format("{} on {} devices", strategy, devices.size())))
          break;
      }
  }

  std::vector<int> everywhere() const {
    std::vector<int> all(cluster_.size());
    std::iota(all.begin(), all.end(), 0);
    return all;
  }

  // On all devices, each with a part of every micro-batch.
  void divided() {
    const int devices = cluster_.size();
    const std::vector<int> all = everywhere();
    Bytes held = 0, memory = 0;  // in all devices together
    for (const Parameter& p : step_->graph().parameters)
      held += state_bytes(step_->graph(), p, options_.optimizer);
    for (int d = 0; d < devices; ++d) memory += cluster_.type_of(d).memory;
    for (int64_t count = 1; options_.batch % count == 0; count *= 2) {
      const int64_t samples = options_.batch / count;
      if (samples < devices && count > 1) break;
      if (options_.memory_limit && held + saved_ * static_cast<double>(samples) > memory) continue;
      if (!step_->of(samples)) break;
      for (const bool recompute : {false, true}) {
        if (recompute && !options_.recompute) break;
        const Again again = recompute ? Again::if_needed : Again::never;
        Composition composition;
        composition.micro_batch = samples;
        composition.zero = devices > 1 ? 3 : 0;
        composition.replicas = {
            {static_cast<int>(count), {{0, builder_of(samples, kCut).size() - 1, all, again}}}};
        if (compose(samples, kCut, composition,
                    fmt::format("{} micro-batches of {}, parameters gathered in every pass", count,
                                samples)))
          return;
      }
    }
  }

  bool compose(int64_t samples, const char* strategy, const Composition& composition,
               std::string note) {
    options_.limits.deadline.check();
    std::string reason;
    std::unique_ptr<Plan> plan =
        builder_of(samples, strategy).compose(composition, "grid", &reason);
    if (plan) {
      result_.add(std::move(plan), std::move(note));
      return true;
    }
    if (result_.candidates.empty()) result_.reason = reason;
    return false;
  }

  PlanBuilder& builder_of(int64_t samples, const char* strategy) {
    std::unique_ptr<PlanBuilder>& builder = builders_[{samples, strategy}];
    options_.strategy = strategy;
    if (!builder)
      builder = std::make_unique<PlanBuilder>(options_, &groups_, step_, samples, kLayers, &cache_);
    builder->set_deadline(options_.limits.deadline);
    builder->set_threads(threads_);
    return *builder;
  }

  PlanOptions options_;
  const Cluster& cluster_;
  DeviceGroups groups_;
  std::shared_ptr<BatchStep> step_;
  const int threads_;  // that plan stages of different devices
  SearchCache cache_;
  std::map<std::pair<int64_t, const char*>, std::unique_ptr<PlanBuilder>> builders_;
  bool mixes_ = false;   // samples, so that micro-batches compute something else
  bool beside_ = false;  // whether a thread prepares micro-batches
  Deadline early_;
  size_t composed_ = 0;  // plans that hold parameters whole in a pass
  Bytes saved_ = 0;      // of a sample, from its forward to its backward pass
  EngineResult result_;
};

}  // namespace

EngineResult plan_quickly(const PlanOptions& options, const Cluster& cluster,
                          const GraphOf& graph_of) {
  return Quick(options, cluster, graph_of).run();
}

}  // namespace motley::planner
