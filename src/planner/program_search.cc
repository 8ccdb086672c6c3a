#include "planner/program_search.h"

namespace motley::planner {

namespace {

// Of searches with few devices, of one kind: a sweep of their bounds costs as much as some hundred
// states (solver/problem.h, Limits).
constexpr double kRough = 1e-4;
constexpr int64_t kRoughStates = 4000;

}  // namespace

ProgramSearch::ProgramSearch(const PlanOptions& request, SearchCache* cache)
    : optimizer_(request.optimizer), request_(request), cache_(cache ? *cache : own_cache_) {}

AlternationOptions ProgramSearch::options(int micro_batches, solver::WarmStart* warm) {
  AlternationOptions options;
  options.optimizer = optimizer_;
  options.certify = false;
  options.orders = &cache_.orders;
  options.warm = warm;
  options.micro_batches = micro_batches;
  options.limits = request_.limits;
  options.limits.rough = kRough;
  options.limits.rough_states = kRoughStates;
  return options;
}

Planned ProgramSearch::find(const Theory& theory, const CostModel& model,
                            AlternationOptions options, double* memory_price) {
  if (memory_price) options.memory_price = *memory_price;
  ++count_;
  Alternation s = alternate(theory, model, options);
  Planned planned;
  planned.feasible = s.feasible;
  planned.reason = std::move(s.reason);
  planned.excess = s.excess;
  planned.slow = s.slow;
  if (!s.feasible) return planned;
  if (memory_price && s.memory_price > 0) *memory_price = s.memory_price;
  planned.program = phase_ordered(theory, s.program);
  planned.ratios = std::move(s.ratios[0]);
  return planned;
}

}  // namespace motley::planner
