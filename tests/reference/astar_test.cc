#include "reference/astar.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>

#include "reference/brute_force.h"
#include "solver/folded.h"

namespace motley::solver {
namespace {

// Every instruction of the program finds what it needs.
std::string check_program(const Problem& problem, const std::vector<Instruction>& program) {
  std::vector<uint32_t> there(problem.value_table.size(), 0);
  std::set<int> executed;
  for (const Instruction& i : program) {
    if (i.node < 0) {
      const Conversion& c = i.conversion;
      if ((there[c.value] >> c.from & 1) == 0) return "conversion from a form that is not there";
      there[c.value] |= 1u << c.to;
      continue;
    }
    const ProblemNode& node = problem.nodes[i.node];
    const Option& option = problem.option_tables[node.table].options[i.option];
    if (!executed.insert(i.node).second) return "node executed twice";
    for (size_t k = 0; k < node.inputs.size(); ++k) {
      if ((there[node.inputs[k]] >> option.in[k] & 1) == 0) return "input is not there";
    }
    for (size_t k = 0; k < node.outputs.size(); ++k) there[node.outputs[k]] = 1u << option.out[k];
  }
  return executed.size() == problem.nodes.size() ? "" : "nodes are missing";
}

TEST(AStar, EqualsFoldedAndBruteForceOnRandomProblems) {
  int feasible = 0;
  for (uint64_t seed = 0; seed < 1000; ++seed) {
    SCOPED_TRACE(seed);
    const Problem problem = random_problem(seed, {static_cast<int>(3 + seed % 10), 2, 4, 3});
    const Weights weights = random_weights(seed, 2);
    const Solution folded = solve_folded(problem, make_order(problem), weights);
    AStarOptions options;
    options.fuse_sources = seed % 3 != 0 || problem.nodes.size() > 10;
    options.drop_redundant = seed % 5 != 0 || problem.nodes.size() > 7;
    const AStarResult star = solve_astar(problem, weights, options);
    ASSERT_EQ(star.solution.stop, folded.stop) << to_text(problem);
    if (problem.nodes.size() <= 9) {
      const Solution brute = brute_force(problem, weights);
      ASSERT_EQ(brute.option.empty(), folded.option.empty());
      if (!brute.option.empty()) {
        ASSERT_NEAR(brute.price, folded.price, 1e-9 * brute.price);
      }
    }
    if (folded.option.empty()) continue;
    ++feasible;
    ASSERT_NEAR(star.solution.price, folded.price, 1e-9 * folded.price) << to_text(problem);
    EXPECT_EQ(check_solution(problem, star.solution, weights), "");
    EXPECT_EQ(check_program(problem, star.program), "");
    EXPECT_EQ(check_solution(problem, folded, weights), "");
  }
  EXPECT_GT(feasible, 300);
}

TEST(AStar, StagesOfOneTypeCostTheirSum) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    const Problem problem = random_problem(seed, {static_cast<int>(3 + seed % 8), 1, 4, 3});
    const Weights weights{{1}, {}};
    const Solution folded = solve_folded(problem, make_order(problem), weights);
    AStarOptions options;
    options.stages = true;
    const AStarResult star = solve_astar(problem, weights, options);
    ASSERT_EQ(star.solution.stop, folded.stop);
    if (folded.option.empty()) continue;
    EXPECT_NEAR(star.solution.price, folded.price, 1e-9 * folded.price);
    EXPECT_NEAR(stage_seconds(problem, star.program), star.solution.price, 1e-9 * folded.price);
  }
}

TEST(AStar, FoldedPriceBoundsStageTime) {
  int strict = 0;
  for (uint64_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    const Problem problem = random_problem(seed, {static_cast<int>(3 + seed % 6), 2, 4, 3});
    AStarOptions options;
    options.stages = true;
    options.fuse_sources = false;
    const AStarResult star = solve_astar(problem, {{0.5, 0.5}, {}}, options);
    if (star.solution.option.empty()) continue;
    EXPECT_EQ(check_program(problem, star.program), "");
    EXPECT_NEAR(stage_seconds(problem, star.program), star.solution.price,
                1e-9 * star.solution.price);
    for (uint64_t w = 0; w < 5; ++w) {
      const Weights weights = random_weights(100 * seed + w, 2);
      const Solution folded = solve_folded(problem, make_order(problem), weights);
      EXPECT_LE(folded.price, star.solution.price * (1 + 1e-9));
      strict += folded.price < star.solution.price * (1 - 1e-6);
      // The search under other weights finds the same time.
      if (w == 0) {
        EXPECT_NEAR(solve_astar(problem, weights, options).solution.price, star.solution.price,
                    1e-9 * star.solution.price);
      }
    }
  }
  EXPECT_GT(strict, 100);
}

