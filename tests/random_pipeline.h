// Random pipeline plans of zoo models: layers cut anywhere, stages on any groups of devices, random
// programs of the theory inside, random warm-up counts.
#pragma once

#include <string>

#include "core/rng.h"
#include "plan/plan.h"

namespace motley {

struct RandomPipeline {
  std::string model;
  int64_t micro_batch = 2;
  DType dtype = DType::f32;
  bool plain = false;  // one replica, one device per stage, nothing recomputed
  // Two or three replicas, and all-reduces in steps: in stages, and over replicas that are alike.
  bool reductions = false;
  bool joint = false;   // of these also some over all ranks of a stage in all replicas
  bool shared = false;  // stages may share their devices
  bool zero = false;    // two or three replicas that divide the state of parameters
  // Most stages gather parameters and scatter gradients in every pass (spmd/recompute.h).
  bool pieces = false;
  bool again = false;  // most stages compute some of their blocks again
  int kinds = 0;       // at least one: up to five replicas of so many kinds
  bool split = true;   // some stages that have their devices to themselves split backward passes
};

// A sound plan, not one that would fit or be fast.
Plan random_pipeline(const RandomPipeline& what, Rng* rng);

// The same with a batch of as many samples as its replicas' micro-batches have, at least two; after
// a change of their numbers.
void fit_batch(Plan* plan, DType dtype = DType::f32);

// Steps that sum over `devices` ranks, at least two.
std::vector<ReductionStep> random_reduction(int devices, Rng* rng);

}  // namespace motley
