// The pipeline engine by measured layers and at automatic granularity, on captured models.
#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <set>

#include "capture/capture.h"
#include "cost/parts.h"
#include "graph/canonical.h"
#include "planner/calibrated.h"
#include "planner/compose.h"
#include "planner/engines.h"
#include "planner/joint_placement.h"
#include "planner/shape.h"
#include "sim/simulate.h"

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

planner::PlanOptions request_of(const std::string& model) {
  planner::PlanOptions request;
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
  planner::PlanOptions request = request_of(kModel);
  request.layers = 25;
  // What the model says of every layer on one device, as if it had been measured, `second` so many
  // times slower.
  const auto measured = [&](double slower) {
    std::vector<ProfiledStage> stages;
    planner::DeviceGroups groups(cluster);
    planner::PlanBuilder builder(request, &groups, step_of(request, graph_of), 4, request.layers);
    const planner::LayerShapes shapes(request, cluster, graph_of);
    EXPECT_LE(shapes.shapes.size(), 5U);  // equal layers once
    for (const auto& shape : shapes.shapes)
      for (int l = 0; l < builder.size(); ++l) {
        if (!builder.layer_theory(l) ||
            planner::shape_of(builder.layer_theory(l)->graph()) != shape.shape)
          continue;
        const auto& cost = builder.layer_cost(l, groups.of({0}), 8, false);
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
    planner::PlanOptions with = request;
    with.measured = std::move(stages);
    const Cluster right =
        with.measured.empty() ? cluster : planner::corrected(cluster, with, graph_of);
    planner::EngineResult result = plan_pipeline(with, right, graph_of);
    for (planner::Candidate& c : result.candidates)
      if (c.plan->pipeline->replicas.size() == 1 && c.plan->pipeline->stages() == 2)
        return std::move(c.plan);
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

Cluster equal_devices(int count) {
  return parse_cluster(fmt::format(R"(
name: equal
link: {{bandwidth: 10 Gbps, latency: 10 us}}
devices: [{{type: same, count: {}}}]
device_types:
  - {{name: same, like: cpu-core, flops: 20 GFLOPS, memory: 8 GiB, memory_bandwidth: 4 GB/s, overhead: 2 us}}
)",
                                   count),
                       "equal");
}

// Layers that two devices ran together count as measured, in the search, too.
TEST(MeasuredStages, OnSubMeshes) {
  const Cluster cluster = equal_devices(2);
  const char* model = "mlp:layers=3,hidden=256,in=256,classes=256";
  const planner::GraphOf graph_of = graphs_of(model);
  planner::PlanOptions request = request_of(model);
  const planner::LayerShapes shapes(request, cluster, graph_of);
  int together = 0;
  for (const auto& shape : shapes.shapes) {
    if (shape.devices.empty()) continue;
    ++together;
    EXPECT_EQ(shape.devices, (std::vector<int>{0, 1}));
    EXPECT_EQ(shape.nodes, 1);
    EXPECT_TRUE(check(*shape.theory, shape.program).empty());
    request.measured.push_back({shape.shape, model, "same", 4, 100, 200, 0, 2, 1});
  }
  EXPECT_EQ(together, 1);
  planner::DeviceGroups groups(cluster);
  planner::PlanBuilder builder(request, &groups, step_of(request, graph_of), 4, request.layers);
  Seconds forward = 0, backward = 0;
  for (int l = 0; l < builder.size(); ++l) {
    const auto& cost = builder.layer_cost(l, groups.of({0, 1}), 8, false);
    forward += cost.seconds.forward;
    backward += cost.seconds.backward;
    EXPECT_LT(builder.layer_cost(l, groups.of({0}), 8, false).seconds.forward, 1);
  }
  EXPECT_NEAR(forward, 100, 1e-6);
  EXPECT_NEAR(backward, 200, 1e-6);
  const planner::EngineResult result = plan_pipeline(request, cluster, graph_of);
  ASSERT_FALSE(result.candidates.empty());
  for (const planner::Candidate& c : result.candidates)
    for (const StagePlan& stage : c.plan->pipeline->replicas[0].stages)
      EXPECT_EQ(stage.devices.size(), 1U);
}

// Devices that a slow link joins to faster ones are left out; on a fast link they are not.
TEST(SubClusters, AreLeftOutWhereLinksAreSlow) {
  const auto cluster_with = [](const char* bandwidth) {
    return parse_cluster(fmt::format(R"(
name: far
link: {{bandwidth: {}, latency: 10 us}}
groups:
  - {{name: near, link: {{bandwidth: 100 Gbps, latency: 5 us}}, devices: [{{type: first, count: 2}}]}}
  - {{name: far, link: {{bandwidth: 100 Gbps, latency: 5 us}}, devices: [{{type: second, count: 2}}]}}
device_types:
  - {{name: first, like: cpu-core, flops: 20 GFLOPS, memory: 8 GiB, memory_bandwidth: 4 GB/s, overhead: 2 us}}
  - {{name: second, like: cpu-core, flops: 10 GFLOPS, memory: 8 GiB, memory_bandwidth: 2 GB/s, overhead: 2 us}}
)",
                                     bandwidth),
                         "far");
  };
  const planner::GraphOf graph_of = graphs_of(kModel);
  planner::PlanOptions request = request_of(kModel);
  const auto used = [](const Plan& plan) {
    std::set<int> devices;
    for (const ReplicaPlan& replica : plan.pipeline->replicas)
      for (const StagePlan& stage : replica.stages)
        devices.insert(stage.devices.begin(), stage.devices.end());
    return devices;
  };
  const planner::EngineResult slow = plan_pipeline(request, cluster_with("1 Mbps"), graph_of),
                              fast = plan_pipeline(request, cluster_with("100 Gbps"), graph_of);
  ASSERT_FALSE(slow.candidates.empty());
  ASSERT_FALSE(fast.candidates.empty());
  EXPECT_EQ(used(*slow.candidates[0].plan), (std::set<int>{0, 1}));
  EXPECT_NE(slow.candidates[0].note.find("on 2 of 4 devices"), std::string::npos)
      << slow.candidates[0].note;
  EXPECT_TRUE(check(*slow.candidates[0].plan, false).empty());
  EXPECT_EQ(used(*fast.candidates[0].plan).size(), 4U);
  EXPECT_LT(fast.candidates[0].plan->predicted_step_s, slow.candidates[0].plan->predicted_step_s);
}

// Devices behind slow links are left out one after another where sub-clusters are many.
TEST(SubClusters, AreLeftOutOneByOne) {
  const Cluster cluster = parse_cluster(R"(
name: fringe
link: {bandwidth: 200 kbps, latency: 10 us}
groups:
  - name: all but one
    link: {bandwidth: 1 Mbps, latency: 10 us}
    groups:
      - name: near
        link: {bandwidth: 5 Gbps, latency: 5 us}
        groups:
          - name: nearer
            link: {bandwidth: 20 Gbps, latency: 5 us}
            groups:
              - {name: a, link: {bandwidth: 100 Gbps, latency: 5 us}, devices: [{type: a, count: 2}]}
              - {name: b, link: {bandwidth: 100 Gbps, latency: 5 us}, devices: [{type: b}]}
          - {name: c, link: {bandwidth: 100 Gbps, latency: 5 us}, devices: [{type: c}]}
      - {name: d, link: {bandwidth: 100 Gbps, latency: 5 us}, devices: [{type: d}]}
  - {name: e, link: {bandwidth: 100 Gbps, latency: 5 us}, devices: [{type: e}]}
device_types:
  - {name: a, like: cpu-core, flops: 20 GFLOPS, memory: 8 GiB, memory_bandwidth: 4 GB/s, overhead: 2 us}
  - {name: b, like: cpu-core, flops: 19 GFLOPS, memory: 8 GiB, memory_bandwidth: 4 GB/s, overhead: 2 us}
  - {name: c, like: cpu-core, flops: 18 GFLOPS, memory: 8 GiB, memory_bandwidth: 4 GB/s, overhead: 2 us}
  - {name: d, like: cpu-core, flops: 2 GFLOPS, memory: 8 GiB, memory_bandwidth: 1 GB/s, overhead: 2 us}
  - {name: e, like: cpu-core, flops: 2 GFLOPS, memory: 8 GiB, memory_bandwidth: 1 GB/s, overhead: 2 us}
)",
                                        "fringe");
  const char* model = "mlp:layers=24,hidden=256,in=2,classes=2";
  const planner::EngineResult result = plan_pipeline(request_of(model), cluster, graphs_of(model));
  ASSERT_FALSE(result.candidates.empty());
  EXPECT_NE(result.candidates[0].note.find("on 4 of 6 devices"), std::string::npos)
      << result.candidates[0].note;
  EXPECT_TRUE(check(*result.candidates[0].plan, false).empty());
  for (const StagePlan& stage : result.candidates[0].plan->pipeline->replicas[0].stages)
    EXPECT_LT(stage.devices[0], 4) << result.candidates[0].note;
}

