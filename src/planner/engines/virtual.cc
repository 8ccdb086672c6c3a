// Machines as single devices (HAP section 3), as plans of one stage: replica i has the i-th device
// of every machine and runs one program on its part of the batch.
//
// What a program sends crosses between machines in as many groups side by side, which share the
// ports. A gradient's all-reduce over ranks and its sum over replicas are one reduction over both
// axes, in three steps. The search prices gradients so (OverReplicas in cost/cost.h). Nothing is
// fitted into memory that would be slower than what other engines found.
#include <algorithm>
#include <chrono>
#include <limits>
#include <map>
#include <numeric>

#include "bounds/compute_bound.h"
#include "core/error.h"
#include "planner/compose.h"
#include "planner/engines.h"

namespace motley::planner {

namespace {

constexpr int64_t kMicroBatches = 8;

// Neighbours of one type in a machine: [first, end).
struct Run {
  int first, end;
};

std::vector<Run> runs_of(const Cluster& cluster) {
  std::vector<Run> runs;
  for (const Group& group : cluster.groups) {
    if (!group.children.empty()) continue;
    const int last = group.first_device + group.device_count;
    for (int d = group.first_device; d < last;) {
      Run run{d, d};
      while (run.end < last && cluster.devices[run.end].type == cluster.devices[d].type) ++run.end;
      runs.push_back(run);
      d = run.end;
    }
  }
  return runs;
}

// The largest size there is.
int largest(const Cluster& cluster) {
  int size = 0;
  for (const Run& run : runs_of(cluster)) size = std::gcd(size, run.end - run.first);
  return size;
}

// Whether some machine is joined to the others by less than what joins its devices.
bool slower_outside(const Cluster& cluster) {
  for (const Group& group : cluster.groups) {
    if (!group.children.empty() || !group.parent.valid() || group.device_count < 2) continue;
    const Link& above = cluster.groups[group.parent.index].link;
    if ((group.uplink > 0 ? group.uplink : above.bandwidth) < group.link.bandwidth) return true;
  }
  return false;
}

// The sizes to try, the largest first; none, and why.
std::vector<int> sizes_of(const Cluster& cluster, int64_t batch, const VirtualDevices& wanted,
                          std::string* reason) {
  const int most = largest(cluster);
  if (wanted.size > 0) {
    if (most % wanted.size != 0)
      throw user_error(
          "plan",
          "--virtual-devices {} does not divide the machines of {} into devices of one "
          "type; give a divisor of {}",
          wanted.size, cluster.name, most);
    if (batch % wanted.size != 0)
      throw user_error("plan",
                       "--virtual-devices {} does not divide --batch {}; give a divisor of both",
                       wanted.size, batch);
    return {wanted.size};
  }
  std::vector<int> sizes;
  for (int size = most; size > 1; --size)
    if (most % size == 0 && batch % size == 0 && size < cluster.size()) sizes.push_back(size);
  if (sizes.empty()) {
    if (wanted.machine)
      throw user_error("plan",
                       "--virtual-devices machine: no size above 1 divides the machines of {} and "
                       "--batch {}; give off, or another batch",
                       cluster.name, batch);
    *reason = fmt::format("no size divides the machines of {} and the batch", cluster.name);
  }
  if (wanted.machine) sizes.resize(1);
  return sizes;
}

// All virtual devices, and those of types no slower than some type: the others may communicate
// longer than they save.
std::vector<std::vector<std::vector<int>>> choices(const Cluster& cluster,
                                                   const std::vector<std::vector<int>>& all) {
  std::vector<std::vector<std::vector<int>>> result = {all};
  for (const DeviceType& slowest : cluster.types) {
    std::vector<std::vector<int>> fast;
    for (const std::vector<int>& d : all)
      if (cluster.type_of(d[0]).flops >= slowest.flops) fast.push_back(d);
    if (fast.size() > 1 && fast.size() < all.size()) result.push_back(std::move(fast));
  }
  return result;
}

}  // namespace

std::vector<std::vector<int>> virtual_devices(const Cluster& cluster, int size) {
  std::vector<std::vector<int>> devices;
  for (const Run& run : runs_of(cluster)) {
    if ((run.end - run.first) % size != 0) return {};
    for (int d = run.first; d < run.end; d += size) {
      devices.emplace_back(static_cast<size_t>(size));
      std::iota(devices.back().begin(), devices.back().end(), d);
    }
  }
  return devices;
}

EngineResult plan_virtual(const PlanOptions& request, const Cluster& cluster,
                          const GraphOf& graph_of, const VirtualDevices& wanted) {
  EngineResult result{.engine = "virtual", .record = request.record};
  if (wanted.automatic && !slower_outside(cluster)) {
    result.reason =
        fmt::format("the machines of {} are joined as well as their devices", cluster.name);
    return result;
  }
  DeviceGroups groups(cluster);
  SearchCache cache;
  const CostModel model(cluster);
  const auto step = step_of(request, graph_of);
  std::map<int64_t, std::vector<std::vector<Seconds>>> works;  // of a step, for compute bounds
  // Returns whether smaller micro-batches may be needed.
  auto try_one = [&](const std::vector<std::vector<int>>& devices, int64_t micro_batch) {
    const auto part = step->of(micro_batch);
    if (!part) {
      if (result.candidates.empty()) result.reason = step->why_not();
      return false;
    }
    request.limits.deadline.check();
    auto [work, fresh] = works.try_emplace(micro_batch);
    if (fresh)
      work->second = bounds::compute_work(Theory(part->graph), model,
                                          static_cast<int>(request.batch / micro_batch));
    const auto start = std::chrono::steady_clock::now();
    // Where computation alone takes longer than what was found, nothing is planned.
    Seconds best = wanted.known;
    for (const Candidate& c : result.candidates) best = std::min(best, c.plan->predicted_step_s);
    std::vector<int> count(cluster.types.size(), 0);
    for (const std::vector<int>& d : devices)
      for (int device : d) ++count[cluster.devices[device].type];
    if (bounds::assignment_bound(work->second, count) > best) return false;
    PlanBuilder builder(request, &groups, step, micro_batch, 1, &cache);
    const int64_t size = static_cast<int64_t>(devices[0].size());
    for (const bool recompute : {false, true}) {
      if (recompute && !(builder.limited() && request.recompute)) break;
      Composition composition;
      composition.micro_batch = micro_batch;
      composition.joint = true;
      composition.worth = best;
      for (int64_t i = 0; i < size; ++i) {
        ReplicaChoice replica;
        replica.micro_batches = static_cast<int>(request.batch / (micro_batch * size));
        replica.stages.push_back(
            {0, builder.size() - 1, {}, recompute ? Again::if_needed : Again::never});
        for (const std::vector<int>& d : devices) replica.stages[0].devices.push_back(d[i]);
        composition.replicas.push_back(std::move(replica));
      }
      std::string reason;
      std::unique_ptr<Plan> plan =
          builder.compose_divided(&composition, request.memory_limit ? 2 : 0, "virtual", &reason);
      if (!plan) {
        if (result.candidates.empty()) result.reason = reason;
        continue;
      }
      result.add(std::move(plan),
                 fmt::format("{} virtual devices of {}, micro-batches of {}{}{}", devices.size(),
                             size, micro_batch,
                             composition.zero > 0 ? fmt::format(", ZeRO {}", composition.zero) : "",
                             recompute ? ", recomputing" : ""));
    }
    result.planned += builder.planned();
    result.search_s +=
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return builder.limited();
  };
  try {
    for (int size : sizes_of(cluster, request.batch, wanted, &result.reason))
      for (const auto& devices : choices(cluster, virtual_devices(cluster, size))) {
        if (!request.micro_batches.empty()) {
          for (int64_t micro_batch : request.micro_batches)
            if (request.batch % (micro_batch * size) == 0)
              try_one(devices, micro_batch);
            else if (result.candidates.empty())
              result.reason = fmt::format("the batch of {} is not {} times micro-batches of {}",
                                          request.batch, size, micro_batch);
          continue;
        }
        // Where memory is short, gradients are added up over smaller micro-batches.
        const int64_t samples = request.batch / size;
        for (int64_t count = 1; count <= kMicroBatches && samples % count == 0; count *= 2)
          if (!try_one(devices, samples / count)) break;
      }
  } catch (const TimeIsUp&) {
    if (result.candidates.empty()) result.reason = kNoTime;
  }
  rank(&result);
  if (!result.candidates.empty()) result.reason = "all sizes were tried";
  return result;
}

}  // namespace motley::planner
