#include "plan/pipeline.h"

#include <algorithm>
#include <map>
#include <set>

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

std::vector<int> devices_of(const PipelinePlan& plan, int stage) {
  std::vector<int> devices;
  for (const ReplicaPlan& replica : plan.replicas)
    devices.insert(devices.end(), replica.stages[stage].devices.begin(),
                   replica.stages[stage].devices.end());
  std::sort(devices.begin(), devices.end());
  return devices;
}

bool JointGradients::any() const {
  return std::find(gradient.begin(), gradient.end(), true) != gradient.end();
}

namespace {

// The all-reduces of a program's reduction that lead to whole gradients by views alone.
struct LateSums {
  std::vector<int> step;    // [parameter] -1: none
  std::set<int> otherwise;  // those that something else reads too
};

LateSums late_sums(const Theory& theory, const Program& program) {
  const Graph& graph = theory.graph();
  LateSums late;
  std::map<std::pair<ValueId, Placement>, int> origin;
  const int end = static_cast<int>(program.steps.size());
  for (int s = phases_of(theory, program).reduction; s < end; ++s) {
    const Step& step = program.steps[s];
    if (step.is_compute()) {
      const Triple& triple = theory.triples(step.node)[step.triple];
      const Node& node = graph.node(step.node);
      auto it = origin.find({graph.inputs_of(node)[0], triple.in[0]});
      if (it != origin.end()) origin[{node.outputs[0], triple.out[0]}] = it->second;
      continue;
    }
    if (auto it = origin.find({step.value, step.from}); it != origin.end())
      late.otherwise.insert(it->second);
    if (step.kind == CollectiveKind::all_reduce) origin[{step.value, step.to}] = s;
  }
  const std::vector<Placement> stored = stored_placements(theory, program);
  for (const Parameter& p : graph.parameters) {
    auto it = p.gradient.valid() ? origin.find({p.gradient, stored[p.value.index]}) : origin.end();
    late.step.push_back(it == origin.end() ? -1 : it->second);
  }
  return late;
}

}  // namespace

JointGradients joint_gradients(const PipelinePlan& plan, int stage) {
  JointGradients joint;
  const size_t replicas = plan.replicas.size(), parameters = plan.graph(stage).parameters.size();
  joint.gradient.assign(parameters, replicas > 1);
  joint.steps.resize(replicas);
  std::vector<LateSums> late;
  for (const ReplicaPlan& replica : plan.replicas) {
    late.push_back(late_sums(plan.theory(stage), replica.stages[stage].program));
    for (size_t p = 0; p < parameters; ++p)
      joint.gradient[p] = joint.gradient[p] && late.back().step[p] >= 0;
  }
  // A sum is left out for all gradients that come of it or for none.
  for (bool changed = true; changed;) {
    changed = false;
    for (LateSums& sums : late)
      for (size_t p = 0; p < parameters; ++p) {
        if (!joint.gradient[p] && sums.step[p] >= 0) sums.otherwise.insert(sums.step[p]);
        if (!joint.gradient[p] || !sums.otherwise.count(sums.step[p])) continue;
        joint.gradient[p] = false;
        changed = true;
      }
  }
  for (size_t r = 0; r < replicas; ++r) {
    std::set<int> steps;
    for (size_t p = 0; p < parameters; ++p)
      if (joint.gradient[p]) steps.insert(late[r].step[p]);
    joint.steps[r].assign(steps.begin(), steps.end());
  }
  return joint;
}

JointGradients joint_gradients(const PipelinePlan& plan, int stage,
                               const std::vector<ReductionProgram>& reductions, int cluster_size) {
  bool ranks = false;
  for (const ReplicaPlan& replica : plan.replicas)
    ranks = ranks || replica.stages[stage].devices.size() > 1;
  if (ranks && plan.replicas.size() > 1 &&
      !programs_for(reductions, devices_of(plan, stage), cluster_size).empty())
    return joint_gradients(plan, stage);
  JointGradients none;
  none.gradient.assign(plan.graph(stage).parameters.size(), false);
  none.steps.resize(plan.replicas.size());
  return none;
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