// Where memory is short, a stage is planned with room for the micro-batches in flight that a slow
// link asks for, if the choice says so: with parameters cut there is room for more of them.
TEST(Stages, HaveRoomForWhatTheyHold) {
  const char* model = "mlp:layers=8,hidden=128,in=128,classes=128";
  int faster = 0;
  for (int memory = 6000; memory > 1600; memory -= 100) {
    const Cluster cluster = parse_cluster(fmt::format(R"(
name: sites
link: {{bandwidth: 300 Mbps, latency: 10 us}}
groups:
  - {{name: near, link: {{bandwidth: 100 Gbps, latency: 5 us}}, devices: [{{type: core, count: 2}}]}}
  - {{name: far, link: {{bandwidth: 100 Gbps, latency: 5 us}}, devices: [{{type: core, count: 2}}]}}
device_types:
  - {{name: core, like: cpu-core, flops: 20 GFLOPS, memory: {} KiB, memory_bandwidth: 4 GB/s, overhead: 2 us}}
)",
                                                      memory),
                                          "sites");
    planner::DeviceGroups groups(cluster);
    planner::PlanOptions request = request_of(model);
    request.batch = 2048;
    request.recompute = false;
    planner::PlanBuilder builder(request, &groups, step_of(request, graphs_of(model)), 64, 0);
    planner::Composition composition;
    composition.micro_batch = 64;
    planner::ReplicaChoice replica;
    replica.micro_batches = 32;
    const int half = builder.size() / 2;
    replica.stages = {{0, half - 1, {0, 1}}, {half, builder.size() - 1, {2, 3}}};
    composition.replicas = {replica};
    std::string reason;
    const auto plain = builder.compose(composition, "pipeline", &reason);
    composition.replicas[0].stages[0].in_flight = 4;
    const auto roomy = builder.compose(composition, "pipeline", &reason);
    ASSERT_EQ(plain == nullptr, roomy == nullptr) << memory << " KiB: " << reason;
    if (!plain) continue;
    EXPECT_TRUE(check(*roomy).empty()) << memory;
    faster += roomy->pipeline->replicas[0].stages[0].warm_up >
                  plain->pipeline->replicas[0].stages[0].warm_up &&
              roomy->predicted_step_s < 0.95 * plain->predicted_step_s;
  }
  EXPECT_GT(faster, 0);
}

