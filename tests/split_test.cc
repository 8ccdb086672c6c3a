// Stages that share devices, and those that split their backward passes: checked, and the latter
// planned and run. Random ones of both are among those of pipeline_test.cc.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "capture/capture.h"
#include "graph/canonical.h"
#include "planner/planner.h"
#include "random_pipeline.h"
#include "runtime/verify.h"
#include "sim/simulate.h"

namespace motley {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Stages that share devices are refused where they cannot be run, with one line that says why.
TEST(Pipeline, SharingIsChecked) {
  RandomPipeline what = {"mlp:layers=4,hidden=12,in=10,classes=7", 5};
  what.plain = true, what.split = false;
  Rng rng(3);
  Plan plan = random_pipeline(what, &rng);
  while (plan.pipeline->stages() != 4) plan = random_pipeline(what, &rng);
  ReplicaPlan& replica = plan.pipeline->replicas[0];
  replica.micro_batches = 4;
  fit_batch(&plan);
  auto set = [&](const std::vector<int>& of, const std::vector<int>& counts) {
    for (int s = 0; s < 4; ++s) {
      replica.stages[s].devices = {of[s]};
      replica.stages[s].warm_up = counts[s];
    }
    const auto problems = check(plan, false);
    return problems.empty() ? std::string() : problems[0];
  };
  EXPECT_EQ(set({0, 1, 0, 1}, {5, 3, 5, 3}), "");
  EXPECT_EQ(in_flight(replica, 0), 4);  // two, two of stage 2, a third; a backward pass of stage 2
  EXPECT_EQ(in_flight(replica, 2), 2);
  EXPECT_NE(set({0, 1, 0, 1}, {1, 1, 1, 1}).find("wait for ever"), std::string::npos);
  EXPECT_NE(set({0, 1, 0, 1}, {5, 3, 4, 3}).find("4 warm-up passes, and 5"), std::string::npos);
  EXPECT_NE(set({0, 1, 2, 3}, {1, 2, 1, 1}).find("may not rise"), std::string::npos);
  EXPECT_EQ(set({0, 1, 2, 0}, {8, 8, 8, 8}), "");
  const Plan again = parse_plan(to_json(plan).dump(), "plan");
  EXPECT_EQ(to_json(again).dump(), to_json(plan).dump());
}

TEST(Split, IsChecked) {
  RandomPipeline what = {"mlp:layers=4,hidden=12,in=10,classes=7", 5};
  what.plain = true, what.split = false;
  Rng rng(3);
  Plan plan = random_pipeline(what, &rng);
  while (plan.pipeline->stages() != 4) plan = random_pipeline(what, &rng);
  ReplicaPlan& replica = plan.pipeline->replicas[0];
  replica.micro_batches = 4;
  fit_batch(&plan);
  StagePlan& stage = replica.stages[1];
  stage.program = weights_later(plan.pipeline->theory(1), stage.program);
  ASSERT_TRUE(has_later(stage.program));
  auto problem = [&](const std::vector<int>& devices) {
    for (int s = 0; s < 4; ++s) {
      replica.stages[s].devices = {devices[s]};
      replica.stages[s].warm_up = 4;
    }
    const auto problems = check(plan, false);
    return problems.empty() ? std::string() : problems[0];
  };
  EXPECT_EQ(problem({0, 1, 2, 3}), "");
  EXPECT_THAT(problem({0, 1, 0, 1}),
              HasSubstr("steps say later, and the stage shares its devices"));
  stage.weights_behind = -1;
  EXPECT_THAT(problem({0, 1, 2, 3}), HasSubstr("weights_behind is -1"));
  stage.weights_behind = 0;
  replica.stages[0].weights_behind = 1;
  EXPECT_THAT(problem({0, 1, 2, 3}), HasSubstr("0 where no step says later"));
  replica.stages[0].weights_behind = 0;
  const Program good = stage.program;
  stage.program.steps.change([](std::vector<Step>& steps) {
    for (Step& step : steps) step.later = !step.later;
  });
  EXPECT_THAT(problem({0, 1, 2, 3}), HasSubstr("says later, and is not at the end"));
  // A gradient that the stage before waits for may not come later.
  stage.program = good;
  const Phases phases = phases_of(plan.pipeline->theory(1), good);
  stage.program.steps.change([&](std::vector<Step>& steps) {
    for (int s = phases.backward + 1; s < phases.weights; ++s) steps[s].later = true;
  });
  EXPECT_THAT(problem({0, 1, 2, 3}), HasSubstr("which is handed on"));
}

// Where stages wait, gradients of weights fill the time; the plan is the step of one device.
TEST(Split, IsPlannedWhereItPays) {
  const char* model = "gpt:layers=6,hidden=48,heads=4,seq=16,vocab=64";
  DeviceType type = device_catalogue().back();
  Cluster cluster = flat_cluster({type}, {3}, {LinkKind::switched, 2e8, 1e-5});
  planner::PlanOptions options;
  options.model = model;
  options.batch = 16;
  options.engine = "pipeline";
  const planner::PlanReport report =
      planner::plan([&](int64_t samples) { return canonicalize(capture(model, samples).graph); },
                    cluster, options);
  ASSERT_FALSE(report.candidates.empty()) << report.reason;
  const Plan& plan = *report.best().plan;
  ASSERT_TRUE(plan.pipeline);
  EXPECT_EQ(plan.pipeline->schedule, "zero-bubble");
  EXPECT_THAT(describe(plan), HasSubstr("gradients of weights -, "));
  const Plan read = parse_plan(to_json(plan).dump(), "p.json");
  EXPECT_EQ(to_json(read).dump(), to_json(plan).dump());
  EXPECT_THAT(check(read), IsEmpty());
  EXPECT_NEAR(simulate(read).step, plan.predicted_step_s, 1e-9);
  const Verification v = verify_plan(read, DType::f64, 1);
  EXPECT_LT(v.loss_error, 1e-9);
  EXPECT_LT(v.gradient_error, 1e-9) << v.worst_parameter;
  // Whole backward passes take longer.
  Plan whole = parse_plan(to_json(plan).dump(), "p.json");
  for (StagePlan& stage : whole.pipeline->replicas[0].stages) {
    stage.program.steps.change([](std::vector<Step>& steps) {
      for (Step& step : steps) step.later = false;
    });
    stage.weights_behind = 0;
  }
  EXPECT_GT(simulate(whole).step, 1.005 * plan.predicted_step_s);
}

}  // namespace
}  // namespace motley
