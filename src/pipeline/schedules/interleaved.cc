#include <algorithm>

#include "pipeline/schedules.h"

namespace motley::pipeline {

std::vector<int> interleaved_counts(int groups, int stages_per_device, int micro_batches) {
  std::vector<int> counts;
  const int all = micro_batches * stages_per_device;
  for (int g = 0; g < groups; ++g)
    counts.push_back(
        micro_batches <= groups
            ? all
            : std::min(all, 2 * (groups - g - 1) + (stages_per_device - 1) * groups + 1));
  return counts;
}

}  // namespace motley::pipeline
