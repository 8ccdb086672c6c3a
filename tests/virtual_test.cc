// Plans of virtual devices: equal to one device on machines of every sort, and what they cost.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <set>

#include "capture/capture.h"
#include "core/error.h"
#include "graph/canonical.h"
#include "planner/engines.h"
#include "planner/program_plan.h"
#include "runtime/trainer.h"
#include "runtime/verify.h"
#include "sim/simulate.h"

namespace motley {
namespace {

using planner::plan_virtual;
using planner::virtual_devices;
using ::testing::HasSubstr;

planner::GraphOf graphs_of(const std::string& model) {
  return [model](int64_t samples) { return canonicalize(capture(model, samples).graph); };
}

planner::EngineResult planned(const std::string& model, const Cluster& cluster, int64_t batch,
                              planner::VirtualDevices wanted) {
  planner::PlanOptions request;
  request.model = model;
  request.batch = batch;
  request.optimizer = Optimizer::sgd;
  return plan_virtual(request, cluster, graphs_of(model), wanted);
}

// Machines of 4, 2 and 2 devices of unequal speed, and links slow enough that the choice matters.
Cluster uneven(double outer) {
  return parse_cluster(
      fmt::format(
          "name: uneven\nlink: {{bandwidth: {} GB/s, latency: 20 us}}\ngroups:\n"
          "  - {{name: a, link: {{bandwidth: 100 GB/s}}, devices: [{{type: V100-16GB, "
          "count: 4}}]}}\n"
          "  - {{name: b, link: {{kind: bus, bandwidth: 12 GB/s}}, devices: [{{type: "
          "P100-16GB, count: 2}}]}}\n"
          "  - {{name: c, link: {{bandwidth: 12 GB/s}}, devices: [{{type: T4, count: 2}}]}}\n",
          outer),
      "uneven.yaml");
}

TEST(Virtual, DevicesArePartsOfMachines) {
  const Cluster cluster = uneven(1);
  EXPECT_EQ(virtual_devices(cluster, 2),
            (std::vector<std::vector<int>>{{0, 1}, {2, 3}, {4, 5}, {6, 7}}));
  EXPECT_TRUE(virtual_devices(cluster, 4).empty());
  EXPECT_EQ(virtual_devices(load_cluster("hap-64"), 8).size(), 8u);
}

TEST(Virtual, PlansEqualOneDevice) {
  std::set<bool> jointly;
  int cut = 0, uneven_shares = 0;
  for (const char* model :
       {"gpt:layers=2,hidden=16,heads=4,seq=6,vocab=11",
        "bert:layers=2,hidden=16,heads=4,seq=6,vocab=11", "vgg19:width=2,image=32,classes=5",
        "vit:layers=2,hidden=16,heads=4,image=8,patch=4,classes=5",
        "mlp:layers=3,hidden=64,in=10,classes=7"})
    for (const double outer : {1e-4, 1.0}) {
      const Cluster cluster = uneven(outer);
      const planner::EngineResult found =
          planned(model, cluster, 22, {.automatic = false, .size = 2});
      ASSERT_FALSE(found.candidates.empty()) << model << ": " << found.reason;
      for (const planner::Candidate& c : found.candidates) {
        const Plan* plan = c.plan.get();
        const std::vector<std::string> problems = check(*plan);
        ASSERT_TRUE(problems.empty()) << model << ": " << problems[0];
        EXPECT_NEAR(simulate(*plan).step, plan->predicted_step_s, 1e-12);
        const PipelinePlan& pipeline = *plan->pipeline;
        ASSERT_EQ(pipeline.replicas.size(), 2u);
        const StagePlan& stage = pipeline.replicas[0].stages[0];
        // The first of all virtual devices, or of the faster ones.
        ASSERT_GE(stage.devices.size(), 2u);
        for (size_t i = 0; i < stage.devices.size(); ++i)
          EXPECT_EQ(stage.devices[i], static_cast<int>(2 * i));
        uneven_shares += stage.ratios.front() > 1.2 * stage.ratios.back();
        jointly.insert(joint_gradients(pipeline, 0, plan->reductions, cluster.size()).any());
        const auto stored = stored_placements(pipeline.theory(0), stage.program);
        for (const Parameter& p : pipeline.graph(0).parameters)
          cut += stored[p.value.index].is_shard();
        const Verification v = verify_plan(*plan, DType::f64, 5);
        EXPECT_LT(v.loss_error, 1e-9) << model;
        EXPECT_LT(v.gradient_error, 1e-9) << model << " at " << v.worst_parameter;
        // As a file it is the same plan.
        const Plan again = parse_plan(to_json(*plan).dump(), "plan");
        EXPECT_EQ(again.engine, "virtual");
        EXPECT_EQ(again.reductions, plan->reductions);
      }
    }
  EXPECT_EQ(jointly.size(), 2u);  // with and without
  EXPECT_GT(cut, 0);
  EXPECT_GT(uneven_shares, 0);
}

// Between machines the gradients of a data-parallel step cost what those of one tensor do, however
// many devices a machine has.
// They pay where layers are cut across machines and the batch inside, which one program over all
// devices cannot say.
TEST(Virtual, LayersAreCutAcrossMachines) {
  const Cluster cluster = load_cluster("hap-64");
  const std::string model = "mlp:layers=8,hidden=2048,in=512";
  const planner::EngineResult found =
      planned(model, cluster, 512, {.automatic = false, .machine = true});
  ASSERT_FALSE(found.candidates.empty()) << found.reason;
  planner::ProgramRequest request;
  request.model = model;
  request.batch = 512;
  request.baselines = false;
  request.alternation.optimizer = Optimizer::sgd;
  const planner::ProgramResult all = planner::plan_program(graphs_of(model)(512), cluster, request);
  ASSERT_TRUE(all.feasible) << all.reason;
  EXPECT_LT(simulate(*found.candidates[0].plan).step, 0.5 * simulate(all.plan).step);
}

TEST(Virtual, GradientsCrossBetweenMachinesOnce) {
  const Cluster cluster = load_cluster("hap-64");
  const planner::EngineResult found =
      planned("vit", cluster, 512, {.automatic = false, .machine = true});
  ASSERT_FALSE(found.candidates.empty()) << found.reason;
  const Plan& plan = *found.candidates[0].plan;
  const PipelinePlan& pipeline = *plan.pipeline;
  const JointGradients joint = joint_gradients(pipeline, 0, plan.reductions, cluster.size());
  ASSERT_TRUE(joint.any());
  Plan without = parse_plan(to_json(plan).dump(), "plan");
  std::erase_if(without.reductions,
                [&](const ReductionProgram& r) { return r.devices == devices_of(pipeline, 0); });
  Bytes bytes = 0;
  for (size_t p = 0; p < joint.gradient.size(); ++p)
    if (joint.gradient[p])
      bytes += static_cast<Bytes>(
          pipeline.graph(0).spec(pipeline.graph(0).parameters[p].gradient).bytes());
  // Eight groups side by side, each with all of it, through one port of 1.3 GB/s.
  const Seconds once = 2 * 7. / 8 * bytes / 1.3e9;
  EXPECT_GT(simulate(without).step - simulate(plan).step, 5 * once);
}

// Where a program would be slower than what is known even if it had more memory, none is fitted.
TEST(Virtual, WhatIsSlowIsNotFittedIntoMemory) {
  const std::string model = "mlp:layers=8,hidden=512,in=64";
  Cluster cluster = uneven(1);
  const planner::EngineResult ample = planned(model, cluster, 64, {.automatic = false, .size = 2});
  ASSERT_FALSE(ample.candidates.empty());
  for (DeviceType& type : cluster.types) type.memory = 12e6;
  auto with = [&](Seconds known) {
    return planned(model, cluster, 64, {.automatic = false, .size = 2, .known = known});
  };
  const planner::EngineResult fitted = with(std::numeric_limits<double>::infinity());
  ASSERT_FALSE(fitted.candidates.empty()) << fitted.reason;
  const Seconds step = fitted.candidates[0].plan->predicted_step_s;
  EXPECT_GT(step, ample.candidates[0].plan->predicted_step_s);
  const planner::EngineResult same = with(2 * step);
  ASSERT_FALSE(same.candidates.empty()) << same.reason;
  EXPECT_EQ(same.candidates[0].plan->predicted_step_s, step);
  const planner::EngineResult none = with(0.5 * ample.candidates[0].plan->predicted_step_s);
  EXPECT_TRUE(none.candidates.empty());
  EXPECT_THAT(none.reason, HasSubstr("even with more memory"));
  EXPECT_LT(none.planned, fitted.planned);
}

TEST(Virtual, WhatDoesNotDivideIsSaidInOneLine) {
  const Cluster cluster = uneven(1);
  auto failure = [&](int64_t batch, planner::VirtualDevices wanted) -> std::string {
    try {
      return planned("mlp:layers=2,hidden=16", cluster, batch, wanted).reason;
    } catch (const UserError& e) {
      return e.what();
    }
  };
  EXPECT_THAT(failure(24, {.automatic = false, .size = 4}), HasSubstr("give a divisor of 2"));
  EXPECT_THAT(failure(23, {.automatic = false, .size = 2}), HasSubstr("--batch 23"));
  EXPECT_THAT(failure(23, {.automatic = false, .machine = true}), HasSubstr("give off"));
  EXPECT_THAT(failure(23, {}), HasSubstr("no size divides"));
  const Cluster flat = flat_cluster({device_catalogue()[0]}, {4}, {});
  EXPECT_THAT(plan_virtual({}, flat, graphs_of("mlp"), {}).reason, HasSubstr("joined as well"));
}

}  // namespace
}  // namespace motley
