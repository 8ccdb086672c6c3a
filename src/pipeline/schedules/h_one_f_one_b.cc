// H-1F1B by HAPT Eq. 11, generalised as in section 4.2.4: every stage is stretched to t_max, and
// 2c of a symmetric link is cF + cB.
#include <algorithm>
#include <cmath>

#include "pipeline/schedules.h"

namespace motley::pipeline {

std::vector<int> h_one_f_one_b_counts(const Pipeline& pipeline) {
  Seconds t_max = 0;
  for (const StageTime& s : pipeline.stages) t_max = std::max(t_max, s.total());
  std::vector<int> counts(pipeline.size(), 1);
  for (int i = pipeline.size() - 2; i >= 0; --i) {
    double ratio = std::min(pipeline.links[i].total() / t_max, 1e6);
    counts[i] = counts[i + 1] + 1 + static_cast<int>(std::ceil(ratio * (1 - kCountSlack)));
  }
  return counts;
}

}  // namespace motley::pipeline
