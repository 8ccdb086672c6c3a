// Stages of the pipeline engine in unequal devices: which sub-clusters there are, what a search
// with bounds of unplanned slices finds, and that such plans are training on one device.
#include "planner/sub_clusters.h"

#include <gtest/gtest.h>

#include <memory>
#include <set>

#include "capture/capture.h"
#include "core/rng.h"
#include "graph/canonical.h"
#include "planner/engines.h"
#include "planner/stage_costs.h"
#include "runtime/trainer.h"
#include "runtime/verify.h"

namespace motley {
namespace {

const char* kTypes = R"(
device_types:
  - {name: fast, like: cpu-core, flops: 20 GFLOPS, memory: 8 GiB, memory_bandwidth: 4 GB/s, overhead: 2 us}
  - {name: slow, like: cpu-core, flops: 10 GFLOPS, memory: 4 GiB, memory_bandwidth: 2 GB/s, overhead: 2 us}
  - {name: old, like: cpu-core, flops: 7 GFLOPS, memory: 2 GiB, memory_bandwidth: 1 GB/s, overhead: 2 us}
)";
// A thousandth as fast, for models that are as small.
const char* kSlowTypes = R"(
device_types:
  - {name: fast, like: cpu-core, flops: 20 MFLOPS, memory: 8 GiB, memory_bandwidth: 4 MB/s, overhead: 2 us}
  - {name: slow, like: cpu-core, flops: 10 MFLOPS, memory: 4 GiB, memory_bandwidth: 2 MB/s, overhead: 2 us}
  - {name: old, like: cpu-core, flops: 7 MFLOPS, memory: 2 GiB, memory_bandwidth: 1 MB/s, overhead: 2 us}
)";

Cluster cluster_of(const std::string& groups, const char* types = kTypes) {
  return parse_cluster(groups + types, "test");
}

// The devices of every sub-cluster of unequal ones, in their order.
std::set<std::vector<int>> rows_of(const Cluster& cluster) {
  std::set<std::vector<int>> rows;
  for (const planner::Part& part : planner::unequal_parts(cluster, planner::equal_parts(cluster))) {
    EXPECT_EQ(part.devices.size(), part.shape.kinds.size());
    EXPECT_EQ(static_cast<int>(part.devices.size()), part.shape.size());
    rows.insert(part.devices);
  }
  return rows;
}

TEST(UnequalParts, OfOneMachine) {
  EXPECT_EQ(rows_of(cluster_of("name: m\nlink: {bandwidth: 10 Gbps, latency: 1 us}\n"
                               "devices: [{type: fast, count: 2}, {type: slow, count: 2}]")),
            (std::set<std::vector<int>>{{0, 1, 2, 3}, {2, 3, 0, 1}, {0, 2, 1, 3}}));
  EXPECT_EQ(rows_of(cluster_of("name: m\nlink: {bandwidth: 10 Gbps, latency: 1 us}\n"
                               "devices: [{type: fast, count: 4}]")),
            (std::set<std::vector<int>>{}));
}

TEST(UnequalParts, WhereLinksAreGood) {
  const auto two_sites = [](const char* across) {
    return cluster_of(fmt::format(R"(
name: sites
link: {{bandwidth: {}, latency: 10 us}}
groups:
  - name: site
    count: 2
    link: {{bandwidth: 8 Gbps, latency: 5 us}}
    groups:
      - {{name: a, link: {{bandwidth: 10 Gbps, latency: 5 us}}, devices: [{{type: fast, count: 2}}]}}
      - {{name: b, link: {{bandwidth: 10 Gbps, latency: 5 us}}, devices: [{{type: slow, count: 2}}]}}
)",
                                  across));
  };
  const std::set<std::vector<int>> sites = {{0, 1, 2, 3}, {2, 3, 0, 1}, {0, 2, 1, 3},
                                            {4, 5, 6, 7}, {6, 7, 4, 5}, {4, 6, 5, 7}};
  EXPECT_EQ(rows_of(two_sites("1 Gbps")), sites);
  // All four are one, and too many for all their orders.
  EXPECT_EQ(rows_of(two_sites("8 Gbps")),
            (std::set<std::vector<int>>{{0, 1, 2, 3, 4, 5, 6, 7}, {0, 2, 4, 6, 1, 3, 5, 7}}));
}

