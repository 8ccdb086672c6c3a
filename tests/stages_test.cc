// The pipeline engine by measured layers and at automatic granularity, on captured models.
#include <gtest/gtest.h>

#include <map>
#include <numeric>

#include "auto/engines.h"
#include "graph/canonical.h"
#include "torch/capture.h"

namespace motley {
namespace {

// Two devices, the second `slower` times slower than the first.
Cluster pair_of(double slower) {
  return parse_cluster(fmt::format(R"(
name: pair
link: {{bandwidth: 10 Gbps, latency: 10 us}}
devices: [{{type: first}}, {{type: second}}]
device_types:
  - {{name: first, like: cpu-core, flops: 20 GFLOPS, memory: 8 GiB, memory_bandwidth: 4 GB/s, overhead: 2 us}}
  - {{name: second, like: cpu-core, flops: {} GFLOPS, memory: 8 GiB, memory_bandwidth: {} GB/s, overhead: {} us}}
)",
                                   20 / slower, 4 / slower, 2 * slower),
                       "pair");
}

planner::GraphOf graphs_of(const std::string& model) {
  return [model](int64_t samples) { return canonicalize(capture(model, samples).graph); };
}

planner::Request request_of(const std::string& model) {
  planner::Request request;
  request.model = model;
  request.batch = 32;
  request.micro_batches = {4};
  return request;
}

// Forward nodes in the stages on each device.
std::map<int, int> nodes_on(const Plan& plan) {
  std::map<int, int> nodes;
  for (const StagePlan& stage : plan.pipeline->replicas[0].stages) {
    const auto s = static_cast<int>(&stage - plan.pipeline->replicas[0].stages.data());
    for (const Node& node : plan.pipeline->graph(s).nodes)
      if (!is_source(node) && node.phase == Phase::forward) ++nodes[stage.devices[0]];
  }
  return nodes;
}

const char* kModel = "mlp:layers=24,hidden=256,in=256,classes=256";

TEST(MeasuredStages, SlowLayersMoveAway) {
  const Cluster cluster = pair_of(1);
  const planner::GraphOf graph_of = graphs_of(kModel);
  planner::Request request = request_of(kModel);
  request.layers = 25;
  // What the model says of every layer on one device, as if it had been measured, `second` so many
  // times slower.
  const auto measured = [&](double slower) {
    std::vector<ProfiledStage> stages;
    planner::DeviceGroups groups(cluster);
    planner::Workbench bench(request, &groups, graph_of(4), request.layers);
    const planner::LayerShapes shapes(request, cluster, graph_of);
    EXPECT_LE(shapes.shapes.size(), 5U);  // equal layers once
    for (const auto& shape : shapes.shapes)
      for (int l = 0; l < bench.size(); ++l) {
        if (!bench.layer_theory(l) ||
            planner::shape_of(bench.layer_theory(l)->graph()) != shape.shape)
          continue;
        const auto& cost = bench.layer_cost(l, groups.of({0}), 8, false);
        for (const char* type : {"first", "second"}) {
          const double factor = type == std::string("second") ? slower : 1;
          stages.push_back({shape.shape, kModel, type, 4, factor * cost.seconds.forward,
                            factor * cost.seconds.backward, 0});
        }
        break;
      }
    return stages;
  };
  const auto plan_with = [&](std::vector<ProfiledStage> stages) {
    planner::Request with = request;
    with.measured = std::move(stages);
    const Cluster right =
        with.measured.empty() ? cluster : planner::corrected(cluster, with, graph_of);
    planner::EngineResult result = plan_pipeline(with, right, graph_of);
    for (auto& plan : result.plans)
      if (plan->pipeline->replicas.size() == 1 && plan->pipeline->stages() == 2)
        return std::move(plan);
    return std::unique_ptr<Plan>();
  };
  const auto plain = plan_with({}), same = plan_with(measured(1)), slow = plan_with(measured(2));
  ASSERT_TRUE(plain && same && slow);
  const auto before = nodes_on(*plain), equal = nodes_on(*same), after = nodes_on(*slow);
  EXPECT_EQ(before, equal);
  EXPECT_NEAR(before.at(0), before.at(1), 8);
  // Two thirds of the layers on the first.
  EXPECT_NEAR(after.at(0), 2 * after.at(1), 12);
  EXPECT_GT(after.at(0), before.at(0) + 8);
  // The plan knows: it is as slow as measured.
  EXPECT_GT(slow->predicted_step_s, 1.2 * plain->predicted_step_s);
  EXPECT_NEAR(same->predicted_step_s, plain->predicted_step_s, 0.02 * plain->predicted_step_s);
}

TEST(MeasuredStages, OfOtherModelsChangeNothing) {
  const Cluster cluster = pair_of(3);
  planner::Request request = request_of(kModel);
  request.measured = {{"0123456789abcdef", "other", "second", 4, 1, 1, 0}};
  EXPECT_EQ(to_yaml(planner::corrected(cluster, request, graphs_of(kModel))), to_yaml(cluster));
}

// Two pipelines, each of two stages on a node of its own: what crosses the nodes are gradients over
// replicas. Numbered jointly with what stages send inside, replicas share nodes.
TEST(JointPlacement, PipelinesWithReplicasGain) {
  const std::string model = "mlp:layers=6,hidden=2048,in=2048";
  const Cluster cluster = load_cluster("amp-v100x16");
  planner::Request request;
  request.model = model;
  request.batch = 64;
  planner::DeviceGroups groups(cluster);
  planner::Workbench bench(request, &groups, graphs_of(model)(16), 0);
  const int half = bench.size() / 2;
  planner::Composition composition;
  composition.micro_batch = 16;
  for (int r = 0; r < 2; ++r) {
    planner::ReplicaChoice replica;
    replica.micro_batches = 2;
    for (int s = 0; s < 2; ++s) {
      planner::StageChoice stage{s * half, s == 0 ? half - 1 : bench.size() - 1, {}, false};
      for (int i = 0; i < 4; ++i) stage.devices.push_back(8 * r + 4 * s + i);
      replica.stages.push_back(std::move(stage));
    }
    composition.replicas.push_back(std::move(replica));
  }
  std::string reason;
  const auto before = bench.compose(composition, "pipeline", &reason);
  ASSERT_TRUE(before) << reason;
  std::vector<int> all(cluster.size());
  std::iota(all.begin(), all.end(), 0);
  ASSERT_TRUE(planner::place_jointly(cluster, {all}, *before, &composition));
  const auto after = bench.compose(composition, "pipeline", &reason);
  ASSERT_TRUE(after) << reason;
  EXPECT_TRUE(check(*after).empty());
  EXPECT_LT(after->predicted_step_s, 0.9 * before->predicted_step_s);
}

// "micro-batches of 4, 1 pipeline, 25 layers in stages of 17x1 8x1": 25.
int layers_in(const std::string& note) {
  const size_t end = note.find(" layers in");
  return std::stoi(note.substr(note.rfind(' ', end - 1) + 1));
}

TEST(Granularity, GetsFinerUntilNothingIsGained) {
  const auto plan = [&](const std::string& model, const Cluster& cluster, int layers) {
    planner::Request request = request_of(model);
    request.layers = layers;
    planner::EngineResult result = plan_pipeline(request, cluster, graphs_of(model));
    EXPECT_FALSE(result.plans.empty());
    return std::pair(result.plans[0]->predicted_step_s, layers_in(result.notes[0]));
  };
  // Alike: a few layers are halved as well as all 128.
  const std::string deep = "mlp:layers=127,hidden=256,in=256,classes=256";
  const auto few = plan(deep, pair_of(1), planner::kAutomaticLayers),
             all = plan(deep, pair_of(1), 128);
  EXPECT_LE(few.second, 70);
  EXPECT_GE(all.second, 100);
  EXPECT_LE(few.first, 1.01 * all.first);
  // Unequal: a split of few layers is off by up to half a layer.
  const auto coarse = plan(kModel, pair_of(2.3), 8),
             fine = plan(kModel, pair_of(2.3), planner::kAutomaticLayers);
  EXPECT_GT(fine.second, coarse.second);
  EXPECT_LE(fine.first, coarse.first);
}

}  // namespace
}  // namespace motley
