// Gradients that are summed beside the backward pass: when their messages may start, and what hides.
#include "cost/overlap.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "uneven.h"

namespace motley {
namespace {

TEST(Overlap, MessagesAreReadyBeforeTheyAreNeededAndHideNoMoreThanThereIs) {
  for (const char* model : {"mlp:layers=6,hidden=512,in=64,classes=5",
                            "gpt:layers=2,hidden=256,heads=4,seq=8,vocab=256"})
    for (BytesPerSecond bandwidth : {1e7, 1e9, 1e12})
      for (spmd::Restriction restriction :
           {spmd::Restriction::data_parallel, spmd::Restriction::tensor_parallel}) {
        Cluster cluster = uneven_cluster(3);
        cluster.groups[0].link.bandwidth = bandwidth;
        const Plan plan = plan_of(model, 12, cluster, restriction);
        const Theory& theory = *plan.theory;
        const std::vector<Step>& steps = plan.program.steps;
        const std::vector<bool> pure = pure_gradients(*plan.graph);
        std::vector<int> times_sent(steps.size());
        int last_ready = -1;
        for (const GradientMessage& m :
             gradient_messages(theory, plan.program, Shares(plan.ratios))) {
          EXPECT_GE(m.ready, last_ready);
          last_ready = m.ready;
          for (int s : m.steps) {
            ++times_sent[s];
            // Its operand is made, and no other collective stands between.
            bool made = false;
            for (int i = 0; i <= m.ready; ++i)
              if (steps[i].is_compute()) {
                const Node& node = plan.graph->node(steps[i].node);
                for (size_t o = 0; o < node.outputs.size(); ++o)
                  made = made ||
                         (node.outputs[o] == steps[s].value &&
                          theory.triples(steps[i].node)[steps[i].triple].out[o] == steps[s].from);
              } else {
                made = made || (steps[i].value == steps[s].value && steps[i].to == steps[s].from);
              }
            EXPECT_TRUE(made) << model << " step " << s;
            for (int i = m.ready + 1; i < s; ++i)
              EXPECT_TRUE(steps[i].is_compute() || moves_nothing(steps[i].kind) ||
                          pure[steps[i].value.index]);
          }
        }
        for (size_t s = 0; s < steps.size(); ++s)
          EXPECT_EQ(times_sent[s], !steps[s].is_compute() &&
                                       steps[s].kind == Collective::all_reduce &&
                                       pure[steps[s].value.index]);
        const CostModel model_of_cost(cluster);
        const Shares shares(plan.ratios);
        const Fractions fractions(cluster, shares);
        const ProgramCost cost =
            cost_of(theory, plan.program, model_of_cost, fractions, plan.optimizer);
        const Seconds hidden = hidden_seconds(theory, plan.program, model_of_cost, fractions);
        EXPECT_LE(hidden, cost.comm * (1 + 1e-9));
        EXPECT_LE(hidden, cost.step - cost.comm);
        // Gradients that take longer than the whole computation hide part of it; fast ones nearly
        // vanish.
        if (restriction == spmd::Restriction::data_parallel) {
          EXPECT_GT(hidden, 0) << model << " at " << bandwidth;
          if (bandwidth == 1e9) {
            EXPECT_GT(hidden, 0.3 * cost.comm) << model;
          }
        }
      }
}

// One message for all gradients, one for each, and what lies between train alike, and what a message
// holds is what its sizes say.
TEST(Overlap, MessagesOfAnySizeTrainAsOneDevice) {
  for (const char* model : kModels) {
    const std::vector<StepReport> expected =
        train_on_threads(plan_of(model, 12, uneven_cluster(1)), {}, 3);
    Plan plan = plan_of(model, 12, uneven_cluster(3), spmd::Restriction::data_parallel);
    std::set<size_t> counts;
    for (const GradientSizes& sizes : {GradientSizes{0, 0}, GradientSizes{600, 2000},
                                       GradientSizes{8000, 600}, GradientSizes(), kLargestSizes}) {
      plan.program.sizes = sizes;
      EXPECT_THAT(check(plan), testing::IsEmpty());
      const auto messages = gradient_messages(*plan.theory, plan.program, Shares(plan.ratios));
      counts.insert(messages.size());
      for (const GradientMessage& m : messages) {
        Bytes bytes = 0, most = 0;
        for (int s : m.steps) {
          const auto own =
              static_cast<Bytes>(plan.graph->spec(plan.program.steps[s].value).bytes());
          bytes += own;
          most = std::max(most, own);
        }
        EXPECT_TRUE(m.steps.size() == 1 || most < sizes.alone);
        EXPECT_TRUE(m.steps.size() == 1 || bytes - most < sizes.together);
      }
      const std::vector<StepReport> steps = train_on_threads(plan, {}, 3);
      for (size_t i = 0; i < steps.size(); ++i)
        EXPECT_NEAR(steps[i].loss, expected[i].loss, 2e-5 * expected[i].loss) << model;
    }
    EXPECT_GT(counts.size(), 2u) << model;
  }
}

// Where messages cost mostly latency they are few; where little follows them they are not kept back.
TEST(Overlap, SizesFollowTheNetwork) {
  const char* model = "mlp:layers=12,hidden=512,in=64,classes=5";
  const auto chosen = [&](Seconds latency, BytesPerSecond bandwidth) {
    Cluster cluster = uneven_cluster(3);
    cluster.groups[0].link = {LinkKind::switched, bandwidth, latency};
    planner::ProgramRequest request;
    request.model = model;
    request.batch = 48;
    request.baselines = request.alternation.certify = false;
    request.alternation.overlap = true;
    request.alternation.restriction = spmd::Restriction::data_parallel;
    return planner::plan_program(canonicalize(capture(model, 48).graph), cluster, request);
  };
  const planner::ProgramResult slow = chosen(5e-3, 1e9);
  ASSERT_TRUE(slow.feasible);
  const Plan& plan = slow.plan;
  EXPECT_GT(plan.program.sizes.alone, GradientSizes().alone);
  // What was chosen is the best of all, and better than the usual sizes by what it says.
  const CostModel model_of_cost(plan.cluster);
  const Shares shares(plan.ratios);
  const Fractions fractions(plan.cluster, shares);
  const auto step = [&](const GradientSizes& sizes) {
    const Program program{plan.program.steps, sizes};
    return cost_of(*plan.theory, program, model_of_cost, fractions, plan.optimizer).step -
           hidden_seconds(*plan.theory, program, model_of_cost, fractions);
  };
  const Seconds least = step(plan.program.sizes);
  EXPECT_LT(least, 0.95 * step({}));
  for (Bytes alone = 256 << 10; alone <= kLargestSizes.alone; alone *= 4)
    for (Bytes together = 1 << 20; together <= kLargestSizes.together; together *= 4)
      EXPECT_GE(step({alone, together}), least * (1 - 1e-3)) << alone << " " << together;
  EXPECT_EQ(parse_plan(to_json(plan).dump(), "plan").program.sizes, plan.program.sizes);

  EXPECT_EQ(chosen(1e-7, 1e9).plan.program.sizes, GradientSizes());
}

// Gradients that are summed and gathered one by one are waited for all along the backward pass.
TEST(Overlap, EveryWaitEndsWhatIsHidden) {
  for (const char* model : {"gpt:layers=6,hidden=32,heads=4,vocab=64,seq=64",
                            "mlp:layers=6,hidden=64,in=64,classes=5"}) {
    const Cluster cluster = load_cluster("local-mixed-4");
    const Plan plan = plan_of(model, 16, cluster, spmd::Restriction::zero);
    const CostModel model_of_cost(cluster);
    const Shares shares(plan.ratios);
    const Fractions fractions(cluster, shares);
    const ProgramCost cost =
        cost_of(*plan.theory, plan.program, model_of_cost, fractions, plan.optimizer);
    const Seconds hidden = hidden_seconds(*plan.theory, plan.program, model_of_cost, fractions);
    EXPECT_LE(hidden, cost.comm * (1 + 1e-9)) << model;
    EXPECT_LE(hidden, (cost.step - cost.comm) * (1 + 1e-9)) << model;
  }
}

}  // namespace
}  // namespace motley
