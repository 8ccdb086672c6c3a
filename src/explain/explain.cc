#include "explain/explain.h"

#include <algorithm>

#include "bounds/compute_bound.h"
#include "explain/tensors.h"
#include "planner/planner.h"
#include "reduce/cluster.h"
#include "sim/simulate.h"

namespace motley::explain {

namespace {

constexpr double kUnlimited = 1000;  // times as much of a resource
constexpr size_t kMostResources = 64;
constexpr double kTight = 0.85;  // of memory in use

// With more of something no step takes longer; that a little less of it can be hidden behind the
// backward pass is not told apart.
Seconds step_on(Plan* plan, Cluster cluster, Seconds known) {
  std::vector<ReductionProgram> reductions = plan->reductions;
  reduce::reprice(plan->cluster, cluster, &reductions);
  std::swap(plan->reductions, reductions);
  std::swap(plan->cluster, cluster);
  const Seconds step = simulate(*plan).step;
  std::swap(plan->cluster, cluster);
  std::swap(plan->reductions, reductions);
  return std::min(step, known);
}

// What planning anew finds, the plan itself being known.
Seconds replanned(const Plan& plan, const Cluster& cluster, Seconds known, double seconds,
                  bool memory_limit) {
  planner::PlanOptions options;
  options.model = plan.model;
  options.batch = plan.batch;
  options.optimizer = plan.optimizer;
  options.redundancy = cluster.size() > 1 ? plan.redundancy : 0;
  options.memory_limit = memory_limit;
  options.baselines = false;
  options.limits.deadline = Deadline::in(seconds);
  const planner::PlanReport report =
      planner::plan([&](int64_t) { return *plan.graph; }, cluster, options);
  return report.candidates.empty() ? known : std::min(known, report.best().simulated_s);
}

void add_sensitivity(Plan* plan, const Options& options, const Deadline& deadline,
                     Explanation* out) {
  std::vector<Resource> resources = resources_of(plan->cluster);
  if (resources.size() > kMostResources) resources.resize(kMostResources);
  for (const Resource& resource : resources) {
    Sensitivity s{resource, out->step, out->step, 0};
    if (resource.kind != ResourceKind::memory) {  // a plan does not run faster in more memory
      s.step = step_on(plan, with_more(plan->cluster, resource, options.more), out->step);
      s.unlimited = step_on(plan, with_more(plan->cluster, resource, kUnlimited), s.step);
    }
    out->sensitivity.push_back(std::move(s));
  }
  for (size_t i = 0; options.replan && i < out->sensitivity.size(); ++i) {
    Sensitivity& s = out->sensitivity[i];
    if (deadline.over()) {
      out->out_of_time = true;
      break;
    }
    const double part = deadline.left() / static_cast<double>(out->sensitivity.size() - i);
    s.replanned =
        replanned(*plan, with_more(plan->cluster, s.resource, options.more), s.step, part, true);
  }
  std::stable_sort(out->sensitivity.begin(), out->sensitivity.end(),
                   [](const Sensitivity& a, const Sensitivity& b) {
                     const auto best = [](const Sensitivity& s) {
                       return s.replanned > 0 ? std::min(s.step, s.replanned) : s.step;
                     };
                     return std::pair(best(a), a.unlimited) < std::pair(best(b), b.unlimited);
                   });
}

void add_memory(const Plan& plan, const Simulation& sim, Explanation* out) {
  for (const DeviceGroup& group : device_groups(plan.cluster)) {
    MemoryUse use{group.name, 0, plan.cluster.type_of(group.devices[0]).memory};
    for (const int d : group.devices) use.peak = std::max(use.peak, sim.devices[d].peak_memory);
    out->memory.push_back(use);
  }
}

// Whether something is computed again, or held in pieces, for want of memory.
bool saves_memory(const Plan& plan) {
  const auto again = [](const Program& program) {
    return std::any_of(program.steps.begin(), program.steps.end(),
                       [](const Step& step) { return step.again; });
  };
  if (!plan.pipeline) return again(plan.program);
  for (const ReplicaPlan& replica : plan.pipeline->replicas)
    for (const StagePlan& stage : replica.stages)
      if (stage.recompute || again(stage.program)) return true;
  return false;
}

void add_verdict(const Plan& plan, const Simulation& sim, const Options& options,
                 Explanation* out) {
  const auto percent = [&](Seconds s) { return 100 * (1 - s / out->step); };
  if (!out->sensitivity.empty()) {
    const Sensitivity& first = out->sensitivity[0];
    out->verdict.push_back(
        percent(first.step) < 0.05
            ? "no single resource limits the step"
            : fmt::format("the {} limits the step most: {:.0f}% more of it takes {:.1f}% off",
                          first.resource.name, 100 * (options.more - 1), percent(first.step)));
    if (out->sensitivity.size() > 1 && percent(out->sensitivity[1].step) >= 0.5)
      out->verdict.back() +=
          fmt::format("; next is the {} with {:.1f}%", out->sensitivity[1].resource.name,
                      percent(out->sensitivity[1].step));
  }
  if (out->has_path && !out->path.parts.empty()) {
    const PathPart& longest = out->path.parts[0];
    out->verdict.push_back(fmt::format("of the critical path {:.0f}% is {}",
                                       100 * longest.seconds / out->path.end, longest.what));
  }
  Seconds busy = 0, comm = 0, idle = 0;
  for (const DeviceTime& d : sim.devices) {
    busy += d.busy / (sim.step * static_cast<double>(sim.devices.size()));
    comm += d.exposed_comm / (sim.step * static_cast<double>(sim.devices.size()));
    idle += d.idle / (sim.step * static_cast<double>(sim.devices.size()));
  }
  out->verdict.push_back(
      fmt::format("on average a device computes {:.0f}% of the step, communicates with nothing to "
                  "compute {:.0f}%, and waits for others {:.0f}%",
                  100 * busy, 100 * comm, 100 * idle));
  for (const MemoryUse& use : out->memory)
    if (use.peak > kTight * use.memory)
      out->verdict.push_back(
          fmt::format("memory of {} is {:.0f}% full", use.group, 100 * use.peak / use.memory));
  if (saves_memory(plan))
    out->verdict.push_back(
        "memory limits the step too: activations are computed again to fit; --replan says what "
        "more "
        "memory gives");
}

}  // namespace

Explanation explain(Plan* plan, const Options& options) {
  Explanation out;
  const Simulation sim = simulate(*plan, options.path ? Spans::all : Spans::none);
  out.has_path = options.path && sim.like.empty() && !sim.too_long;
  if (out.has_path) out.path = critical_path(*plan, sim);
  out.step = sim.step;
  out.lower_bound = plan->lower_bound_s;
  out.compute_bound = bounds::compute_bound(*plan->theory, CostModel(plan->cluster), 1);
  add_memory(*plan, sim, &out);
  const Deadline whole = Deadline::in(options.seconds);
  add_sensitivity(plan, options, whole.part(0.7), &out);
  out.tensors = tensor_choices(plan, options, whole, &out.out_of_time);
  add_verdict(*plan, sim, options, &out);
  return out;
}

}  // namespace motley::explain