TEST(AStar, CommunicateOnceIsNeverBetter) {
  int worse = 0;
  for (uint64_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    const Problem problem = random_problem(seed, {static_cast<int>(3 + seed % 8), 1, 5, 3});
    AStarOptions options;
    const AStarResult free = solve_astar(problem, {{1}, {}}, options);
    options.communicate_once = true;
    const AStarResult once = solve_astar(problem, {{1}, {}}, options);
    EXPECT_GE(once.solution.price, free.solution.price * (1 - 1e-9));
    if (once.solution.option.empty()) {
      worse += !free.solution.option.empty();
      continue;
    }
    worse += once.solution.price > free.solution.price * (1 + 1e-9);
    std::set<int> talked;
    for (const Conversion& c : once.solution.conversions) {
      const FormTable& table = problem.form_tables[problem.value_table[c.value]];
      if (table.convert[c.from * table.forms + c.to] > 0) {
        EXPECT_TRUE(talked.insert(c.value).second);
      }
    }
  }
  EXPECT_GT(worse, 10);
}

TEST(AStar, Figure11) {
  // e1 = placeholder, e2 = parameter, e3 = matmul(e1, e2), loss = sum(e3). Forms: identity,
  // all-reduce, all-gather(0), all-gather(1). The best program shards both on dimension 0 and 1
  // nowhere communicates and costs 16: 15 for the matmul with e2 replicated, 1 for the sum.
  enum : uint8_t { I, A, G0, G1 };
  Problem problem;
  const double inf = std::numeric_limits<double>::infinity();
  problem.form_tables.push_back({4, {0, inf, 0, 0, 9, 0, 5, 5, 10, inf, 0, 8, 10, inf, 8, 0}});
  const auto option = [](std::vector<uint8_t> in, std::vector<uint8_t> out, double compute) {
    return Option{std::move(in), std::move(out), 0, {compute}, {0}};
  };
  problem.option_tables = {{{option({}, {G0}, 0)}},
                           {{option({}, {I}, 0), option({}, {G1}, 0)}},
                           {{option({G0, I}, {G0}, 15)}},
                           {{option({G0}, {A}, 1)}}};
  problem.value_table = {0, 0, 0, 0};
  problem.nodes = {{0, {}, {0}}, {1, {}, {1}}, {2, {0, 1}, {2}}, {3, {2}, {3}}};
  for (bool stages : {false, true}) {
    AStarOptions options;
    options.stages = stages;
    options.communicate_once = true;
    const AStarResult result = solve_astar(problem, {{1}, {}}, options);
    EXPECT_EQ(result.solution.price, 16);
    EXPECT_EQ(result.solution.option, (std::vector<int>{0, 0, 0, 0}));
    EXPECT_TRUE(result.solution.conversions.empty());
  }
}

TEST(AStar, LimitsReturnABound) {
  const Problem problem = random_problem(11, {12, 2, 4, 4});
  const Weights weights{{0.5, 0.5}, {}};
  const AStarResult all = solve_astar(problem, weights);
  ASSERT_EQ(all.solution.stop, StopReason::kOptimal);
  Limits limits;
  limits.max_states = 20;
  const AStarResult few = solve_astar(problem, weights, {}, limits);
  EXPECT_EQ(few.solution.stop, StopReason::kStateLimit);
  EXPECT_LE(few.solution.lower_bound, all.solution.price);
  EXPECT_GT(few.solution.lower_bound, 0);
  EXPECT_GE(few.solution.price, all.solution.price);
}

}  // namespace
}  // namespace motley::solver
