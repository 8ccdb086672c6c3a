#include "planner/joint_placement.h"

#include <algorithm>
#include <utility>

#include "cluster/part.h"
#include "reduce/cluster.h"

namespace motley::planner {

bool place_jointly(const Cluster& cluster, const std::vector<std::vector<int>>& sites,
                   const Plan& plan, Composition* composition, const Deadline& deadline) {
  const PipelinePlan& pipeline = *plan.pipeline;
  auto& replicas = composition->replicas;
  const int dp = static_cast<int>(replicas.size());
  bool moved = false;
  for (std::vector<int> site : sites) {
    std::sort(site.begin(), site.end());
    // The stages in this site, and what they reduce.
    std::vector<int> stages;
    Bytes gradients = 0, inside = 0, both = 0;
    size_t ranks = 0;
    bool uniform = true;
    for (int s = 0; s < pipeline.stages(); ++s) {
      size_t here = 0, all = 0;
      for (const ReplicaChoice& replica : replicas)
        for (int d : replica.stages[s].devices) {
          ++all;
          here += std::binary_search(site.begin(), site.end(), d);
        }
      if (here == 0) continue;
      if (stages.empty()) ranks = replicas[0].stages[s].devices.size();
      uniform = uniform && here == all;
      for (const ReplicaChoice& replica : replicas)
        uniform = uniform && replica.stages[s].devices.size() == ranks;
      stages.push_back(s);
      const Theory& theory = pipeline.theory(s);
      const Graph& graph = theory.graph();
      const StagePlan& stage = pipeline.replicas[0].stages[s];
      const std::vector<Placement> stored = stored_placements(theory, stage.program);
      const JointGradients joint = joint_gradients(pipeline, s);
      for (size_t i = 0; i < graph.parameters.size(); ++i) {
        const Parameter& p = graph.parameters[i];
        const auto bytes = static_cast<Bytes>(graph.spec(p.value).bytes());
        if (joint.gradient[i]) {
          both += bytes;
          continue;
        }
        const bool cut = stored[p.value.index].is_shard();
        if (p.gradient.valid()) gradients += cut ? bytes / static_cast<double>(ranks) : bytes;
      }
      const int once = phases_of(theory, stage.program).reduction;
      for (int i = 0; i < static_cast<int>(stage.program.steps.size()); ++i) {
        const Step& step = stage.program.steps[i];
        if (step.is_compute() || moves_nothing(step.kind) ||
            std::binary_search(joint.steps[0].begin(), joint.steps[0].end(), i))
          continue;
        // A ring sends half of what an all-reduce does for the others.
        const double part = step.kind == Collective::all_reduce ? 1 : 0.5;
        inside += part * static_cast<Bytes>(graph.spec(step.value).bytes()) *
                  (i < once ? replicas[0].micro_batches : 1);
      }
    }
    if (dp == 1 || ranks < 2 || !uniform || stages.size() * dp * ranks != site.size()) continue;
    const double each = static_cast<double>(stages.size());
    const std::vector<int> order = reduce::devices_jointly(
        part_of(cluster, site), {static_cast<int>(stages.size()), dp, static_cast<int>(ranks)},
        {{{1}, gradients / each}, {{2}, inside / each}, {{1, 2}, both / each}}, deadline);
    if (order.empty()) continue;
    auto next = order.begin();
    for (int s : stages)
      for (ReplicaChoice& replica : replicas) {
        std::vector<int> devices;
        for (size_t t = 0; t < ranks; ++t) devices.push_back(site[*next++]);
        std::sort(devices.begin(), devices.end());
        std::vector<int> before = replica.stages[s].devices;
        std::sort(before.begin(), before.end());
        moved = moved || devices != before;
        replica.stages[s].devices = std::move(devices);
      }
  }
  return moved;
}
}  // namespace motley::planner