// Machines that are alike are nodes; so there may be more than sub-clusters of equal devices.
TEST(UnequalParts, OfAlikeMachines) {
  const Cluster cluster = cluster_of(R"(
name: machines
link: {bandwidth: 1 Gbps, latency: 10 us}
groups:
  - {name: m, count: 6, link: {bandwidth: 80 Gbps, latency: 5 us}, devices: [{type: fast}, {type: slow}]}
)");
  const std::vector<planner::Part> equal = planner::equal_parts(cluster);
  ASSERT_EQ(equal.size(), 12U);
  bool found = false;
  for (const planner::Part& part : planner::unequal_parts(cluster, equal)) {
    if (part.covers.size() != 12) continue;
    found = true;
    EXPECT_EQ(part.shape.nodes, 6);
    EXPECT_EQ(part.shape.devices, 2);
    EXPECT_EQ(part.shape.memory, cluster.types[1].memory);
  }
  EXPECT_TRUE(found);
  const char* model = "mlp:layers=12,hidden=64,in=64,classes=64";
  planner::PlanOptions request;
  request.model = model;
  request.batch = 64;
  request.micro_batches = {8};
  const planner::EngineResult result = plan_pipeline(request, cluster, [&](int64_t samples) {
    return canonicalize(capture(model, samples).graph);
  });
  ASSERT_FALSE(result.candidates.empty()) << result.reason;
  EXPECT_TRUE(check(*result.candidates[0].plan).empty());
}

// Any sites of one to three devices, and any links.
Cluster random_cluster(Rng* rng) {
  const char* types[] = {"fast", "slow", "old"};
  const char* links[] = {"1 Gbps", "10 Gbps", "100 Mbps"};
  std::string text = fmt::format("name: any\nlink: {{bandwidth: {}, latency: 20 us}}\ngroups:\n",
                                 links[rng->below(3)]);
  const auto sites = static_cast<int>(rng->between(1, 2));
  for (int s = 0; s < sites; ++s) {
    text += fmt::format("  - name: site{}\n    link: {{bandwidth: 10 Gbps, latency: 5 us}}\n", s);
    text += "    devices: [";
    for (int i = 0; i < 2; ++i)
      text += fmt::format("{{type: {}, count: {}}}, ", types[rng->below(3)], rng->between(1, 2));
    text += "]\n";
  }
  return cluster_of(text, kSlowTypes);
}

bool unequal(const Cluster& cluster, const std::vector<int>& devices) {
  std::set<int> types;
  for (int d : devices) types.insert(cluster.devices[d].type);
  return types.size() > 1;
}

// Slices that are planned when a plan needs them are as good as all of them planned before; and
// bounds are below.
TEST(StageCosts, LazilyPlannedAsAllPlanned) {
  int searched = 0, straddling = 0;
  const char* model = "mlp:layers=6,hidden=64,in=64,classes=64";
  const Graph graph = canonicalize(capture(model, 8).graph);
  for (uint64_t seed = 0; seed < 40; ++seed) {
    Rng rng(seed);
    const Cluster cluster = random_cluster(&rng);
    const net::Topology topology(cluster);
    planner::PlanOptions request;
    request.model = model;
    request.batch = 64;
    request.threads = 1;
    planner::DeviceGroups groups(cluster);
    std::vector<planner::Part> parts = planner::equal_parts(cluster);
    for (planner::Part& part : planner::unequal_parts(cluster, parts))
      parts.push_back(std::move(part));
    for (const planner::Part& part : parts) {
      pipeline::SearchOptions options;
      options.micro_batches = {8};
      options.pipelines = {1, 2};
      options.shapes = pipeline::Shapes::both;
      const auto search = [&](bool all, Seconds* bound) {
        planner::LayeredGraph layered(
            request, &groups, std::make_shared<const Graph>(graph),
            pipeline::find_layers(graph, {.layers = static_cast<int>(2 + seed % 4)}));
        planner::StageCosts costs(request, &groups, topology, &layered, {&part}, 8);
        if (bound != nullptr) {
          pipeline::SearchOptions bare = options;
          bare.memory_limit = false;
          *bound = pipeline::search(costs.problem(true), bare).objective;
        }
        costs.find_slices(options.pipelines, all);
        pipeline::SearchResult result;
        do {
          result = pipeline::search(costs.problem(false), options);
        } while (costs.plan(result.pool));
        return result;
      };
      Seconds bound = 0;
      const pipeline::SearchResult lazily = search(false, &bound), before = search(true, nullptr);
      ASSERT_EQ(lazily.feasible, before.feasible);
      if (!lazily.feasible) continue;
      ++searched;
      EXPECT_EQ(lazily.objective, before.objective) << seed;
      EXPECT_LE(bound, lazily.objective * (1 + 1e-12)) << seed;
      for (const pipeline::Stage& stage : lazily.best.stages)
        straddling += unequal(cluster, devices_of(part, stage.mesh));
    }
  }
  EXPECT_GT(searched, 120);
  EXPECT_GT(straddling, 20);
}

