#include "planner/interleave.h"

#include <algorithm>
#include <vector>

#include "pipeline/schedules.h"

namespace motley::planner {

std::string interleave(const PipelinePlan& pipeline, ReplicaPlan* replica, int* stages_per_device) {
  const auto groups = stage_groups(*replica);
  if (groups.size() == replica->stages.size()) return "";
  *stages_per_device = static_cast<int>(groups[0].size());
  const std::vector<int> counts = pipeline::interleaved_counts(
      static_cast<int>(groups.size()), *stages_per_device, replica->micro_batches);
  for (size_t g = 0; g < groups.size(); ++g) {
    for (int s : groups[g]) replica->stages[s].warm_up = counts[g];
    for (const Tied& tied : pipeline.parts().tied)
      if (std::count_if(tied.stages.begin(), tied.stages.end(), [&](int s) {
            return std::binary_search(groups[g].begin(), groups[g].end(), s);
          }) > 1)
        return "stages that share a parameter would share devices";
  }
  return ticks_of(*replica).empty() ? "interleaved stages would wait for each other for ever" : "";
}

}  // namespace motley::planner
