// The folded search on captured graphs (forward, backward and update of real models, small and
// large): against a search in another order, without blocks that repeat and so with other bounds,
// and, where it takes seconds, against an integer program solved to a proven optimum.

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "capture/source.h"
#include "planner/alternation.h"
#include "reference/brute_force.h"
#include "solver/folded.h"
#include "solver/order.h"
#include "spmd/build.h"

namespace motley::spmd {

using namespace planner;
using namespace solver;

namespace {

// Devices of two speeds, `each` of both, on one switch.
Cluster two_types(int each, double bandwidth) {
  DeviceType fast, slow;
  fast.name = "fast";
  fast.flops = 15e12;
  fast.memory = 32e9;
  fast.memory_bandwidth = 8e11;
  fast.overhead = 1e-5;
  slow = fast;
  slow.name = "slow";
  slow.flops = 4e12;
  slow.memory_bandwidth = 3e11;
  Link link;
  link.bandwidth = bandwidth;
  link.latency = 2e-5;
  return flat_cluster({fast, slow}, {each, each}, link);
}

struct Case {
  std::string model;
  int batch;
  bool integer;  // whether the integer program is solved too
};

class PlanReal : public testing::TestWithParam<Case> {};

TEST_P(PlanReal, EqualsItsTwins) {
  const GraphSource source = load_graph(GetParam().model, GetParam().batch);
  const Theory theory(source.graph);
  for (const double bandwidth : {1e9, 2e10}) {
    const Cluster cluster = two_types(4, bandwidth);
    const CostModel model(cluster);
    ProblemBuilder builder(theory, model, Optimizer::adamw);
    const Shares shares(proportional_ratios(cluster));
    builder.price(Fractions(cluster, shares));
    const Problem& problem = builder.problem();
    const Order order = make_order(problem);
    OrderOptions plain;
    plain.repeats = plain.clusters = false;
    plain.seed = 1;
    const Order other = make_order(problem, plain);
    for (const Weights& weights :
         {Weights{{0, 1}, {}}, Weights{{0.6, 0.4}, {}}, Weights{{0.3, 0.7}, {1e-12, 2e-12}}}) {
      SCOPED_TRACE(testing::Message() << "bandwidth " << bandwidth << ", weight of the first type "
                                      << weights.compute[0]);
      const Solution fast = solve_folded(problem, order, weights);
      EXPECT_EQ(fast.stop, StopReason::kOptimal);
      EXPECT_EQ(check_solution(problem, fast, weights), "");
      EXPECT_NEAR(fast.price, solve_folded(problem, other, weights).price, 1e-9 * fast.price);
      if (!GetParam().integer) continue;
      const Solution slow = integer_program_by_sets(problem, weights);
      // CBC stops at 1e-7 of the most expensive option: its program may cost that much more, not
      // less: 1.05e-6 of a program has been seen.
      EXPECT_LE(fast.price, slow.price * (1 + 1e-9));
      EXPECT_NEAR(fast.price, slow.price, 2e-6 * slow.price);
      EXPECT_NEAR(slow.lower_bound, slow.price, 2e-6 * slow.price);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Models, PlanReal,
    testing::Values(Case{"mlp:layers=2", 64, true},
                    Case{"gpt:layers=1,hidden=64,heads=4,vocab=512,seq=32", 16, true},
                    Case{"gpt:layers=1", 256, true}, Case{"gpt:layers=2", 256, true},
                    Case{"gpt:layers=4", 256, true},
                    Case{"gpt:layers=24,hidden=1024,heads=16", 256, false},
                    Case{"gpt:layers=12,hidden=4096,heads=32", 64, false},
                    Case{"vit:layers=1", 256, true}, Case{"bert:layers=2", 64, true},
                    Case{"bert:layers=12", 64, false}, Case{"vgg19", 256, true},
                    Case{"llama:layers=8", 16, false}),
    [](const auto& at) { return "case" + std::to_string(at.index); });

}  // namespace
}  // namespace motley::spmd
