// Event simulation of a pipeline schedule: when every forward and backward pass starts.
//
// Stages run one task at a time; a link carries one message at a time in each direction, in the
// order in which they were produced. Two ways to run: `simulate` follows a given order (HAPT
// section 4.2.1, the DAG of Eq. 3), `dispatch` decides as it goes which of the tasks that are ready
// a free stage takes. Both cost O(stages * micro-batches), dispatch times the logarithm of the
// stages.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "pipeline/schedule.h"

namespace motley::pipeline {

struct Timeline {
  std::vector<std::vector<Seconds>> start;  // [stage][place in its order]
  std::vector<Seconds> busy;                // [stage]
  std::vector<int> in_flight;  // [stage] most micro-batches between the start of their first and
                               // the end of their last pass
  Seconds makespan = 0;
};

// REQUIRES: the order can run to its end.
Timeline simulate(const Pipeline& pipeline, const Schedule& schedule);

// What a free stage may take: the forward pass of one micro-batch, the backward pass of another.
// Returns true for the backward pass.
using Choice = std::function<bool(int stage, int forward, int backward)>;

// The schedule that arises if every free stage starts a ready task at once, `choice` deciding where
// both passes are ready, and no stage holds more than limits[stage] micro-batches.
Schedule dispatch(std::string kind, const Pipeline& pipeline, const std::vector<int>& limits,
                  int micro_batches, const Choice& choice);

// Rows of characters, one per stage: digits are forward passes (last digit of the micro-batch,
// counted from 1), letters backward passes (a: 1, b: 2, ...; capitals: gradients of weights), dots
// idle time.
std::string draw(const Pipeline& pipeline, const Schedule& schedule, const Timeline& timeline,
                 int width);

}  // namespace motley::pipeline
