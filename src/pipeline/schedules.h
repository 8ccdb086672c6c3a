// The schedules by name: one file in schedules/ and one line of the table in schedules.cc each.
// `interleaved`, of groups of stages that share devices, is not in the table (interleaved_counts).
//
// Launch counts beyond the pipeline's in-flight limits are cut down to them; greedy and deadline
// without limits hold at most what h1f1b would.
#pragma once

#include <string>
#include <vector>

#include "pipeline/schedule.h"
#include "pipeline/simulate.h"

namespace motley::pipeline {

// A strict order in which stages split their backward passes.
struct Launches {
  std::vector<int> counts, weights_behind;  // [stage]
};

struct ScheduleDef {
  const char* name;
  // Launch counts before any limit; null: the order is decided while it runs, by `make`.
  std::vector<int> (*counts)(const Pipeline& pipeline);
  Schedule (*make)(const Pipeline& pipeline, int micro_batches) = nullptr;
  // Of one that splits backward passes: the best strict order, within the limits.
  Launches (*launches)(const Pipeline& pipeline, int micro_batches) = nullptr;
};

const std::vector<ScheduleDef>& schedule_table();  // alphabetical
const ScheduleDef* find_schedule(const std::string& name);

// A schedule of the table and how it runs.
struct ScheduleRun {
  Schedule schedule;
  Timeline timeline;
  Seconds period = 0;       // steady state: closed form for launch counts, measured otherwise
  bool limited = false;     // its own counts exceed the limits
  Seconds lower_bound = 0;  // of any schedule
};
ScheduleRun run_schedule(const ScheduleDef& def, const Pipeline& pipeline, int micro_batches);

// The run with the least makespan; among equals the one that holds fewest micro-batches. Backward
// passes are split only where a stage's `weights` is known.
ScheduleRun run_best(const Pipeline& pipeline, int micro_batches);

// The forward passes that the g-th of `groups` groups of `stages_per_device` stages each takes
// before its first backward pass (Narayanan et al. 2021, as Megatron-LM runs it): 2 (groups - g -
// 1) + (stages_per_device - 1) groups + 1, all of them if there are no more micro-batches than
// groups.
std::vector<int> interleaved_counts(int groups, int stages_per_device, int micro_batches);

// The strict order of `zero-bubble`.
Launches zero_bubble_launches(const Pipeline& pipeline, int micro_batches);

// What a schedule decided on the fly may hold: the limits, or h1f1b's counts.
std::vector<int> dispatch_limits(const Pipeline& pipeline);

}  // namespace motley::pipeline
