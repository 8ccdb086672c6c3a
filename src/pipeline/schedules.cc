#include "pipeline/schedules.h"

#include <algorithm>
#include <numeric>

namespace motley::pipeline {

// Each schedule's own part, from schedules/. Counts are of stages i = 1 .. S:
//
//   1f1b            N_i = S - i + 1                               (HAPT section 2.1)
//   deadline        earliest deadline first, decided as tasks become ready
//   eager           N_i = 2 (S - i) + 1                           (section 2.3.1)
//   exact           the least counts for the least period (schedule.h)
//   greedy          backward passes first, decided as tasks become ready
//   h1f1b           N_i = N_{i+1} + ceil(1 + (cF + cB) / t_max)   (Eq. 11, stretched)
//   h1f1b-table     N_i = N_{i+1} + 1, 2 or 3                     (Eq. 2)
//   zero-bubble     gradients of weights fill bubbles, by search  (Qi et al. 2023)
std::vector<int> one_f_one_b_counts(const Pipeline& pipeline);
Schedule deadline_schedule(const Pipeline& pipeline, int micro_batches);
std::vector<int> eager_counts(const Pipeline& pipeline);
std::vector<int> exact_schedule_counts(const Pipeline& pipeline);
Schedule greedy_schedule(const Pipeline& pipeline, int micro_batches);
std::vector<int> h_one_f_one_b_counts(const Pipeline& pipeline);
std::vector<int> h_one_f_one_b_table_counts(const Pipeline& pipeline);
Schedule zero_bubble_schedule(const Pipeline& pipeline, int micro_batches);

const std::vector<ScheduleDef>& schedule_table() {
  static const std::vector<ScheduleDef> table = {
      {"1f1b", one_f_one_b_counts, nullptr},
      {"deadline", nullptr, deadline_schedule},
      {"eager", eager_counts, nullptr},
      {"exact", exact_schedule_counts, nullptr},
      {"greedy", nullptr, greedy_schedule},
      {"h1f1b", h_one_f_one_b_counts, nullptr},
      {"h1f1b-table", h_one_f_one_b_table_counts, nullptr},
      {"zero-bubble", nullptr, zero_bubble_schedule, zero_bubble_launches},
  };
  return table;
}

const ScheduleDef* find_schedule(const std::string& name) {
  for (const ScheduleDef& def : schedule_table())
    if (name == def.name) return &def;
  return nullptr;
}

std::vector<int> dispatch_limits(const Pipeline& pipeline) {
  return pipeline.in_flight_limit.empty() ? h_one_f_one_b_counts(pipeline)
                                          : pipeline.in_flight_limit;
}

namespace {

// Mean distance of the backward passes of stage 1 over the middle half of the batch, where neither
// warm-up nor draining shows; no less than any schedule's.
Seconds measured_period(const Pipeline& pipeline, const Schedule& schedule,
                        const Timeline& timeline) {
  std::vector<Seconds> starts;
  for (size_t k = 0; k < schedule.order[0].size(); ++k)
    if (schedule.order[0][k].kind == PassKind::backward) starts.push_back(timeline.start[0][k]);
  size_t from = starts.size() / 4, to = starts.size() - 1 - from;
  Seconds mean = to > from ? (starts[to] - starts[from]) / static_cast<double>(to - from) : 0;
  return std::max(mean, least_period(pipeline));
}

}  // namespace

ScheduleRun run_schedule(const ScheduleDef& def, const Pipeline& pipeline, int micro_batches) {
  ScheduleRun run;
  if (def.counts != nullptr) {
    std::vector<int> own = def.counts(pipeline);
    std::vector<int> counts = within_limits(pipeline, own, 1 << 30);
    run.limited = counts != own;
    run.period = period(pipeline, counts);
    run.schedule = strict_schedule(def.name, counts, micro_batches);
  } else {
    run.schedule = def.make(pipeline, micro_batches);
  }
  run.timeline = simulate(pipeline, run.schedule);
  if (def.counts == nullptr) run.period = measured_period(pipeline, run.schedule, run.timeline);
  run.lower_bound = makespan_lower_bound(pipeline, micro_batches);
  return run;
}

ScheduleRun run_best(const Pipeline& pipeline, int micro_batches) {
  ScheduleRun best;
  auto held = [](const ScheduleRun& run) {
    return std::accumulate(run.timeline.in_flight.begin(), run.timeline.in_flight.end(), 0LL);
  };
  const bool splits = std::any_of(pipeline.stages.begin(), pipeline.stages.end(),
                                  [](const StageTime& s) { return s.weights > 0; });
  for (const ScheduleDef& def : schedule_table()) {
    if (def.launches != nullptr && !splits) continue;
    ScheduleRun run = run_schedule(def, pipeline, micro_batches);
    Seconds slack = 1e-12 * run.timeline.makespan;
    if (best.schedule.order.empty() || run.timeline.makespan < best.timeline.makespan - slack ||
        (run.timeline.makespan <= best.timeline.makespan + slack && held(run) < held(best)))
      best = std::move(run);
  }
  return best;
}

}  // namespace motley::pipeline
