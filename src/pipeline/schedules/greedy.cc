#include "pipeline/schedules.h"

namespace motley::pipeline {

Schedule greedy_schedule(const Pipeline& pipeline, int micro_batches) {
  return dispatch("greedy", pipeline, dispatch_limits(pipeline), micro_batches,
                  [](int, int, int) { return true; });
}

}  // namespace motley::pipeline
