#include "pipeline/schedules.h"

namespace motley::pipeline {

std::vector<int> eager_counts(const Pipeline& pipeline) {
  std::vector<int> counts;
  for (int i = 0; i < pipeline.size(); ++i) counts.push_back(2 * (pipeline.size() - 1 - i) + 1);
  return counts;
}

}  // namespace motley::pipeline
