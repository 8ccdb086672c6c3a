#include "pipeline/schedules.h"

namespace motley::pipeline {

std::vector<int> exact_schedule_counts(const Pipeline& pipeline) {
  return exact_counts(pipeline).counts;
}

}  // namespace motley::pipeline
