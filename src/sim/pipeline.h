// The event simulator of pipeline plans.
//
// Every replica's stages take their passes in the order of their warm-up counts. A pass starts when
// the stage is free and all it reads has come in; inside it the stage's devices walk through the
// program (walk.h), and the slowest ends it; the replicas of a stage share what their collectives
// cross. A transfer starts when the pass that makes it has
// ended and the way from that stage to the other, each direction its own, is free; messages go from
// rank to rank as the runtime sends them, and all replicas share the ports they cross. When a stage
// is done it reduces within itself, over replicas once all of them are there, and for tied
// parameters over stages; then its optimizer runs, and replicas that divided its work gather the
// parameters. Where replicas reduce gradients in every backward pass, all passes take as long as in
// the slowest replica.
//
// Replicas that look alike, with as many micro-batches in the same order, take the same time: one
// of them is simulated for all, unless spans of all devices are wanted.
#pragma once

#include <memory>

#include "sim/simulate.h"

namespace motley {

// Throws TimeIsUp if the deadline passes, as do steps below.
Simulation simulate_pipeline(const Plan& plan, Spans spans, const Deadline& deadline = {});

// Steps of one plan with several warm-up counts: what passes and messages take is worked out once.
class PipelineSteps {
 public:
  // REQUIRES: the plan outlives this, and nothing of it changes but its warm-up counts.
  explicit PipelineSteps(const Plan& plan, const Deadline& deadline = {});
  ~PipelineSteps();

  // simulate_pipeline(plan).step, with the counts that the plan has now.
  Seconds step();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace motley