// What one stage sends to another crosses the link between them once, however many devices need all
// of it.
TEST(Messages, CrossALinkOnce) {
  const Cluster cluster = parse_cluster(R"(
name: sites
link: {bandwidth: 1 Gbps, latency: 100 us}
groups:
  - {name: near, link: {bandwidth: 100 Gbps, latency: 5 us}, devices: [{type: core, count: 4}]}
  - {name: far, link: {bandwidth: 100 Gbps, latency: 5 us}, devices: [{type: core, count: 4}]}
device_types:
  - {name: core, like: cpu-core, flops: 20 GFLOPS, memory: 8 GiB, memory_bandwidth: 4 GB/s, overhead: 2 us}
)",
                                        "sites");
  planner::DeviceGroups groups(cluster);
  for (const char* model : {"gpt:layers=4,hidden=64,heads=4,seq=16,vocab=50",
                            "mlp:layers=6,hidden=256,in=256,classes=64"})
    for (int samples : {1, 2, 4}) {
      planner::PlanOptions request = request_of(model);
      planner::PlanBuilder builder(request, &groups, step_of(request, graphs_of(model)), samples,
                                   0);
      planner::Composition composition;
      composition.micro_batch = samples;
      planner::ReplicaChoice replica;
      replica.micro_batches = static_cast<int>(request.batch / samples);
      const int half = builder.size() / 2;
      replica.stages = {{0, half - 1, {0, 1, 2, 3}}, {half, builder.size() - 1, {4, 5, 6, 7}}};
      composition.replicas = {replica};
      std::string reason;
      const auto plan = builder.compose(composition, "pipeline", &reason);
      ASSERT_TRUE(plan) << reason;
      EXPECT_TRUE(check(*plan).empty());
      Bytes expected = 0, sent = 0;
      for (const Transfer& t : plan->pipeline->parts().transfers)
        expected += static_cast<Bytes>(plan->pipeline->part().graph.spec(t.value).bytes());
      for (const Exchange& exchange : simulate(*plan).exchanges)
        if (exchange.what.starts_with("stage 0 to 1") || exchange.what.starts_with("stage 1 to 0"))
          sent += exchange.bytes;
      EXPECT_GT(sent, 0);
      EXPECT_NEAR(sent, expected, 1e-6 * expected) << model << ", " << samples;
      // Gradients of a parameter of both once in each direction.
      Bytes tied = 0, exchanged = 0;
      for (const Tied& t : plan->pipeline->parts().tied)
        tied += static_cast<Bytes>(
            plan->graph->spec(plan->graph->parameters[t.parameter].gradient).bytes());
      for (const Exchange& exchange : simulate(*plan).exchanges)
        if (exchange.what.starts_with("gradients of tied")) exchanged += exchange.bytes;
      EXPECT_EQ(tied > 0, std::string(model).starts_with("gpt"));
      EXPECT_NEAR(exchanged, 2 * tied, 1e-6 * tied) << model << ", " << samples;
    }
}

