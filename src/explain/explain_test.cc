#include "explain/explain.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "planner/planner.h"
#include "sim/simulate.h"
#include "tiny_models.h"

namespace motley::explain {
namespace {

std::unique_ptr<Plan> plan_of(const Cluster& cluster, const std::string& engine,
                              const std::string& fix = "") {
  planner::PlanOptions options;
  options.model = "tiny";
  options.batch = 16;
  options.engine = engine;
  options.fix = fix;
  options.baselines = false;
  options.all_devices = true;
  options.limits.deadline = Deadline::in(20);
  planner::PlanReport report = planner::plan(tiny_gpt, cluster, options);
  EXPECT_FALSE(report.candidates.empty()) << report.reason;
  return std::move(report.candidates.at(0).plan);
}

std::vector<std::unique_ptr<Plan>> plans() {
  std::vector<std::unique_ptr<Plan>> list;
  for (const double bandwidth : {1e8, 5e9}) {
    const Cluster cluster = tiny_cluster(bandwidth);
    list.push_back(plan_of(cluster, "spmd"));
    list.push_back(plan_of(cluster, "pipeline"));
    list.push_back(plan_of(cluster, "grid", "pp=3,dp=2"));
    list.push_back(plan_of(cluster, "grid", "pp=2,dp=1"));
  }
  return list;
}

Seconds sum_of(const Path& path) {
  Seconds sum = 0;
  for (const PathPart& part : path.parts) sum += part.seconds;
  return sum;
}

TEST(CriticalPath, AddsUpToTheEndAndIdlesNowhere) {
  for (const auto& plan : plans()) {
    const Simulation sim = simulate(*plan, Spans::all);
    const Path path = critical_path(*plan, sim);
    EXPECT_NEAR(sum_of(path), path.end, 1e-9 * path.end);
    for (const PathPart& part : path.parts) {
      EXPECT_EQ(part.what.find("idle"), std::string::npos) << part.what;
      EXPECT_EQ(part.what.find(": waiting"), std::string::npos) << part.what;
    }
  }
}

// Of one program: its collectives, and between two of them what the slowest device computes.
TEST(CriticalPath, OfOneProgramIsWhatTheSlowestDevicesCompute) {
  for (const double bandwidth : {1e8, 5e9}) {
    const auto plan = plan_of(tiny_cluster(bandwidth), "spmd");
    const Simulation sim = simulate(*plan, Spans::all);
    std::vector<Seconds> computed(plan->cluster.size(), 0), comm(plan->cluster.size(), 0);
    std::map<Seconds, Seconds> meetings;  // collectives by when they begin
    for (const Span& span : sim.spans) {
      if (span.kind == WalkKind::comm) {
        meetings[span.begin] = span.end - span.begin;
        comm[span.device] += span.end - span.begin;
      }
    }
    Seconds collectives = 0;
    for (const auto& [begin, seconds] : meetings) collectives += seconds;
    const Path path = critical_path(*plan, sim);
    Seconds found = 0;
    for (const PathPart& part : path.parts)
      if (part.what.find(':') == std::string::npos) found += part.seconds;
    EXPECT_NEAR(found, collectives, 1e-9 * path.end);
    EXPECT_NEAR(sum_of(path) - found, path.end - collectives, 1e-9 * path.end);
    // Whoever waits does so for another group, and all that devices wait is told.
    Seconds waited = 0, told = 0;
    for (const Span& span : sim.spans)
      if (span.kind == WalkKind::wait) waited += span.end - span.begin;
    for (int d = 0; d < plan->cluster.size(); ++d) {
      Seconds last = 0;
      for (const Span& span : sim.spans)
        if (span.device == d) last = std::max(last, span.end);
      waited += path.end - last;
    }
    std::map<std::string, int> devices;
    for (const DeviceGroup& group : device_groups(plan->cluster))
      devices[group.name] = static_cast<int>(group.devices.size());
    for (const Wait& wait : path.waits) told += wait.seconds * devices.at(wait.who);
    EXPECT_NEAR(told, waited, 1e-9 * path.end);
  }
}

TEST(Sensitivity, IsThePlanOnTheOtherCluster) {
  const Cluster cluster = tiny_cluster(1e9);
  const auto plan = plan_of(cluster, "spmd");
  plan->reductions.clear();
  ASSERT_EQ(plan->cluster.size(), 6);
  Options options;
  options.tensors = 0;
  const Explanation e = explain(plan.get(), options);
  std::map<std::string, Seconds> found;
  for (const Sensitivity& s : e.sensitivity) found[s.resource.name] = s.step;
  const auto expect = [&](const std::string& name, auto&& change) {
    ASSERT_TRUE(found.count(name)) << name;
    Cluster other = cluster;
    change(&other);
    std::swap(plan->cluster, other);
    EXPECT_NEAR(found[name], std::min(e.step, simulate(*plan).step), 1e-12) << name;
    std::swap(plan->cluster, other);
    EXPECT_LE(found[name], e.step);
  };
  expect("speed of slow", [](Cluster* c) {
    DeviceType& t = c->types[1];
    t.flops *= 1.1, t.half_flops *= 1.1, t.memory_bandwidth *= 1.1, t.overhead /= 1.1;
  });
  expect("bandwidth between new, old", [](Cluster* c) { c->groups[0].link.bandwidth *= 1.1; });
  expect("latency between new, old", [](Cluster* c) { c->groups[0].link.latency /= 1.1; });
  expect("bandwidth inside old", [](Cluster* c) { c->groups[3].link.bandwidth *= 1.1; });
  expect("bandwidth inside new", [](Cluster* c) {
    c->groups[1].link.bandwidth *= 1.1;
    c->groups[2].link.bandwidth *= 1.1;
  });
}

TEST(Sensitivity, MoreIsNeverSlowerAndReplanningNeverWorse) {
  for (const auto& plan : plans()) {
    Options options;
    options.tensors = 0;
    const Explanation e = explain(plan.get(), options);
    EXPECT_LE(e.compute_bound, e.step);
    for (const Sensitivity& s : e.sensitivity) {
      EXPECT_LE(s.step, e.step) << s.resource.name;
      EXPECT_LE(s.unlimited, s.step) << s.resource.name;
      EXPECT_GE(s.step, e.step / 1.1 * (1 - 1e-9)) << s.resource.name;
    }
  }
  const auto plan = plan_of(tiny_cluster(1e9), "grid", "pp=2,dp=1");
  Options options;
  options.tensors = 0;
  options.replan = true;
  options.seconds = 20;
  for (const Sensitivity& s : explain(plan.get(), options).sensitivity) {
    EXPECT_GT(s.replanned, 0) << s.resource.name;
    EXPECT_LE(s.replanned, s.step) << s.resource.name;
  }
}

// A search that leaves out all but one way to hold a tensor finds nothing better than one that does
// not, and the plan is as it was.
TEST(Tensors, OtherPlacementsAreSearchedAndThePlanStays) {
  for (const auto& plan : plans()) {
    const std::string before = to_json(*plan).dump();
    Options options;
    options.seconds = 60;
    const Explanation e = explain(plan.get(), options);
    EXPECT_EQ(to_json(*plan).dump(), before);
    if (!plan->pipeline) {
      EXPECT_FALSE(e.tensors.empty());
    }
    for (const TensorChoice& t : e.tensors) {
      EXPECT_FALSE(t.why.empty());
      for (const TensorChoice::Other& o : t.others) {
        EXPECT_NE(o.placement, t.placement);
        if (!o.feasible) {
          EXPECT_FALSE(o.reason.empty()) << t.name << " " << o.placement;
        } else if (!plan->pipeline) {
          EXPECT_GE(o.step, 0.97 * e.step) << t.name << " " << o.placement;
        }
      }
    }
  }
}

// Where a stage reads a parameter whose gradient another makes, it holds it whole.
TEST(Tensors, WithoutAGradientAreWhole) {
  const auto plan = plan_of(tiny_cluster(5e9), "grid", "pp=3,dp=1,tp=2");
  ASSERT_TRUE(plan->pipeline);
  std::set<std::string> frozen;  // of stages that have no gradient of it
  for (int s = 0; s < plan->pipeline->stages(); ++s)
    for (const Parameter& p : plan->pipeline->theory(s).graph().parameters)
      if (!p.gradient.valid()) frozen.insert(fmt::format("{} {}", s, p.name));
  Options options;
  options.seconds = 60;
  options.tensors = 1000;
  int seen = 0;
  for (const TensorChoice& t : explain(plan.get(), options).tensors) {
    if (frozen.count(fmt::format("{} {}", t.stage, t.name)) == 0) continue;
    ++seen;
    EXPECT_TRUE(t.others.empty());
    EXPECT_NE(t.why.find("held whole"), std::string::npos) << t.why;
  }
  EXPECT_EQ(seen, static_cast<int>(frozen.size()));
}

}  // namespace
}  // namespace motley::explain
