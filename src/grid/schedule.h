// Exact makespan of 1F1B pipelines by event recurrence.
//
// P stages run M micro-batches. Stage s first launches min(M, P - s) forwards, then alternates
// backward and forward, then drains (PipeDream-flush; DAPPLE). How a transfer of e seconds behaves
// is the runtime's:
//
//   blocking (deepspeed, megatron). On a clock of steps, stage s does forward m at step s + 2 m and
//     backward m at step 2 P - s - 1 + 2 m. Before it computes at a step, the pair (s-1, s) whose
//     right side is about to run forward exchanges the activation that goes right and the gradient
//     that goes left, if there are any, both at once (full duplex). Both stages take part from when
//     the later one is ready until the longer transfer is done.
//   overlapped (motley). A transfer starts when its producer is done and the link is free, in the
//     order of production; each direction of a boundary is a link of its own.
//
// Interleaved schedules (Narayanan et al. 2021; v ranges a stage, M divisible by P) run overlapped
// or, on blocking runtimes, with every transfer added to the operation that waits for it.
//
// Cost: O(M * ranges), a few additions each.
#pragma once

#include <vector>

#include "core/units.h"
#include "grid/strategy.h"

namespace motley::grid {

struct Pipeline {
  std::vector<Seconds> forward, backward;     // [range], of one micro-batch
  std::vector<Seconds> activation, gradient;  // [boundary]: to range + 1, and back from it
};

// When each stage has finished its last backward. With `interleave` > 1 the vectors hold
// interleave * stages ranges, and the one boundary more per round of stages is among them.
// REQUIRES: micro_batches >= 1.
std::vector<Seconds> simulate_1f1b(const Pipeline& pipeline, int micro_batches, Runtime runtime);
std::vector<Seconds> simulate_interleaved(const Pipeline& pipeline, int stages, int micro_batches,
                                          Runtime runtime);

// Lower bounds of the same, under any schedule of the runtime: a stage's own work (blocking
// runtimes: and its transfers) after the shortest way in; the shortest way of one micro-batch; for
// the first stage also every stage's work with the ways to it and back.
std::vector<Seconds> finish_bounds(const Pipeline& pipeline, int stages, int micro_batches,
                                   Runtime runtime);

}  // namespace motley::grid
