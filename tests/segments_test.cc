// Segments from a model to a plan that is checked, simulated and run.
#include "planner/segments.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "core/error.h"
#include "graph/precision.h"
#include "graph/segment.h"
#include "planner/program_plan.h"
#include "reference/sample.h"
#include "runtime/trainer.h"
#include "runtime/verify.h"
#include "sim/simulate.h"
#include "soundness.h"
#include "spmd/segments.h"
#include "two_speeds.h"

namespace motley {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

// A random program of a graph with random ratios in every segment, as a plan.
Plan random_plan(const std::string& model, int64_t batch, Graph graph, DType precision, Rng* rng) {
  Plan plan;
  plan.model = model;
  plan.batch = batch;
  plan.precision = precision;
  plan.cluster = cluster_of(1, 2, 1e9);
  plan.set_graph(std::move(graph));
  plan.ratios = random_ratios(plan.theory->segments(), 3, rng);
  const CostModel cost(plan.cluster);
  spmd::ProblemBuilder builder(*plan.theory, cost, plan.optimizer);
  builder.price(Fractions(plan.cluster, Shares(plan.ratios)));
  plan.program = spmd::random_program(builder, rng);
  return plan;
}

// Plans with segments are whole in a file, pass the checker, and train as one device does, also in
// mixed precision and from a file.
TEST(Segments, PlansRunFromTheirFiles) {
  Rng rng(23);
  for (const char* model :
       {"mlp:layers=3,hidden=16,in=12,classes=5", "convnet:width=4,image=8,classes=5",
        "gpt:layers=2,hidden=16,heads=4,seq=8,vocab=32"})
    for (const DType precision : {DType::f32, DType::bf16})
      for (int trial = 0; trial < 2; ++trial) {
        const int64_t batch = 6;
        Graph graph = captured(model, batch);
        if (precision != DType::f32) graph = with_precision(graph, precision);
        graph = with_segments(graph, random_segments(graph, 3, &rng));
        if (segments_of(graph).count == 1) continue;
        const Plan plan = random_plan(model, batch, std::move(graph), precision, &rng);
        EXPECT_THAT(check(plan), IsEmpty());
        const std::string text = to_json(plan).dump();
        const Plan again = parse_plan(text, "p.json");
        EXPECT_EQ(to_json(again).dump(), text);
        EXPECT_EQ(again.ratios, plan.ratios);
        EXPECT_THAT(describe(again), HasSubstr("segment 0"));
        const Verification v = verify_plan(again);
        EXPECT_TRUE(v.equivalent) << model << ": " << v.gradient_error << " " << v.worst_parameter;
        EXPECT_GT(simulate(again).step, 0);
        // One list of ratios is not enough.
        Json json = to_json(plan);
        json["ratios"] = Json::array({Json(plan.ratios[0])});
        try {
          parse_plan(json.dump(), "p.json");
          ADD_FAILURE() << "read";
        } catch (const UserError& e) {
          EXPECT_THAT(e.what(), HasSubstr("ratios has 1 entries; the graph has"));
        }
      }
}

TEST(Segments, NeverWorseThanOne) {
  int better = 0;
  for (const char* model : {"mlp:layers=3,hidden=64,in=64", "vgg19:width=4,image=32,classes=10",
                            "gpt:layers=2,hidden=32,heads=4,seq=16,vocab=64"})
    for (const double bandwidth : {1e8, 1e10}) {
      if (bandwidth > 1e8 && model[0] != 'm') continue;
      const int64_t batch = 24;
      const Graph graph = captured(model, batch);
      const Cluster cluster = cluster_of(2, 2, bandwidth);
      planner::ProgramRequest request;
      request.model = model;
      request.batch = batch;
      request.alternation.certify = false;
      planner::ProgramResult one = planner::plan_program(graph, cluster, request);
      ASSERT_TRUE(one.feasible);
      const Seconds before = simulate(one.plan).step;
      std::vector<planner::Segmented> tried;
      const planner::ProgramResult best = planner::plan_segments(
          std::move(one), graph, cluster, request, planner::parse_segments("auto"), &tried);
      EXPECT_GE(tried.size(), 2u);
      const Seconds after = simulate(best.plan).step;
      EXPECT_LE(after, before) << model;
      EXPECT_THAT(check(best.plan), IsEmpty());
      better += after < before;
      EXPECT_EQ(after<before, best.plan.theory->segments()> 1);
      // All of what was planned for is about as good as one segment, whatever was cut.
      for (const planner::Segmented& s : tried)
        EXPECT_LE(s.simulated_s, before * 1.02) << model << ": " << s.what;
    }
  std::printf("%d of 4 better with segments\n", better);
}

}  // namespace
}  // namespace motley
