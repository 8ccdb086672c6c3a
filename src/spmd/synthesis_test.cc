#include "spmd/synthesis.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.h"
#include "core/file.h"
#include "core/rng.h"
#include "spmd/folded.h"
#include "spmd/order.h"
#include "spmd/planner.h"
#include "spmd/sample.h"

namespace motley::spmd {
namespace {

using ::testing::HasSubstr;

Graph load(const std::string& name) {
  std::string path = std::string(MOTLEY_SOURCE_DIR) + "/tests/data/graphs/" + name + ".txt";
  return parse_graph(read_file(path), name);
}

DeviceType device(const std::string& name, double flops, double memory = 16e9) {
  return {name, flops, 4 * flops, memory, flops / 20, 1e-6, 0};
}

Cluster mixed(int fast, int slow, double bandwidth = 1e9) {
  return flat_cluster({device("fast", 4e12), device("slow", 1e12)}, {fast, slow},
                      {LinkKind::switched, bandwidth, 1e-5});
}

const char* const kGraphs[] = {"gpt1", "convnet", "mlp"};

// The price that the search minimises is the cost of the program it returns: for one device type
// the two differ by the one latency that the gradients' all-reduces share.
TEST(Builder, PriceIsTheCostOfTheProgram) {
  for (const char* name : kGraphs) {
    Graph graph = load(name);
    Theory theory(graph);
    CostModel model(flat_cluster({device("d", 1e12)}, {4}, {LinkKind::switched, 1e9, 1e-5}));
    Rng rng(1);
    for (int trial = 0; trial < 20; ++trial) {
      Shares shares({0.4, 0.3, 0.2, 0.1 + rng.uniform()});
      Fractions fractions(model.cluster(), shares);
      Builder builder(theory, model, Optimizer::adamw);
      builder.price(fractions);
      Weights weights{{1.0}, {}};
      Solution solution = solve_folded(builder.problem(), make_order(builder.problem()), weights);
      Program program = builder.program(solution);
      EXPECT_THAT(check(theory, program), testing::IsEmpty());
      ProgramCost cost = cost_of(theory, program, model, fractions, Optimizer::adamw);
      EXPECT_GE(cost.step, solution.price * (1 - 1e-9)) << name;
      EXPECT_LE(cost.step, (solution.price + model.net().all_reduce(0)) * (1 + 1e-9)) << name;
    }
  }
}

// No program drawn at random is cheaper than the lower bound, on any number of types.
TEST(Synthesis, LowerBoundHoldsAgainstRandomPrograms) {
  for (const char* name : kGraphs) {
    Graph graph = load(name);
    Theory theory(graph);
    CostModel model(mixed(2, 3));
    SynthesisOptions options;
    options.ratios = {0.3, 0.3, 0.15, 0.15, 0.1};
    Synthesis best = synthesize(theory, model, options);
    ASSERT_TRUE(best.feasible) << best.reason;
    EXPECT_LE(best.lower_bound, best.cost.step * (1 + 1e-12));
    EXPECT_GE(best.lower_bound, 0.5 * best.cost.step);
    Shares shares(best.ratios);
    Fractions fractions(model.cluster(), shares);
    Builder builder(theory, model, options.optimizer);
    builder.price(fractions);
    Rng rng(7);
    for (int trial = 0; trial < 100; ++trial) {
      Program program = random_program(builder, &rng);
      EXPECT_GE(cost_of(theory, program, model, fractions, options.optimizer).step,
                best.lower_bound * (1 - 1e-9))
          << name;
    }
  }
}

TEST(Synthesis, NeverWorseThanItsRestrictions) {
  for (const char* name : kGraphs)
    for (double bandwidth : {1e7, 1e9, 1e11}) {
      PlanRequest request;
      request.batch = 8;
      PlanResult result = plan(load(name), mixed(2, 2, bandwidth), request);
      ASSERT_TRUE(result.feasible) << result.reason;
      EXPECT_THAT(check(result.plan), testing::IsEmpty());
      for (const Baseline& b : result.baselines)
        if (b.feasible) {
          EXPECT_LE(result.plan.predicted_step_s, b.predicted_step_s * (1 + 1e-9))
              << name << " " << b.name << " " << bandwidth;
        }
    }
}

TEST(Synthesis, FasterDevicesGetMore) {
  PlanRequest request;
  request.batch = 32;
  // Links so fast that computation decides.
  PlanResult result = plan(load("mlp"), mixed(1, 1, 1e13), request);
  ASSERT_TRUE(result.feasible);
  EXPECT_GT(result.plan.ratios[0], 0.5);
}

TEST(Synthesis, IsDeterministic) {
  PlanRequest request;
  request.batch = 8;
  Json a = to_json(plan(load("gpt1"), mixed(2, 2), request).plan),
       b = to_json(plan(load("gpt1"), mixed(2, 2), request).plan);
  EXPECT_EQ(a.dump(), b.dump());
}

// Memory is a hard limit: the plan fits, costs more than the unlimited one, and stores parameters
// in pieces.
TEST(Synthesis, MemoryIsAHardLimit) {
  Graph graph = load("mlp");
  Theory theory(graph);
  CostModel roomy(mixed(2, 2, 1e8));
  SynthesisOptions options;
  Synthesis free = synthesize(theory, roomy, options);
  ASSERT_TRUE(free.feasible);
  Bytes needed = free.cost.memory.peak[0];
  Cluster tight = mixed(2, 2, 1e8);
  for (DeviceType& t : tight.types) t.memory = 0.7 * needed;
  CostModel model(tight);
  Synthesis limited = synthesize(theory, model, options);
  ASSERT_TRUE(limited.feasible) << limited.reason;
  for (size_t t = 0; t < 2; ++t) EXPECT_LE(limited.cost.memory.peak[t], tight.types[t].memory);
  EXPECT_GE(limited.cost.step, free.cost.step * (1 - 1e-9));

  for (DeviceType& t : tight.types) t.memory = 1000;
  CostModel tiny(tight);
  Synthesis none = synthesize(theory, tiny, options);
  EXPECT_FALSE(none.feasible);
  EXPECT_THAT(none.reason, HasSubstr("fast lacks"));
}

TEST(Synthesis, SaysWhenARestrictionHasNoProgram) {
  // The batch of this graph is one sample: data parallelism cannot cut it.
  Graph graph = parse_graph(R"(%0 = motley::input("x") : f32[1,4]
%1 = motley::parameter("w") : f32[4,4]
%2 = aten::mm(%0, %1) : f32[1,4]
%3 = aten::sum(%2, none) : f32[]
loss %3
)",
                            "one");
  Theory theory(graph);
  CostModel model(mixed(1, 1));
  EXPECT_TRUE(synthesize(theory, model, {}).feasible);
}

}  // namespace
}  // namespace motley::spmd
