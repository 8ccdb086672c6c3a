// One SPMD program in several micro-batches, one after another, whose gradients add up: a plan of
// one stage on all devices. Each micro-batch holds a part of what the batch would, so that nothing,
// or less, is computed again; gradients are reduced once, behind the last backward pass.
//
//   24 blocks that compute 85% of their forward pass again, since a batch of 512 does not fit
//   2 micro-batches of 256 that compute nothing again
#include <chrono>
#include <memory>
#include <numeric>

#include "bounds/compute_bound.h"
#include "core/error.h"
#include "planner/compose.h"
#include "planner/engines.h"
#include "spmd/least_memory.h"

namespace motley::planner {

namespace {

class Accumulation {
 public:
  Accumulation(const PlanOptions& options, const Cluster& cluster, const GraphOf& graph_of,
               Seconds known)
      : options_(options),
        best_(known),
        groups_(cluster),
        step_(step_of(options, graph_of)),
        model_(cluster) {
    result_.engine = "spmd";
    result_.record = options.record;
    result_.reason = "in several micro-batches nothing is faster";
  }

  EngineResult run() {
    const auto start = std::chrono::steady_clock::now();
    try {
      if (!options_.micro_batches.empty()) {
        for (const int64_t samples : options_.micro_batches)
          if (samples < options_.batch) attempt(samples);
      } else {
        for (int64_t count = 2; options_.batch % count == 0; count *= 2)
          if (!attempt(options_.batch / count)) break;
      }
    } catch (const TimeIsUp&) {
      if (result_.candidates.empty()) result_.reason = kNoTime;
    }
    rank(&result_);
    result_.search_s =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return std::move(result_);
  }

 private:
  // Whether more and smaller micro-batches may be faster.
  bool attempt(int64_t samples) {
    options_.limits.deadline.check();
    const auto part = step_->of(samples);
    if (!part || (!part->exact() && options_.micro_batches.empty())) return false;
    const auto count = static_cast<int>(options_.batch / samples);
    if (bounds::compute_bound(Theory(part->graph), model_, count) >= best_) return false;
    PlanBuilder builder(options_, &groups_, step_, samples, 1, &cache_);
    const int devices = groups_.whole().size();
    Bytes memory = 0;
    for (int d = 0; d < devices; ++d) memory += groups_.whole().type_of(d).memory;
    const bool holds = spmd::least_memory(part->graph, options_.optimizer) <= memory;
    for (const int zero : {0, 3})
      for (const bool recompute : {false, true}) {
        if ((recompute && !options_.recompute) || (!recompute && !holds) ||
            (zero > 0 && devices == 1))
          continue;
        const bool made = compose(&builder, samples, zero, recompute);
        // With nothing computed again and parameters whole there is nothing to be gained.
        if (made && zero == 0 && !recompute) return builder.limited();
        // Micro-batches that are smaller take no less.
        if (!made && zero == 0 && !recompute && builder.slow()) return false;
      }
    return true;
  }

  bool compose(PlanBuilder* builder, int64_t samples, int zero, bool recompute) {
    std::vector<int> all(groups_.whole().size());
    std::iota(all.begin(), all.end(), 0);
    const auto count = static_cast<int>(options_.batch / samples);
    Composition composition;
    composition.micro_batch = samples;
    composition.thorough = false;
    composition.worth = best_;
    composition.zero = zero;
    const Again again = recompute ? Again::if_needed : Again::never;
    composition.replicas = {{count, {{0, builder->size() - 1, all, again}}}};
    std::string reason;
    std::unique_ptr<Plan> plan = builder->compose(composition, "spmd", &reason);
    if (!plan) {
      if (result_.candidates.empty()) result_.reason = "in several micro-batches: " + reason;
      return false;
    }
    if (plan->predicted_step_s >= best_) return true;
    best_ = plan->predicted_step_s;
    result_.add(
        std::move(plan),
        fmt::format("{} micro-batches of {}{}{}", count, samples, recompute ? ", recomputing" : "",
                    zero > 0 ? ", parameters gathered in every pass" : ""));
    return true;
  }

  const PlanOptions& options_;
  Seconds best_;  // step of any plan so far
  DeviceGroups groups_;
  SearchCache cache_;
  std::shared_ptr<BatchStep> step_;
  const CostModel model_;
  EngineResult result_;
};

}  // namespace

EngineResult plan_accumulated(const PlanOptions& options, const Cluster& cluster,
                              const GraphOf& graph_of, Seconds known) {
  return Accumulation(options, cluster, graph_of, known).run();
}

}  // namespace motley::planner
