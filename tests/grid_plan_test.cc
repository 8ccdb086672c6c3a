// Plans of the grid: what its choices make of captured models.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <set>

#include "capture/capture.h"
#include "core/error.h"
#include "graph/canonical.h"
#include "graph/precision.h"
#include "grid/calibration.h"
#include "planner/engines.h"
#include "planner/grid_model.h"
#include "runtime/trainer.h"
#include "runtime/verify.h"
#include "sim/simulate.h"

namespace motley {
namespace {

using ::testing::HasSubstr;

planner::GraphOf graphs_of(const std::string& model, DType precision = DType::f32) {
  return [=](int64_t samples) {
    Graph graph = canonicalize(capture(model, samples).graph);
    return precision == DType::f32 ? graph : with_precision(graph, precision);
  };
}

// Devices of these memories on a switch.
Cluster devices_of(const std::vector<Bytes>& memories, BytesPerSecond bandwidth = 10e9) {
  std::vector<DeviceType> types;
  std::vector<int> counts;
  for (Bytes memory : memories) {
    if (types.empty() || types.back().memory != memory) {
      types.push_back(device_catalogue().back());
      types.back().name = fmt::format("device-{}", types.size());
      types.back().memory = memory;
      counts.push_back(0);
    }
    ++counts.back();
  }
  return flat_cluster(types, counts, {LinkKind::switched, bandwidth, 1e-6});
}

// The best plan; null and the reason.
std::unique_ptr<Plan> planned(const std::string& model, const Cluster& cluster, int64_t batch,
                              const std::string& fix, std::string* reason = nullptr) {
  planner::PlanOptions request;
  request.model = model;
  request.batch = batch;
  request.recompute = false;
  planner::EngineResult result =
      plan_grid(request, cluster, graphs_of(model), grid::parse_fixed(fix));
  if (reason != nullptr) *reason = result.reason;
  return result.candidates.empty() ? nullptr : std::move(result.candidates[0].plan);
}

Bytes most(const Plan& plan) {
  return *std::max_element(plan.peak_memory_bytes.begin(), plan.peak_memory_bytes.end());
}

const char* kModel = "mlp:layers=6,hidden=256,in=256,classes=16";

// Of each level the memory is taken away that it needs; the next one is found, fits, and is sound.
TEST(GridPlans, ReplicasDivideStateWhereMemoryIsShort) {
  auto on = [&](Bytes memory, const std::string& zero) {
    return planned(kModel, devices_of(std::vector<Bytes>(4, memory)), 4096,
                   "pp=1,dp=4,tp=1,mbs=1024" + zero);
  };
  Bytes memory = 1e12;
  for (int level : {0, 1}) {
    const auto plan = on(memory, fmt::format(",zero={}", level));
    ASSERT_TRUE(plan) << level;
    EXPECT_EQ(plan->pipeline->level(0), level);
    memory = most(*plan) - 1024;
    EXPECT_FALSE(on(memory, fmt::format(",zero={}", level)));
    const auto next = on(memory, "");
    ASSERT_TRUE(next) << "nothing fits without level " << level;
    EXPECT_EQ(next->pipeline->level(0), level + 1);
    EXPECT_LE(most(*next), memory);
    const Plan read = parse_plan(to_json(*next).dump(), "plan");
    EXPECT_TRUE(check(read).empty());
    EXPECT_EQ(simulate(read).step, next->predicted_step_s);
    EXPECT_THAT(describe(read), HasSubstr(fmt::format("level {}", level + 1)));
    const Verification v = verify_plan(read);
    EXPECT_TRUE(v.equivalent) << v.gradient_error << " " << v.worst_parameter;
  }
}

// What is left without parameters is taken away: the devices of a stage divide them.
TEST(GridPlans, StagesDivideParametersWhereMemoryIsShort) {
  auto on = [&](Bytes memory, const std::string& zero, std::string* reason = nullptr) {
    return planned(kModel, devices_of(std::vector<Bytes>(4, memory)), 16384,
                   "pp=1,dp=4,tp=1,mbs=1024" + zero, reason);
  };
  const auto ample = on(1e12, ",zero=2");
  ASSERT_TRUE(ample);
  const Bytes memory = most(*ample) - 1024;
  EXPECT_FALSE(on(memory, ",zero=2"));
  const auto fixed = on(memory, ",zero=3");
  std::string reason;
  const auto plan = on(memory, "", &reason);
  ASSERT_TRUE(fixed && plan) << reason;
  EXPECT_EQ(plan->predicted_step_s, fixed->predicted_step_s);
  EXPECT_LT(most(*plan), memory - 0.4 * static_cast<Bytes>(plan->graph->parameter_bytes()));
  ASSERT_EQ(plan->pipeline->replicas.size(), 1u);
  EXPECT_EQ(plan->pipeline->replicas[0].micro_batches, 4);
  const Program& program = plan->pipeline->replicas[0].stages[0].program;
  int gathers = 0, scatters = 0;
  for (const Step& step : program.steps) {
    gathers += step.again && step.kind == Collective::all_gather;
    scatters += step.each && step.kind == Collective::reduce_scatter;
  }
  EXPECT_GE(gathers, 5);
  EXPECT_GE(scatters, 5);
  const Plan read = parse_plan(to_json(*plan).dump(), "plan");
  EXPECT_TRUE(check(read).empty());
  EXPECT_EQ(simulate(read).step, plan->predicted_step_s);
  EXPECT_THAT(describe(read), HasSubstr("level 3"));
  const Verification v = verify_plan(read);
  EXPECT_TRUE(v.equivalent) << v.gradient_error << " " << v.worst_parameter;
  // Gathering in every pass is what it costs.
  const auto whole = on(1e12, ",zero=0");
  ASSERT_TRUE(whole);
  EXPECT_GT(plan->predicted_step_s, whole->predicted_step_s);
}

// Pipelines whose stages divide parameters, on devices of two kinds.
TEST(GridPlans, StagesOfPipelinesDivideParameters) {
  const Cluster cluster = devices_of({1e12, 1e12, 2e12, 2e12});
  for (const char* fix : {"pp=2,dp=2,tp=1,mbs=512,zero=3", "pp=1,dp=2,tp=2,mbs=512,zero=3"}) {
    const auto plan = planned(kModel, cluster, 2048, fix);
    ASSERT_TRUE(plan) << fix;
    EXPECT_TRUE(check(*plan).empty());
    for (const StagePlan& stage : plan->pipeline->replicas[0].stages)
      EXPECT_TRUE(std::any_of(stage.program.steps.begin(), stage.program.steps.end(),
                              [](const Step& step) { return step.each; }));
    EXPECT_TRUE(verify_plan(*plan).equivalent) << fix;
  }
}

// In 16 bits also the conversions of parameters run again.
TEST(GridPlans, StagesDivideParametersOfMixedPrecision) {
  planner::PlanOptions request;
  request.model = kModel;
  request.batch = 2048;
  const Cluster cluster = devices_of({1e12, 1e12, 1e12, 1e12});
  planner::EngineResult result =
      plan_grid(request, cluster, graphs_of(kModel, DType::bf16),
                grid::parse_fixed("pp=1,dp=4,tp=1,mbs=256,recompute=none,zero=3"));
  ASSERT_FALSE(result.candidates.empty()) << result.reason;
  Plan& plan = *result.candidates[0].plan;
  plan.precision = DType::bf16;
  EXPECT_TRUE(check(plan).empty());
  int converted = 0, gathered = 0;
  for (const Step& step : plan.pipeline->replicas[0].stages[0].program.steps) {
    converted += step.again && step.is_compute();
    gathered += step.again && !step.is_compute();
  }
  EXPECT_GE(converted, 5);
  EXPECT_GE(gathered, 5);
  const Verification v = verify_plan(plan);
  EXPECT_TRUE(v.equivalent) << v.gradient_error << " " << v.worst_parameter;
}

// Where memory is no matter, replicas divide the optimizer's work if that is faster.
TEST(GridPlans, ReplicasDivideStateWhereThatIsFaster) {
  const Cluster cluster = devices_of({1e12, 1e12, 1e12, 1e12});
  const std::string fix = "pp=1,dp=4,tp=1,mbs=1";
  const auto whole = planned(kModel, cluster, 4, fix + ",zero=0"),
             free = planned(kModel, cluster, 4, fix);
  ASSERT_TRUE(whole && free);
  EXPECT_EQ(whole->pipeline->level(0), 0);
  EXPECT_EQ(free->pipeline->level(0), 1);
  EXPECT_LT(free->predicted_step_s, 0.95 * whole->predicted_step_s);
}

// Devices with less memory take less of the state: equal shares would not fit.
TEST(GridPlans, SharesFollowTheRoomThatDevicesHave) {
  const std::string fix = "pp=1,dp=2,tp=1,mbs=4,zero=1";
  const auto ample = planned(kModel, devices_of({1e12, 1e12}), 16, fix);
  ASSERT_TRUE(ample);
  EXPECT_TRUE(ample->pipeline->zero[0].shares.empty());
  const Bytes need = most(*ample);
  const auto plan = planned(kModel, devices_of({0.9 * need, 1.2 * need}), 16, fix);
  ASSERT_TRUE(plan);
  const std::vector<double> shares = plan->pipeline->zero[0].shares;
  ASSERT_EQ(shares.size(), 2u);
  EXPECT_LT(shares[0], 0.4);
  EXPECT_TRUE(check(*plan).empty());
  EXPECT_TRUE(verify_plan(*plan).equivalent);
  Plan equal = parse_plan(to_json(*plan).dump(), "plan");
  equal.pipeline->zero[0].shares.clear();
  ASSERT_FALSE(check(equal).empty());
  EXPECT_THAT(check(equal)[0], HasSubstr("needs"));
}

// The best plan of the grid and its strategy in words.
std::pair<double, std::string> best_of(const std::string& model, const Cluster& cluster,
                                       int64_t batch, const std::string& fix) {
  planner::PlanOptions request;
  request.model = model;
  request.batch = batch;
  planner::EngineResult result =
      plan_grid(request, cluster, graphs_of(model), grid::parse_fixed(fix));
  if (result.candidates.empty()) return {std::numeric_limits<double>::infinity(), result.reason};
  EXPECT_TRUE(check(*result.candidates[0].plan).empty());
  EXPECT_TRUE(verify_plan(*result.candidates[0].plan).equivalent);
  return {result.candidates[0].plan->predicted_step_s, result.candidates[0].note};
}

// Stages may be fixed in blocks of the model, however finely it is cut.
TEST(GridPlans, LayersCountBlocks) {
  const auto plan = planned("gpt:layers=6,hidden=32,heads=4,seq=8,vocab=50",
                            devices_of({1e12, 1e12, 1e12}), 6, "pp=3,dp=1,tp=1,mbs=1,layers=1/3/2");
  ASSERT_TRUE(plan);
  EXPECT_TRUE(check(*plan).empty());
  const PipelinePlan& pipeline = *plan->pipeline;
  ASSERT_EQ(pipeline.stages(), 3);
  const std::vector<std::set<std::string>> expected = {
      {"block0"}, {"block1", "block2", "block3"}, {"block4", "block5"}};
  for (int s = 0; s < 3; ++s) {
    std::set<std::string> blocks;
    for (const Parameter& p : pipeline.graph(s).parameters)
      if (p.name.starts_with("block")) blocks.insert(p.name.substr(0, p.name.find('.')));
    EXPECT_EQ(blocks, expected[s]) << s;
  }
}

// The trials of other systems are predicted with 20 kernels a block of GPT (bench/trials/sets.cc). The
// graph has 22: PyTorch adds the four biases in their products, and models that train drop out twice.
TEST(GridPlans, KernelsOfABlockAreThoseOfTheTrials) {
  planner::PlanOptions request;
  request.batch = 8;
  const Cluster cluster = devices_of({16e9});
  planner::DeviceGroups groups(cluster);
  double kernels[2] = {};
  for (int more : {0, 1}) {
    const auto graph = std::make_shared<const Graph>(
        graphs_of(fmt::format("gpt:layers={},hidden=64,heads=4,seq=32,vocab=64", 3 + more))(8));
    const planner::LayeredGraph layered(request, &groups, graph,
                                        pipeline::find_layers(*graph, {.layers = 64}));
    for (const grid::Layer& layer : planner::grid_model(layered, 8).layers)
      kernels[more] += layer.kernels;
  }
  constexpr int biases = 4, dropouts = 2;
  EXPECT_EQ(kernels[1] - kernels[0] - biases + dropouts, 20);
}

// As simulations do (Backends.SumsOfSixteenBitsArePricedAsTheyTravel): gloo adds them as f32.
TEST(GridPlans, SearchesPriceSumsOfSixteenBitsAsTheyTravel) {
  planner::PlanOptions request;
  request.batch = 8;
  const auto plain =
      std::make_shared<const Graph>(graphs_of("gpt:layers=3,hidden=64,heads=4,seq=32,vocab=64")(8));
  const auto half = std::make_shared<const Graph>(with_precision(*plain, DType::bf16));
  const auto reduced = [&](const std::shared_ptr<const Graph>& graph, const char* backend) {
    Cluster cluster = devices_of({16e9, 16e9});
    cluster.groups[0].backend = backend_named(backend);
    planner::DeviceGroups groups(cluster);
    const planner::LayeredGraph layered(request, &groups, graph,
                                        pipeline::find_layers(*graph, {.layers = 64}));
    return planner::estimator_of(planner::grid_model(layered, 8), cluster).reduced_at_end({});
  };
  EXPECT_EQ(reduced(half, "nccl"), 2);
  EXPECT_EQ(reduced(half, "gloo"), 4);
  for (const char* backend : {"nccl", "gloo"}) EXPECT_EQ(reduced(plain, backend), 4);
}

// What Sailor measured of OPT-350 on nodes of 4 GH200 (tests/data/sailor/runs.csv, the fullest device),
// less the driver and NCCL's communicators, which plans leave to `reserved`: pipelines, replicas and
// tensor parallelism, each alone and together.
TEST(GridPlans, HoldAboutWhatPublishedRunsHeld) {
  struct Run {
    const char* fix;
    int nodes, batch, communicators;
    Bytes measured;
  };
  constexpr Run kRuns[] = {
      {"pp=1,dp=1,tp=4,mbs=1", 1, 32, 3, 9805234176},
      {"pp=1,dp=2,tp=4,mbs=2", 2, 32, 4, 12540968960},
      {"pp=2,dp=1,tp=4,mbs=8,layers=11/13", 2, 32, 4, 26942111744},
      {"pp=2,dp=2,tp=4,mbs=1,layers=11/13", 4, 64, 5, 7976517632},
      {"pp=4,dp=1,tp=4,mbs=1,layers=4/7/7/6", 4, 64, 4, 7358906368},
      {"pp=4,dp=2,tp=4,mbs=8,layers=4/7/7/6", 8, 512, 5, 25248661504},
  };
  double off = 0;
  for (const Run& run : kRuns) {
    const Cluster cluster = parse_cluster(
        fmt::format("link: {{bandwidth: 92 GB/s}}\ngroups: [{{count: {}, link: {{bandwidth: 125 "
                    "GB/s}}, devices: [{{type: GH200, count: 4}}]}}]",
                    run.nodes),
        "gh200");
    std::string reason;
    const auto plan = planned("gpt:layers=24,hidden=1024,heads=16,seq=2048,vocab=50688", cluster,
                              run.batch, run.fix, &reason);
    ASSERT_TRUE(plan) << run.fix << ": " << reason;
    const grid::Rates rates =
        grid::default_calibration(cluster, grid::fp32_adam()).types.at("GH200");
    const Bytes held =
        run.measured - rates.context - run.communicators * rates.channels * grid::kChannelBytes;
    // Launched as those runs were: 1F1B, gradients of weights not later than others.
    PipelinePlan& pipeline = *plan->pipeline;
    for (ReplicaPlan& replica : pipeline.replicas)
      for (int k = 0; k < pipeline.stages(); ++k) {
        StagePlan& stage = replica.stages[k];
        stage.program.steps.change([](std::vector<Step>& steps) {
          for (Step& step : steps) step.later = false;
        });
        stage.program = phase_ordered(pipeline.theory(k), stage.program);
        stage.warm_up = std::min(replica.micro_batches, pipeline.stages() - k);
        stage.weights_behind = 0;
      }
    EXPECT_TRUE(check(*plan, false).empty()) << check(*plan, false)[0];
    plan->peak_memory_bytes = pipeline_memory(pipeline, plan->cluster, plan->optimizer);
    const double error = most(*plan) / held - 1;
    EXPECT_LT(std::abs(error), 0.35) << run.fix;
    RecordProperty(run.fix, fmt::format("{:.3f}", error));
    off += std::abs(error) / std::size(kRuns);
  }
  EXPECT_LT(off, 0.15);
  RecordProperty("mean", fmt::format("{:.3f}", off));
}

// One long sequence, few heads: where neither samples nor heads go round, the sequence does.
TEST(GridPlans, LongSequencesAreCutWhereThatPays) {
  const std::string model = "gpt:layers=2,hidden=64,heads=2,seq=512,vocab=64";
  const Cluster cluster = devices_of({1e12, 1e12, 1e12, 1e12});
  const auto free = best_of(model, cluster, 1, ""),
             without = best_of(model, cluster, 1, "cp=1,ep=1");
  EXPECT_THAT(free.second, HasSubstr("cp="));
  EXPECT_LT(free.first, 0.9 * without.first) << free.second << " / " << without.second;
}

// Experts hold most parameters, and their gradients need not cross where devices divide them.
TEST(GridPlans, ExpertsAreDividedWhereThatPays) {
  const std::string model = "bert-moe:layers=2,hidden=64,heads=1,experts=8,every=1,seq=16,vocab=64";
  const Cluster cluster = devices_of({1e12, 1e12, 1e12, 1e12}, 1e9);
  const auto free = best_of(model, cluster, 8, ""),
             without = best_of(model, cluster, 8, "cp=1,ep=1");
  EXPECT_THAT(free.second, HasSubstr("ep="));
  EXPECT_LT(free.first, 0.9 * without.first) << free.second << " / " << without.second;
}

TEST(GridPlans, LevelsThatReplicasHaveNotAreRefused) {
  const Cluster cluster = devices_of({1e12, 1e12});
  // Unequal numbers of micro-batches cannot meet in every backward pass.
  std::string reason;
  for (const char* zero : {"2", "3"})
    EXPECT_FALSE(
        planned(kModel, cluster, 3, fmt::format("pp=1,dp=2,tp=1,mbs=1,zero={}", zero), &reason));
  EXPECT_TRUE(planned(kModel, cluster, 3, "pp=1,dp=2,tp=1,mbs=1,zero=1"));
}

}  // namespace
}  // namespace motley
