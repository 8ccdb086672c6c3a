#include "planner/stage_sizes.h"

#include <algorithm>

namespace motley::planner {

std::vector<GradientSizes> stage_sizes(const PipelinePlan& plan, const StageGroups& kinds,
                                       Seconds worth) {
  std::vector<GradientSizes> chosen(plan.stages());
  bool any = false;
  for (int s = 0; s < plan.stages(); ++s) {
    const auto seconds = [&](const GradientSizes& sizes) {
      Seconds slowest = 0;
      for (size_t r = 0; r < plan.replicas.size(); ++r) {
        const bool known = r > 0 && kinds[r][s] == kinds[0][s] &&
                           plan.replicas[r].stages[s].program == plan.replicas[0].stages[s].program;
        if (known || kinds[r][s]->cluster.size() == 1) continue;
        slowest =
            std::max(slowest, gradient_seconds(plan.theory(s), plan.replicas[r].stages[s].program,
                                               sizes, kinds[r][s]->model));
      }
      return slowest;
    };
    Seconds least = seconds({}) - worth;
    // No sizes take less than the largest, but for copies.
    if (least <= 0 || seconds(kLargestSizes) > least) continue;
    for (const GradientSizes& sizes : usual_sizes())
      if (const Seconds now = seconds(sizes); now < least) {
        least = now;
        chosen[s] = sizes;
        any = true;
      }
  }
  return any ? chosen : std::vector<GradientSizes>();
}

void set_sizes(const std::vector<GradientSizes>& sizes, PipelinePlan* plan) {
  for (ReplicaPlan& replica : plan->replicas)
    for (size_t s = 0; s < replica.stages.size(); ++s)
      replica.stages[s].program.sizes = sizes.empty() ? GradientSizes() : sizes[s];
}

}  // namespace motley::planner
