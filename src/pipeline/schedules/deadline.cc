// Earliest deadline first. Micro-batch m is due out of stage 1 at (m + 1) periods; a task is due
// what remains of its micro-batch's way earlier.
#include "pipeline/schedules.h"

namespace motley::pipeline {

Schedule deadline_schedule(const Pipeline& pipeline, int micro_batches) {
  int stages = pipeline.size();
  Seconds beat = least_period(pipeline);
  // Seconds from the start of a pass to the end of the micro-batch's last one.
  std::vector<Seconds> from_backward(stages), from_forward(stages);
  for (int i = 0; i < stages; ++i)
    from_backward[i] = pipeline.stages[i].backward +
                       (i > 0 ? from_backward[i - 1] + pipeline.links[i - 1].backward : 0);
  for (int i = stages - 1; i >= 0; --i)
    from_forward[i] =
        pipeline.stages[i].forward +
        (i + 1 < stages ? from_forward[i + 1] + pipeline.links[i].forward : from_backward[i]);
  return dispatch("deadline", pipeline, dispatch_limits(pipeline), micro_batches,
                  [=](int stage, int forward, int backward) {
                    return beat * backward - from_backward[stage] <=
                           beat * forward - from_forward[stage];
                  });
}

}  // namespace motley::pipeline
