// Programs in several micro-batches whose gradients add up: equal to one device with uneven shares,
// and faster than computing again where memory is short.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "capture/capture.h"
#include "core/error.h"
#include "graph/canonical.h"
#include "graph/op.h"
#include "planner/engines.h"
#include "planner/planner.h"
#include "runtime/verify.h"
#include "sim/simulate.h"

namespace motley {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

planner::GraphOf graphs_of(const std::string& model) {
  return [model](int64_t samples) { return canonicalize(capture(model, samples).graph); };
}

Cluster two_and_two(Bytes memory) {
  return parse_cluster(fmt::format(R"(name: four
device_types:
  - {{name: fast, flops: 4e12, memory: {0}, memory_bandwidth: 400e9, overhead: 1e-7}}
  - {{name: slow, flops: 1e12, memory: {0}, memory_bandwidth: 200e9, overhead: 1e-7}}
link: {{bandwidth: 100e9, latency: 1e-7}}
groups:
  - {{name: a, link: {{bandwidth: 100e9, latency: 1e-7}}, devices: [{{type: fast, count: 2}}, {{type: slow, count: 2}}]}}
)",
                                   static_cast<int64_t>(memory)),
                       "four");
}

TEST(Opponents, WhatOneDeviceDoesNotComputeSaysSo) {
  planner::PlanOptions options;
  options.model = "resnet50:width=4,image=32";
  options.batch = 16;
  int others = 0, same = 0;
  for (const planner::StrategyTime& o :
       plan_opponents(options, two_and_two(1e12), graphs_of(options.model)).baselines) {
    const bool micro_batches = o.name.starts_with("megatron");
    ASSERT_TRUE(o.feasible) << o.name << ": " << o.reason;
    EXPECT_EQ(o.knobs.find("normalises by micro-batch") != std::string::npos, micro_batches)
        << o.name << ": " << o.knobs;
    ++(micro_batches ? others : same);
  }
  EXPECT_EQ(others, 2);
  EXPECT_GT(same, 2);
}

// Micro-batches of them compute something else; data parallelism does not, and is there at once.
TEST(Quick, ModelsThatMixSamplesHaveAPlan) {
  planner::PlanOptions options;
  options.model = "resnet50:width=4,image=32";
  options.batch = 16;
  options.optimizer = Optimizer::sgd;
  for (const Bytes memory : {1e12, 3.4e6}) {
    const planner::EngineResult found =
        plan_quickly(options, two_and_two(memory), graphs_of(options.model));
    ASSERT_EQ(found.candidates.size(), 2) << found.reason;
    for (const planner::Candidate& c : found.candidates) {
      EXPECT_THAT(c.note, HasSubstr(memory > 1e9 ? "dp-cp on " : "zero-cp on "));
      EXPECT_TRUE(planner::exact(*c.plan));
      EXPECT_EQ(c.plan->pipeline->micro_batches(), 1);
      EXPECT_THAT(check(*c.plan), IsEmpty());
      const Verification v = verify_plan(*c.plan, DType::f64, 5);
      EXPECT_LT(v.loss_error, 1e-9) << c.note;
      EXPECT_LT(v.gradient_error, 1e-9) << c.note << " at " << v.worst_parameter;
    }
  }
}

TEST(Accumulation, EqualsOneDeviceAndComputesNothingAgain) {
  int uneven = 0, faster = 0;
  for (const char* model :
       {"gpt:layers=3,hidden=32,heads=4,seq=16,vocab=19", "mlp:layers=6,hidden=128,in=10,classes=7",
        "vit:layers=3,hidden=32,heads=4,image=16,patch=4,classes=5"}) {
    planner::PlanOptions options;
    options.model = model;
    options.batch = 64;
    options.engine = "spmd";
    options.optimizer = Optimizer::sgd;
    const planner::PlanReport ample = plan(graphs_of(model), two_and_two(1e12), options);
    ASSERT_FALSE(ample.candidates.empty()) << model;
    const std::vector<Bytes>& peaks = ample.best().plan->peak_memory_bytes;
    const Cluster cluster = two_and_two(0.7 * *std::max_element(peaks.begin(), peaks.end()));

    const planner::EngineResult in_one_pass = plan_one_program(options, cluster, graphs_of(model));
    const planner::EngineResult found = plan_accumulated(options, cluster, graphs_of(model),
                                                         std::numeric_limits<double>::infinity());
    ASSERT_FALSE(found.candidates.empty()) << model << ": " << found.reason;
    for (const planner::Candidate& c : found.candidates) {
      const Plan& made = *c.plan;
      EXPECT_THAT(check(made), IsEmpty()) << model;
      ASSERT_NE(made.pipeline, nullptr);
      EXPECT_EQ(made.pipeline->stages(), 1);
      EXPECT_GT(made.pipeline->micro_batches(), 1);
      EXPECT_THAT(c.note, HasSubstr("micro-batches of"));
      for (int d = 0; d < cluster.size(); ++d)
        EXPECT_LE(made.peak_memory_bytes[d], cluster.type_of(d).memory) << model;
      const std::vector<double>& ratios = made.pipeline->replicas[0].stages[0].ratios;
      uneven += ratios.front() > 1.2 * ratios.back();
      const Verification v = verify_plan(made, DType::f64, 5);
      EXPECT_LT(v.loss_error, 1e-9) << model;
      EXPECT_LT(v.gradient_error, 1e-9) << model << " at " << v.worst_parameter;
    }
    faster +=
        in_one_pass.candidates.empty() || found.candidates[0].plan->predicted_step_s <
                                              in_one_pass.candidates[0].plan->predicted_step_s;

    // It is a candidate of the engine, and nothing slower than what is known is looked for.
    const planner::PlanReport all = plan(graphs_of(model), cluster, options);
    ASSERT_FALSE(all.candidates.empty());
    EXPECT_LE(all.best().plan->predicted_step_s,
              found.candidates[0].plan->predicted_step_s * (1 + 1e-9));
    const planner::EngineResult none = plan_accumulated(
        options, cluster, graphs_of(model), 0.5 * found.candidates[0].plan->predicted_step_s);
    for (const planner::Candidate& c : none.candidates)
      EXPECT_LT(c.plan->predicted_step_s, 0.5 * found.candidates[0].plan->predicted_step_s);
    EXPECT_LE(none.planned, found.planned);
  }
  EXPECT_GT(uneven, 0);
  EXPECT_GT(faster, 0);
}

