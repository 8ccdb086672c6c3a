#include "pipeline/schedules.h"

namespace motley::pipeline {

std::vector<int> one_f_one_b_counts(const Pipeline& pipeline) {
  std::vector<int> counts;
  for (int i = 0; i < pipeline.size(); ++i) counts.push_back(pipeline.size() - i);
  return counts;
}

}  // namespace motley::pipeline
