#include "planner/stage_reductions.h"

#include <algorithm>

#include "reduce/cluster.h"

namespace motley::planner {

void add_reductions(const StageGroups& kinds, Plan* plan) {
  const PipelinePlan& pipeline = *plan->pipeline;
  for (size_t r = 0; r < pipeline.replicas.size(); ++r)
    for (const std::vector<int>& group : stage_groups(pipeline.replicas[r])) {
      const std::vector<StagePlan>& stages = pipeline.replicas[r].stages;
      Bytes largest = 0;
      for (int s : group) {
        const int64_t bytes = largest_all_reduce(pipeline.theory(s), stages[s].program,
                                                 !backend_of(plan->cluster).half_sums);
        largest = std::max(largest, static_cast<Bytes>(bytes));
      }
      for (ReductionProgram program : kinds[r][group[0]]->reductions) {
        if (program.from > largest) continue;
        program.devices = stages[group[0]].devices;
        plan->reductions.push_back(std::move(program));
      }
    }
  if (pipeline.replicas.size() < 3) return;
  for (int s = 0; s < pipeline.stages(); ++s) {
    const size_t ranks = pipeline.replicas[0].stages[s].devices.size();
    net::Groups groups(ranks);
    bool alike = true;
    for (const ReplicaPlan& replica : pipeline.replicas) {
      const std::vector<int>& devices = replica.stages[s].devices;
      alike = alike && devices.size() == ranks;
      for (size_t i = 0; i < ranks && alike; ++i) groups[i].push_back(devices[i]);
    }
    if (!alike) continue;
    const auto bytes = static_cast<Bytes>(pipeline.graph(s).parameter_bytes());
    // Stages that share their devices reduce alike.
    auto known = [&](const ReductionProgram& program) {
      return std::any_of(plan->reductions.begin(), plan->reductions.end(), [&](const auto& other) {
        return other.devices == program.devices && other.from == program.from;
      });
    };
    for (ReductionProgram& program : reduce::reductions_of(plan->cluster, groups))
      if (program.from <= bytes && !known(program)) plan->reductions.push_back(std::move(program));
  }
}

}  // namespace motley::planner