// The steps of a program, given to layers, are all there.
TEST(LayerCosts, AddUpToTheProgram) {
  const Cluster cluster = equal_devices(4);
  planner::DeviceGroups groups(cluster);
  for (const char* model :
       {"mlp:layers=9,hidden=64,in=32,classes=16", "convnet:width=8,image=8,classes=5",
        "bert:layers=3,hidden=32,heads=4,seq=8,vocab=50",
        "gpt:layers=8,hidden=32,heads=4,seq=8,vocab=50"})
    for (const auto& devices : std::vector<std::vector<int>>{{0}, {0, 1, 2}, {0, 1, 2, 3}})
      for (bool lean : {false, true}) {
        planner::PlanOptions request = request_of(model);
        planner::PlanBuilder builder(request, &groups, step_of(request, graphs_of(model)), 4, 0);
        const planner::DeviceGroups::Kind& group = groups.of(devices);
        for (const auto& window : builder.windows()) {
          const auto planned = builder.plan_window(window, group, 8, lean);
          if (!planned.feasible) continue;
          const Shares shares(planned.ratios);
          const Fractions fractions(group.cluster, shares);
          const auto parts =
              part_costs(*window.theory, planned.program, group.model, fractions, request.optimizer,
                         window.part_of, window.end - window.first);
          const PhaseSeconds all = phase_seconds(*window.theory, planned.program, group.model,
                                                 fractions, request.optimizer);
          const MemoryCost memory =
              memory_of(*window.theory, planned.program, fractions, 1, request.optimizer, true);
          PartCost sum;
          for (const PartCost& part : parts) {
            sum.seconds.forward += part.seconds.forward;
            sum.seconds.backward += part.seconds.backward;
            sum.seconds.reduction += part.seconds.reduction;
            sum.seconds.update += part.seconds.update;
            sum.state += part.state;
            sum.held += part.held;
            EXPECT_LE(part.workspace, memory.peak[0] * (1 + 1e-9));
          }
          const std::string where =
              fmt::format("{} on {} devices, lean {}", model, devices.size(), lean);
          EXPECT_NEAR(sum.seconds.forward, all.forward, 1e-9 * all.forward) << where;
          EXPECT_NEAR(sum.seconds.backward, all.backward, 1e-9 * all.backward) << where;
          EXPECT_NEAR(sum.seconds.reduction, all.reduction, 1e-9 * all.reduction) << where;
          EXPECT_NEAR(sum.seconds.update, all.update, 1e-9 * all.update) << where;
          EXPECT_NEAR(sum.held, memory.held[0], 1e-6 * memory.held[0]) << where;
          // What several layers read counts in each.
          EXPECT_GE(sum.state, (memory.state[0] + memory.sums[0]) * (1 - 1e-9)) << where;
          EXPECT_LE(sum.state, 1.5 * (memory.state[0] + memory.sums[0])) << where;
        }
      }
}

