// In which messages the gradients of a pipeline's stages travel (GradientSizes): at the end of a step
// nothing is there to hide behind, so that longer messages pay fewer latencies.
#pragma once

#include <vector>

#include "cost/overlap.h"
#include "plan/pipeline.h"
#include "planner/stage_reductions.h"

namespace motley::planner {

// [stage] Sizes with which the stage's slowest replica takes least for its gradients; empty where no
// stage's gain `worth` seconds.
std::vector<GradientSizes> stage_sizes(const PipelinePlan& plan, const StageGroups& kinds,
                                       Seconds worth);

// Those of all replicas of each stage; empty: the usual ones.
void set_sizes(const std::vector<GradientSizes>& sizes, PipelinePlan* plan);

}  // namespace motley::planner