// What the engine returns for them, stages in unequal devices among it, computes what one device
// does.
TEST(UnequalStages, EqualOneDevice) {
  int plans = 0;
  for (const char* model :
       {"mlp:layers=3,hidden=24,in=10,classes=7", "gpt:layers=1,hidden=16,heads=4,seq=6,vocab=11"})
    for (uint64_t seed = 0; seed < 20; ++seed) {
      Rng rng(seed);
      const Cluster cluster = random_cluster(&rng);
      planner::PlanOptions request;
      request.model = model;
      request.batch = 16;
      request.micro_batches = {4};
      request.layers = static_cast<int>(rng.between(2, 3));
      request.threads = 1;
      const planner::EngineResult result = plan_pipeline(request, cluster, [&](int64_t samples) {
        return canonicalize(capture(model, samples).graph);
      });
      ASSERT_FALSE(result.candidates.empty()) << result.reason;
      for (const planner::Candidate& c : result.candidates) {
        const Plan* plan = c.plan.get();
        bool mixed = false;
        for (const ReplicaPlan& replica : plan->pipeline->replicas)
          for (const StagePlan& stage : replica.stages)
            mixed = mixed || unequal(cluster, stage.devices);
        if (!mixed) continue;
        ++plans;
        ASSERT_TRUE(check(*plan).empty()) << check(*plan)[0];
        const Verification v = verify_plan(*plan, DType::f64, 3);
        EXPECT_LT(v.loss_error, 1e-9) << model << " " << seed;
        EXPECT_LT(v.gradient_error, 1e-9) << model << " " << seed << " at " << v.worst_parameter;
      }
    }
  EXPECT_GT(plans, 20);
}

// One stage a site, on all its devices.
TEST(UnequalStages, AreChosenWhereTheyPay) {
  const Cluster cluster = cluster_of(R"(
name: sites
link: {bandwidth: 1 Gbps, latency: 100 us}
groups:
  - {name: one, link: {bandwidth: 80 Gbps, latency: 5 us}, devices: [{type: fast}, {type: slow}]}
  - {name: two, link: {bandwidth: 80 Gbps, latency: 5 us}, devices: [{type: fast}, {type: slow}]}
)");
  const char* model = "mlp:layers=8,hidden=512,in=512,classes=512";
  planner::PlanOptions request;
  request.model = model;
  request.batch = 1024;
  request.micro_batches = {128};
  request.layers = 2;
  const planner::EngineResult result = plan_pipeline(request, cluster, [&](int64_t samples) {
    return canonicalize(capture(model, samples).graph);
  });
  ASSERT_FALSE(result.candidates.empty()) << result.reason;
  const PipelinePlan& best = *result.candidates[0].plan->pipeline;
  ASSERT_EQ(best.stages(), 2) << result.candidates[0].note;
  for (const StagePlan& stage : best.replicas[0].stages) {
    EXPECT_TRUE(unequal(cluster, stage.devices)) << result.candidates[0].note;
    EXPECT_GT(stage.ratios[0], 1.3 * stage.ratios[1]);  // by speed, not even
  }
  EXPECT_NE(result.candidates[0].note.find("x(1+1)"), std::string::npos)
      << result.candidates[0].note;
}

}  // namespace
}  // namespace motley
