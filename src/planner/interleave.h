// Stages that share their devices (plan/pipeline.h).
#pragma once

#include <string>

#include "plan/pipeline.h"

namespace motley::planner {

// Gives stages that share their devices the warm-up counts of the interleaved schedule; why there
// are none, if so.
std::string interleave(const PipelinePlan& pipeline, ReplicaPlan* replica, int* stages_per_device);

}  // namespace motley::planner