// The layers of a deep model, of which few stretches are planned, cost together what the program of
// the whole model does; no communication between them is forgotten where a micro-batch has fewer
// samples than a mesh has devices.
TEST(LayerCosts, CostWhatTheWholeModelDoes) {
  const Cluster cluster = equal_devices(8);
  planner::DeviceGroups groups(cluster);
  const std::string model = "gpt:layers=12,hidden=128,heads=4,seq=32,vocab=200";
  const planner::PlanOptions request = request_of(model);
  for (int samples : {2, 16}) {
    planner::PlanBuilder builder(request, &groups, step_of(request, graphs_of(model)), samples, 0);
    EXPECT_GT(builder.size(), 40);
    ASSERT_EQ(builder.windows().size(), 2U);
    size_t planned_nodes = 0;
    for (const auto& window : builder.windows())
      planned_nodes += window.theory->graph().nodes.size();
    EXPECT_LT(planned_nodes, 0.7 * static_cast<double>(builder.graph().nodes.size()));
    planner::PlanBuilder::Window whole;
    whole.theory = std::make_unique<Theory>(builder.graph());
    for (const auto& devices :
         std::vector<std::vector<int>>{{0}, {0, 1, 2, 3}, {0, 1, 2, 3, 4, 5, 6, 7}}) {
      const planner::DeviceGroups::Kind& group = groups.of(devices);
      Seconds sum = 0;
      for (int l = 0; l < builder.size(); ++l) {
        const auto& cost = builder.layer_cost(l, group, 8, false);
        ASSERT_TRUE(cost.feasible);
        sum += cost.seconds.forward + cost.seconds.backward;
      }
      const auto planned = builder.plan_window(whole, group, 8, false);
      ASSERT_TRUE(planned.feasible);
      const Shares shares(planned.ratios);
      const PhaseSeconds all = phase_seconds(*whole.theory, planned.program, group.model,
                                             Fractions(group.cluster, shares), request.optimizer);
      EXPECT_NEAR(sum, all.forward + all.backward, 0.1 * (all.forward + all.backward))
          << samples << " samples on " << devices.size();
    }
  }
}

TEST(MeasuredStages, OfOtherModelsChangeNothing) {
  const Cluster cluster = pair_of(3);
  planner::PlanOptions request = request_of(kModel);
  request.measured = {{"0123456789abcdef", "other", "second", 4, 1, 1, 0}};
  EXPECT_EQ(to_yaml(planner::corrected(cluster, request, graphs_of(kModel))), to_yaml(cluster));
}

// Two pipelines, each of two stages on a node of its own: what crosses the nodes are gradients over
// replicas. Numbered jointly with what stages send inside, replicas share nodes.
TEST(JointPlacement, PipelinesWithReplicasGain) {
  const std::string model = "mlp:layers=6,hidden=2048,in=2048";
  const Cluster cluster = load_cluster("amp-v100x16");
  planner::PlanOptions request;
  request.model = model;
  request.batch = 64;
  planner::DeviceGroups groups(cluster);
  planner::PlanBuilder builder(request, &groups, step_of(request, graphs_of(model)), 16, 0);
  const int half = builder.size() / 2;
  planner::Composition composition;
  composition.micro_batch = 16;
  for (int r = 0; r < 2; ++r) {
    planner::ReplicaChoice replica;
    replica.micro_batches = 2;
    for (int s = 0; s < 2; ++s) {
      planner::StageChoice stage{
          s * half, s == 0 ? half - 1 : builder.size() - 1, {}, planner::Again::never};
      for (int i = 0; i < 4; ++i) stage.devices.push_back(8 * r + 4 * s + i);
      replica.stages.push_back(std::move(stage));
    }
    composition.replicas.push_back(std::move(replica));
  }
  std::string reason;
  const auto before = builder.compose(composition, "pipeline", &reason);
  ASSERT_TRUE(before) << reason;
  std::vector<int> all(cluster.size());
  std::iota(all.begin(), all.end(), 0);
  ASSERT_TRUE(planner::place_jointly(cluster, {all}, *before, &composition));
  const auto after = builder.compose(composition, "pipeline", &reason);
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
    planner::PlanOptions request = request_of(model);
    request.layers = layers;
    planner::EngineResult result = plan_pipeline(request, cluster, graphs_of(model));
    EXPECT_FALSE(result.candidates.empty());
    return std::pair(result.candidates[0].plan->predicted_step_s,
                     layers_in(result.candidates[0].note));
  };
  // Alike: a few layers are halved as well as all 128.
  const std::string deep = "mlp:layers=127,hidden=256,in=256,classes=256";
  const auto few = plan(deep, pair_of(1), planner::kAutomaticLayers),
             all = plan(deep, pair_of(1), 128);
  EXPECT_LE(few.second, 70);
  EXPECT_GE(all.second, 100);
  EXPECT_LE(few.first, 1.01 * all.first);
  // Unequal: a split of few layers is off by up to half a layer.
  const auto coarse = plan(kModel, pair_of(2), 8),
             fine = plan(kModel, pair_of(2), planner::kAutomaticLayers);
  EXPECT_GT(fine.second, coarse.second);
  EXPECT_LE(fine.first, coarse.first);
}

