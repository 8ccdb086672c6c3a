// ZeRO in plans as the engines compose them: pipelines with replicas, stages that share devices,
// virtual devices, every level.
#include <gtest/gtest.h>

#include <map>
#include <numeric>

#include "capture/capture.h"
#include "core/rng.h"
#include "counted.h"
#include "graph/canonical.h"
#include "planner/compose.h"
#include "runtime/trainer.h"
#include "runtime/verify.h"

namespace motley {
namespace {

enum class Kind { pipeline, interleaved, virtual_devices };

constexpr int kLayers = 8;

// So many devices of two speeds.
Cluster two_speeds(int devices) {
  DeviceType fast = device_catalogue().back(), slow = fast;
  fast.name = "fast", slow.name = "slow";
  slow.flops /= 2;
  return flat_cluster({fast, slow}, {devices - devices / 2, devices / 2},
                      {LinkKind::switched, 1e9, 1e-5});
}

// Replicas of the same stages, cut anywhere, on any devices; the k-th of virtual devices is the
// k-th replica.
planner::Composition random_composition(Kind kind, int level, int64_t micro_batch, int layers,
                                        int* devices, Rng* rng) {
  const int replicas = static_cast<int>(2 + rng->below(2)),
            groups = kind == Kind::virtual_devices ? 1 : 2,
            stages = kind == Kind::interleaved ? 2 * groups : groups,
            ranks = static_cast<int>((kind == Kind::virtual_devices || level == 3 ? 2 : 1) +
                                     rng->below(2));
  std::vector<int> cuts(layers - 1);
  std::iota(cuts.begin(), cuts.end(), 1);
  for (size_t i = cuts.size(); i > 1; --i)
    std::swap(cuts[i - 1], cuts[rng->below(static_cast<int64_t>(i))]);
  cuts.resize(stages - 1);
  std::sort(cuts.begin(), cuts.end());
  cuts.insert(cuts.begin(), 0);
  cuts.push_back(layers);
  *devices = replicas * groups * ranks;
  std::vector<int> order(*devices);
  std::iota(order.begin(), order.end(), 0);
  if (kind == Kind::pipeline)
    for (size_t i = order.size(); i > 1; --i)
      std::swap(order[i - 1], order[rng->below(static_cast<int64_t>(i))]);
  planner::Composition composition;
  composition.micro_batch = micro_batch;
  composition.zero = level;
  composition.joint = kind == Kind::virtual_devices;
  const int passes = static_cast<int>(1 + rng->below(3));
  for (int r = 0; r < replicas; ++r) {
    planner::ReplicaChoice replica;
    replica.micro_batches = groups * passes;
    for (int s = 0; s < stages; ++s) {
      planner::StageChoice stage{cuts[s], cuts[s + 1] - 1, {}, planner::Again::never};
      for (int i = 0; i < ranks; ++i)
        stage.devices.push_back(kind == Kind::virtual_devices
                                    ? i * replicas + r
                                    : order[(r * groups + s % groups) * ranks + i]);
      replica.stages.push_back(std::move(stage));
    }
    // Level 2 reduces in every backward pass, in which replicas meet.
    if (kind == Kind::pipeline && level != 2)
      replica.micro_batches += static_cast<int>(rng->below(3));
    composition.replicas.push_back(std::move(replica));
  }
  return composition;
}

std::unique_ptr<Plan> random_plan(const std::string& model, Kind kind, int level,
                                  int64_t micro_batch, Rng* rng, std::string* reason) {
  int devices = 0;
  planner::PlanOptions request;
  request.model = model;
  request.memory_limit = false;
  request.threads = 1;
  const auto step_of = [&](int64_t batch) {
    return std::make_shared<planner::BatchStep>(canonicalize(capture(model, batch).graph), batch);
  };
  planner::Composition composition;
  {
    const Cluster one = two_speeds(2);
    planner::DeviceGroups groups(one);
    const planner::PlanBuilder builder(request, &groups, step_of(2 * micro_batch), micro_batch,
                                       kLayers);
    composition = random_composition(kind, level, micro_batch, builder.size(), &devices, rng);
  }
  for (const planner::ReplicaChoice& replica : composition.replicas)
    request.batch += composition.micro_batch * replica.micro_batches;
  const Cluster cluster = two_speeds(devices);
  planner::DeviceGroups groups(cluster);
  planner::PlanBuilder builder(request, &groups, step_of(request.batch), micro_batch, kLayers);
  const char* engine = kind == Kind::virtual_devices ? "virtual" : "pipeline";
  return builder.compose(composition, engine, reason);
}

TEST(Zero, ComposedPlansEqualOneDevice) {
  std::map<std::pair<Kind, int>, int> divided, tied;
  for (const char* model :
       {"gpt:layers=2,hidden=16,heads=4,seq=6,vocab=11",
        "bert:layers=2,hidden=16,heads=4,seq=6,vocab=11", "mlp:layers=5,hidden=256,in=10,classes=7",
        "vit:layers=2,hidden=16,heads=4,image=8,patch=4,classes=5"}) {
    Rng rng(41);
    for (int level : {1, 2, 3})
      for (Kind kind : {Kind::pipeline, Kind::interleaved, Kind::virtual_devices}) {
        if (kind == Kind::virtual_devices && level == 3) continue;  // they know levels up to 2
        std::string reason;
        const auto plan = random_plan(model, kind, level, 4, &rng, &reason);
        ASSERT_TRUE(plan) << model << ": " << reason;
        const std::vector<std::string> problems = check(*plan);
        ASSERT_TRUE(problems.empty()) << model << ": " << problems[0];
        const Verification v = verify_plan(*plan, DType::f64, 3);
        EXPECT_LT(v.loss_error, 1e-9) << model << " level " << level;
        EXPECT_LT(v.gradient_error, 1e-9)
            << model << " level " << level << " at " << v.worst_parameter;
        const PipelinePlan& pipeline = *plan->pipeline;
        const bool shared =
            stage_groups(pipeline.replicas[0]).size() < pipeline.replicas[0].stages.size();
        EXPECT_EQ(shared, kind == Kind::interleaved);
        for (int s = 0; s < pipeline.stages(); ++s) {
          int& count = divided[{kind, level}];
          if (level < 3) {
            EXPECT_EQ(pipeline.level(s), level);
            for (const bool part : divided_state(pipeline, s).optimizer) count += part;
          } else {
            for (const Step& step : pipeline.replicas[0].stages[s].program.steps)
              count += step.each || step.again;
          }
        }
        tied[{kind, level}] += static_cast<int>(pipeline.parts().tied.size());
      }
  }
  for (int level : {1, 2, 3})
    for (Kind kind : {Kind::pipeline, Kind::interleaved, Kind::virtual_devices}) {
      if (kind == Kind::virtual_devices && level == 3) continue;
      EXPECT_GT((divided[{kind, level}]), 5) << static_cast<int>(kind) << " level " << level;
      if (kind != Kind::virtual_devices) {
        EXPECT_GT((tied[{kind, level}]), 0) << level;
      }
    }
}

// Between steps devices have as much less as the plan says they save, and gradients nowhere.
TEST(Zero, ComposedPlansHoldWhatTheySay) {
  Rng rng(43);
  for (Kind kind : {Kind::pipeline, Kind::interleaved, Kind::virtual_devices}) {
    std::string reason;
    const auto plan =
        random_plan("mlp:layers=8,hidden=64,in=64,classes=64", kind, 2, 4, &rng, &reason);
    ASSERT_TRUE(plan) << reason;
    PipelinePlan& pipeline = *plan->pipeline;
    std::vector<double> planned[3];
    std::vector<HeldBytes> held[3];
    for (const int level : {0, 1, 2}) {
      for (Division& division : pipeline.zero) division.level = level;
      ASSERT_TRUE(check(*plan).empty()) << check(*plan)[0];
      planned[level] = pipeline_memory(pipeline, plan->cluster, plan->optimizer);
      held[level] = held_by_workers(*plan);
    }
    for (int d = 0; d < plan->cluster.size(); ++d) {
      const double saved = planned[0][d] - planned[1][d];
      EXPECT_GT(saved, 0);
      EXPECT_NEAR(held[0][d].after - held[1][d].after, saved, 0.02 * saved)
          << static_cast<int>(kind) << " device " << d;
      EXPECT_NEAR(held[2][d].after, held[1][d].after, 0.02 * saved)
          << static_cast<int>(kind) << " device " << d;
    }
  }
}

}  // namespace
}  // namespace motley
