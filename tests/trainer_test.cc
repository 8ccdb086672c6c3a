// Training by plans on threads of this process: steps, checkpoints, precision; and its data.
#include "runtime/trainer.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <memory>

#include "capture/capture.h"
#include "core/error.h"
#include "core/file.h"
#include "graph/canonical.h"
#include "graph/precision.h"
#include "interpret/dispatch.h"
#include "planner/program_plan.h"
#include "runtime/data.h"
#include "runtime/eager.h"
#include "runtime/verify.h"
#include "uneven.h"

namespace motley {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(TrainerTest, ClippingIsOfTheWholeGradient) {
  const std::string model = "mlp:layers=3,hidden=16,in=12,classes=5";
  TrainOptions options;
  options.clip = 0.05;
  for (Optimizer optimizer : {Optimizer::adamw, Optimizer::sgd}) {
    const Plan alone = plan_of(model, 12, uneven_cluster(1), spmd::Restriction::none, optimizer);
    const std::vector<StepReport> expected = train_on_threads(alone, options, 4);
    for (spmd::Restriction restriction :
         {spmd::Restriction::zero, spmd::Restriction::tensor_parallel,
          spmd::Restriction::data_parallel}) {
      const Plan plan = plan_of(model, 12, uneven_cluster(3), restriction, optimizer);
      bool cut = false;
      for (const Parameter& p : plan.graph->parameters)
        cut = cut || stored_placements(*plan.theory, plan.program)[p.value.index].is_shard();
      EXPECT_EQ(cut, restriction != spmd::Restriction::data_parallel);
      const std::vector<StepReport> steps = train_on_threads(plan, options, 4);
      for (int i = 0; i < 4; ++i) {
        EXPECT_GT(steps[i].gradient_norm, options.clip);
        EXPECT_NEAR(steps[i].gradient_norm, expected[i].gradient_norm,
                    2e-5 * expected[i].gradient_norm);
        EXPECT_NEAR(steps[i].loss, expected[i].loss, 2e-5 * expected[i].loss);
      }
    }
  }
}

TEST(TrainerTest, ACheckpointGoesOnUnderAnotherPlan) {
  const std::string folder = testing::TempDir() + "/motley_checkpoint";
  for (const char* model : {kModels[1], kModels[2]})
    for (Optimizer optimizer : {Optimizer::adamw, Optimizer::sgd}) {
      std::filesystem::remove_all(folder);
      const Plan wide = plan_of(model, 8, uneven_cluster(3), spmd::Restriction::zero, optimizer);
      const Plan other = plan_of(model, 8, uneven_cluster(2), spmd::Restriction::none, optimizer);
      const std::vector<StepReport> expected = train_on_threads(wide, {}, 4);
      TrainOptions options;
      options.checkpoint = folder;
      train_on_threads(wide, options, 2);
      const std::vector<StepReport> steps = train_on_threads(other, options, 2);
      for (int i = 0; i < 2; ++i) {
        EXPECT_EQ(steps[i].step, 2 + i);
        EXPECT_NEAR(steps[i].loss, expected[2 + i].loss, 5e-5 * expected[2 + i].loss) << model;
      }
      const Plan stranger = plan_of(kModels[0], 8, uneven_cluster(1));
      EXPECT_THAT(message_of([&] { train_on_threads(stranger, options, 1); }),
                  AllOf(HasSubstr("is of model"), HasSubstr(kModels[0])));
    }
  std::filesystem::remove_all(folder);
}

TEST(TrainerTest, APlanForAnotherModelIsRefused) {
  Plan plan = plan_of("mlp:layers=2,hidden=8,in=6,classes=5", 4, uneven_cluster(1));
  EXPECT_NO_THROW(graph_of_model(plan));
  plan.model = "mlp:layers=3,hidden=8,in=6,classes=5";
  EXPECT_THAT(message_of([&] { graph_of_model(plan); }),
              AllOf(HasSubstr("a plan for another model"),
                    HasSubstr("mlp:layers=2,hidden=8,in=6,classes=5"),
                    HasSubstr("mlp:layers=3,hidden=8,in=6,classes=5")));
}

// One device computes in the same types, but sums in another order: a product of bf16 is rounded to
// 8 bits, so losses agree to a few thousandths. AdamW, whose first steps are of the size of the
// learning rate whatever the gradient, turns signs of tiny gradients into differences of weights.
TEST(TrainerTest, MixedPrecisionEqualsOneDevice) {
  auto mixed = [](const std::string& model, const Cluster& cluster, spmd::Restriction restriction) {
    planner::ProgramRequest request;
    request.model = model;
    request.batch = 12;
    request.baselines = request.alternation.certify = false;
    request.alternation.restriction = restriction;
    request.alternation.ratios = planner::proportional_ratios(cluster);
    planner::ProgramResult result = planner::plan_program(
        with_precision(canonicalize(capture(model, 12).graph), DType::bf16), cluster, request);
    MOTLEY_CHECK(result.feasible, "{}", result.reason);
    result.plan.precision = DType::bf16;
    return std::move(result.plan);
  };
  for (const char* model : kModels) {
    SCOPED_TRACE(model);
    const Plan alone = mixed(model, uneven_cluster(1), spmd::Restriction::none);
    EXPECT_TRUE(check(alone).empty());
    const std::vector<StepReport> expected = train_on_threads(alone, {}, 4);
    const std::vector<StepReport> full =
        train_on_threads(plan_of(model, 12, uneven_cluster(1)), {}, 4);
    EXPECT_NE(expected[0].loss, full[0].loss);
    for (spmd::Restriction restriction :
         {spmd::Restriction::none, spmd::Restriction::zero, spmd::Restriction::data_parallel}) {
      const Plan plan = mixed(model, uneven_cluster(3), restriction);
      const Plan read = parse_plan(to_json(plan).dump(), "plan");
      EXPECT_EQ(read.precision, DType::bf16);
      EXPECT_TRUE(check(read).empty());
      EXPECT_NO_THROW(graph_of_model(read));
      // Without rounding it is the program of one device to the last digits.
      const Verification exact = verify_plan(read);
      EXPECT_TRUE(exact.equivalent) << exact.loss_error << " " << exact.gradient_error;
      const Verification rounded = verify_plan(read, DType::bf16);
      EXPECT_TRUE(rounded.equivalent)
          << rounded.loss_error << " " << rounded.gradient_error << " " << rounded.worst_parameter;
      const std::vector<StepReport> steps = train_on_threads(read, {}, 4);
      for (int i = 0; i < 4; ++i) {
        EXPECT_NEAR(steps[i].loss, expected[i].loss, 1e-2 * expected[i].loss) << i;
        EXPECT_NEAR(steps[i].loss, full[i].loss, 2e-2 * full[i].loss) << i;
      }
    }
  }
}

// A plan that fits only with blocks computed again runs, file and all, to what one device gets; the
// dropout masks of the second time are those of the first.
TEST(TrainerTest, RecomputedBlocksEqualOneDevice) {
  const std::string model = "gpt:layers=3,hidden=32,heads=4,seq=32,vocab=64,dropout=0.1";
  auto plan_with = [&](Bytes available, bool recompute) {
    Cluster cluster = uneven_cluster(3);
    for (DeviceType& type : cluster.types) type.memory = available;
    planner::ProgramRequest request;
    request.model = model;
    request.batch = 12;
    request.baselines = request.alternation.certify = false;
    request.alternation.recompute = recompute;
    return planner::plan_program(canonicalize(capture(model, 12).graph), cluster, request);
  };
  const planner::ProgramResult free = plan_with(1e10, true);
  ASSERT_TRUE(free.feasible);
  // Too little without computing anything again.
  Bytes memory =
      *std::max_element(free.plan.peak_memory_bytes.begin(), free.plan.peak_memory_bytes.end());
  while (plan_with(memory, false).feasible) memory *= 0.8;
  const planner::ProgramResult lean = plan_with(memory, true);
  ASSERT_TRUE(lean.feasible) << lean.reason;
  const Plan read = parse_plan(to_json(lean.plan).dump(), "plan");
  EXPECT_TRUE(check(read).empty());
  EXPECT_THAT(describe(read), HasSubstr("recomputes"));
  EXPECT_GT(read.predicted_step_s, free.plan.predicted_step_s);
  for (Bytes peak : read.peak_memory_bytes) EXPECT_LE(peak, memory);
  const Verification v = verify_plan(read);
  EXPECT_TRUE(v.equivalent) << v.loss_error << " " << v.gradient_error << " " << v.worst_parameter;
  const std::vector<StepReport> steps = train_on_threads(read, {}, 3),
                                expected = train_on_threads(free.plan, {}, 3);
  for (int i = 0; i < 3; ++i) EXPECT_NEAR(steps[i].loss, expected[i].loss, 1e-5 * expected[i].loss);
}

// Every tensor has the type that the graph says, which memory and messages are counted by.
TEST(TrainerTest, MixedPrecisionHasTheTypesOfItsGraph) {
  for (const char* model : {kModels[1], kModels[2]}) {
    const Graph graph = with_precision(canonicalize(capture(model, 4).graph), DType::bf16);
    const std::shared_ptr<TrainModule> module = materialize(parse_model(model), 0, DType::f32);
    Feeds feeds{{}, {}, random_inputs(*module, 4, 1, DType::f32)};
    for (const auto& [name, tensor] : parameters_of(*module))
      feeds.parameters[name] = tensor.detach();
    for (const auto& [name, tensor] : buffers_of(*module)) feeds.buffers[name] = tensor;
    InterpretOptions options;
    options.observe = [&](ValueId v, const at::Tensor& tensor) {
      const Node& node = graph.node(graph.value(v).producer);
      EXPECT_EQ(tensor.scalar_type(), to_torch(graph.spec(v).dtype)) << node.op;
    };
    interpret(graph, feeds, options);
  }
}

TEST(TrainerTest, VerifyFindsPlansEquivalent) {
  for (const char* model : {kModels[0], kModels[1], kModels[2],
                            "gpt:layers=1,hidden=16,heads=2,seq=8,vocab=20,dropout=0.1"}) {
    const Plan plan = plan_of(model, 8, uneven_cluster(3));
    const Verification exact = verify_plan(plan);
    EXPECT_TRUE(exact.equivalent) << model << " " << exact.loss_error << " " << exact.gradient_error
                                  << " " << exact.worst_parameter;
    EXPECT_TRUE(verify_plan(plan, DType::f32).equivalent) << model;
  }
}

TEST(DataTest, BatchesAreAFunctionOfSeedAndStep) {
  const TensorSpec ids{DType::i64, {4, 6}};
  const std::vector<InputSpec> text = {{"tokens", ids, 256}, {"targets", ids, 256}};
  const std::string file = testing::TempDir() + "/motley_text";
  std::string all;
  for (int i = 0; i < 1000; ++i) all += static_cast<char>('a' + i % 26);
  write_file(file, all);
  Dataset one(text, file, 1), same(text, file, 1), other(text, file, 2);
  EXPECT_TRUE(one.batch(5)["tokens"].equal(same.batch(5)["tokens"]));
  EXPECT_FALSE(one.batch(5)["tokens"].equal(one.batch(6)["tokens"]));
  EXPECT_FALSE(one.batch(5)["tokens"].equal(other.batch(5)["tokens"]));
  TensorMap batch = one.batch(0);
  EXPECT_TRUE(batch["targets"].slice(1, 0, 5).equal(batch["tokens"].slice(1, 1, 6)));
  EXPECT_EQ(Dataset(text, "", 1).description().find("random"), std::string::npos);

  const std::vector<InputSpec> image = {{"x", {DType::f32, {2, 3}}, 0},
                                        {"labels", {DType::i64, {2}}, 5}};
  EXPECT_TRUE(Dataset(image, "", 3).batch(0)["x"].equal(Dataset(image, "", 3).batch(0)["x"]));
  EXPECT_LT(Dataset(image, "", 3).batch(0)["labels"].max().item<int64_t>(), 5);

  write_file(file, "short");
  EXPECT_THAT(message_of([&] { Dataset(text, file, 1); }),
              HasSubstr("holds 5 bytes; a sample of this model needs 7"));
  EXPECT_THAT(message_of([&] { Dataset(text, "/no/such", 1); }),
              HasSubstr("[run] --data /no/such does not exist"));
  EXPECT_THAT(message_of([&] { Dataset(image, file, 1); }),
              HasSubstr("this model does not read text"));
  EXPECT_THAT(message_of([&] {
                Dataset({{"tokens", ids, 20}, {"targets", ids, 20}}, file, 1);
              }),
              HasSubstr("vocab is 20; bytes need at least 256"));
  std::filesystem::remove(file);
}

}  // namespace
}  // namespace motley