// Stages whose graphs are the same but for names have one theory, which is that of each.
TEST(AlikeStages, ShareTheirTheory) {
  int alike = 0;
  for (const std::string model : {"gpt:layers=6,hidden=32,heads=2,seq=16,vocab=32", "bert-moe",
                                  "mlp:layers=8,hidden=16,in=16,classes=16"}) {
    const Graph graph = canonicalize(capture(model, 8).graph);
    PipelinePlan pipeline;
    pipeline.micro_batch = 4;
    pipeline.take_parts(Theory(graph), 8, model);
    pipeline::LayerOptions options;
    options.layers = 8;
    const pipeline::Layers layers = find_layers(pipeline.part().graph, options);
    pipeline.stage_of.assign(pipeline.part().graph.nodes.size(), 0);
    for (size_t l = 0; l < layers.layers.size(); ++l)
      for (const auto* nodes : {&layers.layers[l].forward, &layers.layers[l].backward})
        for (const NodeId n : *nodes) pipeline.stage_of[n.index] = static_cast<int>(l);
    pipeline.cut(static_cast<int>(layers.layers.size()), model);
    for (int s = 0; s < pipeline.stages(); ++s) {
      alike += pipeline.like(s) < s;
      const Graph& own = pipeline.graph(s);
      EXPECT_TRUE(same_but_for_names(pipeline.graph(pipeline.like(s)), own));
      const Theory &theory = pipeline.theory(s), fresh(own);
      EXPECT_EQ(&theory.graph(), &own);
      EXPECT_EQ(theory.pure_gradients(), fresh.pure_gradients());
      for (int64_t v = 0; v < static_cast<int64_t>(own.values.size()); ++v)
        EXPECT_EQ(theory.factors(ValueId(v)), fresh.factors(ValueId(v)));
      for (int64_t n = 0; n < static_cast<int64_t>(own.nodes.size()); ++n) {
        const auto &triples = theory.triples(NodeId(n)), &others = fresh.triples(NodeId(n));
        ASSERT_EQ(theory.table(NodeId(n)), fresh.table(NodeId(n)));
        ASSERT_EQ(triples.size(), others.size());
        for (size_t t = 0; t < triples.size(); ++t)
          EXPECT_EQ(to_string(triples[t]), to_string(others[t]));
      }
    }
  }
  EXPECT_GE(alike, 8);
}

// What makes graphs differ.
TEST(AlikeStages, OnlyNamesMayDiffer) {
  const char* text = R"(%0 = motley::input("x") : f32[6,4]
%1 = motley::parameter("w") : f32[4,10]
%2 = motley::constant([0.5]) : f32[]
%3 = aten::mm(%0, %1) : f32[6,10]
%4 = aten::mul.Tensor(%3, %2) : f32[6,10]
%5 = aten::sum(%4) : f32[]
loss %5
)";
  const auto same = [&](const std::string& from, const std::string& to) {
    std::string other = text;
    if (!from.empty()) other.replace(other.find(from), from.size(), to);
    return same_but_for_names(parse_graph(text, "one"), parse_graph(other, "other"));
  };
  EXPECT_TRUE(same("", ""));
  EXPECT_TRUE(same("\"w\"", "\"v\""));
  EXPECT_TRUE(same("\"x\"", "\"%12\""));
  EXPECT_FALSE(same("[0.5]", "[0.25]"));
  EXPECT_FALSE(same("mul.Tensor", "add.Tensor"));
  EXPECT_FALSE(same("%4 = aten::mul.Tensor(%3, %2)", "%4 = aten::mul.Tensor(%3, 0.5)"));
  EXPECT_FALSE(same("loss %5\n", ""));
  EXPECT_FALSE(same("loss %5\n", "loss %5\nfrozen \"w\"\n"));
  EXPECT_FALSE(same(" : f32[6,4]", " : f64[6,4]"));
}

}  // namespace
}  // namespace motley