// Where latency counts, gradients share long messages at the end of the step, as the plan says.
TEST(Accumulation, SendsGradientsInMessagesOfPlannedSizes) {
  planner::PlanOptions options;
  options.model = "mlp:layers=6,hidden=288,in=10,classes=7";
  options.batch = 16;
  options.engine = "spmd";
  options.micro_batches = {8};
  options.strategy = "dp-ev";
  Cluster cluster = two_and_two(1e12);
  for (Group& group : cluster.groups) group.link.latency = 1e-2;
  planner::EngineResult found = plan_accumulated(options, cluster, graphs_of(options.model),
                                                 std::numeric_limits<double>::infinity());
  ASSERT_FALSE(found.candidates.empty()) << found.reason;
  Plan& made = *found.candidates[0].plan;
  Program& program = made.pipeline->replicas[0].stages[0].program;
  EXPECT_GT(program.sizes.alone, GradientSizes().alone);
  EXPECT_THAT(check(made), IsEmpty());
  const Plan read = parse_plan(to_json(made).dump(), "plan");
  EXPECT_EQ(read.pipeline->replicas[0].stages[0].program.sizes, program.sizes);
  const Verification v = verify_plan(made, DType::f64, 5);
  EXPECT_LT(v.loss_error, 1e-9);
  EXPECT_LT(v.gradient_error, 1e-9) << v.worst_parameter;
  program.sizes = {};
  EXPECT_GT(simulate(made).step, 2 * made.predicted_step_s);
}

// Batch normalisation of a part of the batch is not that of one device: who asks for one program gets
// no micro-batches of it, unless he says how large they are.
TEST(Accumulation, NormalisesNoPartOfABatchUnasked) {
  planner::PlanOptions options;
  options.model = "resnet50:width=2,image=16,classes=5";
  options.batch = 16;
  options.engine = "spmd";
  const Seconds any = std::numeric_limits<double>::infinity();
  const Cluster cluster = two_and_two(1e12);
  EXPECT_THAT(plan_accumulated(options, cluster, graphs_of(options.model), any).candidates,
              IsEmpty());
  options.micro_batches = {8};
  EXPECT_FALSE(
      plan_accumulated(options, cluster, graphs_of(options.model), any).candidates.empty());
}

// Whatever operators take there: the usual strategies are programs with collectives that do nothing.
TEST(OneDevice, HasNoCollectives) {
  std::mt19937 random(3);
  std::uniform_real_distribution<double> exponent(-7, -4);
  for (int trial = 0; trial < 6; ++trial) {
    Cluster cluster = parse_cluster(
        "name: one\nlink: {bandwidth: 1e9, latency: 1e-5}\ndevices: [{type: d, count: 1}]\n"
        "device_types: [{name: d, flops: 1e13, memory: 1e11, memory_bandwidth: 1e12}]\n",
        "one");
    for (const OpDef* op : all_ops())
      cluster.types[0].ops.push_back(
          {op->name, std::pow(10, exponent(random)), 1e13, trial % 2 ? 1e12 : 0});
    planner::PlanOptions options;
    options.model = trial < 3
                        ? "gpt:layers=2,hidden=32,heads=4,seq=16,vocab=19"
                        : "bert-moe:layers=2,hidden=32,heads=4,seq=8,vocab=19,experts=4,every=2";
    options.batch = 8;
    options.engine = "spmd";
    if (trial % 3 == 0) options.precision = DType::bf16;
    const planner::PlanReport report = plan(graphs_of(options.model), cluster, options);
    ASSERT_FALSE(report.candidates.empty());
    const Plan& best = *report.best().plan;
    ASSERT_EQ(best.pipeline, nullptr);
    for (const Step& step : best.program.steps) EXPECT_TRUE(step.is_compute());
  }
}

}  // namespace
}  // namespace motley
