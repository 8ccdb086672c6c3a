// H-1F1B by the case table of HAPT Eq. 2: one more launch than the next stage where the link takes
// next to nothing (epsilon t_max), two where it takes up to half of t_max, three beyond. The slower
// direction of an asymmetric link counts.
#include <algorithm>

#include "pipeline/schedules.h"

namespace motley::pipeline {

std::vector<int> h_one_f_one_b_table_counts(const Pipeline& pipeline) {
  constexpr double kEpsilon = 0.05;
  Seconds t_max = 0;
  for (const StageTime& s : pipeline.stages) t_max = std::max(t_max, s.total());
  std::vector<int> counts(pipeline.size(), 1);
  for (int i = pipeline.size() - 2; i >= 0; --i) {
    Seconds c = std::max(pipeline.links[i].forward, pipeline.links[i].backward);
    counts[i] = counts[i + 1] + (c <= kEpsilon * t_max ? 1 : c <= t_max / 2 ? 2 : 3);
  }
  return counts;
}

}  // namespace motley::pipeline
