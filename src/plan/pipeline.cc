#include "plan/pipeline.h"

#include <algorithm>

#include "cluster/part.h"
#include "core/error.h"

namespace motley {

void PipelinePlan::cut(const Graph& whole, int stages, const std::string& where) {
  theories_.clear();
  parts_ = std::make_unique<Stages>(cut_stages(whole, stage_of, stages, where));
  for (const StageGraph& stage : parts_->graphs)
    theories_.push_back(std::make_unique<Theory>(stage.graph));
}

int PipelinePlan::micro_batches() const {
  int sum = 0;
  for (const ReplicaPlan& replica : replicas) sum += replica.micro_batches;
  return sum;
}

bool PipelinePlan::seat(int device, Seat* seat) const {
  for (size_t r = 0; r < replicas.size(); ++r)
    for (size_t s = 0; s < replicas[r].stages.size(); ++s) {
      const std::vector<int>& devices = replicas[r].stages[s].devices;
      auto it = std::lower_bound(devices.begin(), devices.end(), device);
      if (it == devices.end() || *it != device) continue;
      *seat = {static_cast<int>(r), static_cast<int>(s), static_cast<int>(it - devices.begin())};
      return true;
    }
  return false;
}

int in_flight(const ReplicaPlan& replica, int stage) {
  return std::min(replica.stages[stage].warm_up, replica.micro_batches);
}

std::vector<Bytes> stage_memory(const PipelinePlan& plan, int replica, int stage,
                                const Cluster& sub_cluster, Optimizer optimizer) {
  const StagePlan& s = plan.replicas[replica].stages[stage];
  const Shares shares(s.ratios);
  const Fractions fractions(sub_cluster, shares);
  const MemoryCost memory =
      memory_of(plan.theory(stage), s.program, fractions,
                static_cast<int>(sub_cluster.types.size()), optimizer, /*phases=*/true);
  const int others = in_flight(plan.replicas[replica], stage) - 1;
  std::vector<Bytes> bytes;
  for (size_t t = 0; t < memory.peak.size(); ++t)
    bytes.push_back(memory.peak[t] + memory.sums[t] +
                    others * (s.recompute ? memory.held_inputs[t] : memory.held[t]));
  return bytes;
}

std::vector<Bytes> pipeline_memory(const PipelinePlan& plan, const Cluster& cluster,
                                   Optimizer optimizer) {
  std::vector<Bytes> bytes(cluster.size(), 0);
  for (size_t r = 0; r < plan.replicas.size(); ++r)
    for (int s = 0; s < plan.stages(); ++s) {
      const std::vector<int>& devices = plan.replicas[r].stages[s].devices;
      const Cluster part = part_of(cluster, devices);
      const std::vector<Bytes> by_type =
          stage_memory(plan, static_cast<int>(r), s, part, optimizer);
      for (size_t i = 0; i < devices.size(); ++i) bytes[devices[i]] = by_type[part.devices[i].type];
    }
  return bytes;
}

}  // namespace motley
