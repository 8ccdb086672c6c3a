#include "solver/folded.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "reference/brute_force.h"
#include "reference/spmd_gpt.h"

namespace motley::solver {
namespace {

TEST(Folded, EqualsBruteForceOnRandomProblems) {
  int feasible = 0;
  for (uint64_t seed = 0; seed < 1000; ++seed) {
    SCOPED_TRACE(seed);
    const RandomShape shape{static_cast<int>(3 + seed % 8), 2, 5, 3};
    const Problem problem = random_problem(seed, shape);
    validate(problem);
    const Weights weights = random_weights(seed, 2);
    const Solution slow = brute_force(problem, weights);
    const Solution fast = solve_folded(problem, make_order(problem), weights);
    ASSERT_EQ(fast.option.empty(), slow.option.empty()) << to_text(problem);
    if (slow.option.empty()) {
      EXPECT_EQ(fast.stop, StopReason::kInfeasible);
      continue;
    }
    ++feasible;
    ASSERT_NEAR(fast.price, slow.price, 1e-9 * slow.price) << to_text(problem);
    EXPECT_EQ(fast.stop, StopReason::kOptimal);
    EXPECT_EQ(check_solution(problem, fast, weights), "");
  }
  EXPECT_GT(feasible, 300);
}

Problem gpt(int layers, bool tied, int types) {
  GptShape shape;
  shape.layers = layers;
  shape.tied = tied;
  if (types == 2) {
    shape.flops = {60e12, 15e12};
    shape.devices = {8, 8};
  }
  return gpt_problem(shape);
}

TEST(Folded, EveryKindOfOrderIsExact) {
  for (uint64_t seed = 2000; seed < 2300; ++seed) {
    SCOPED_TRACE(seed);
    const Problem problem = random_problem(seed, {20, 2, 5, 4});
    const Weights weights = random_weights(seed, 2);
    OrderOptions plain;
    plain.clusters = plain.repeats = false;
    plain.restarts = 1;
    OrderOptions other;
    other.seed = 7;
    other.window = 5;
    const Solution a = solve_folded(problem, make_order(problem), weights);
    const Solution b = solve_folded(problem, make_order(problem, plain), weights);
    const Solution c = solve_folded(problem, make_order(problem, other), weights);
    ASSERT_EQ(a.stop, b.stop);
    ASSERT_EQ(a.stop, c.stop);
    if (a.option.empty()) continue;
    ASSERT_NEAR(a.price, b.price, 1e-9 * a.price);
    ASSERT_NEAR(a.price, c.price, 1e-9 * a.price);
    EXPECT_EQ(check_solution(problem, a, weights), "");
  }
}

TEST(Folded, EqualsTheIntegerProgramOnRandomProblems) {
  for (uint64_t seed = 3000; seed < 3040; ++seed) {
    SCOPED_TRACE(seed);
    const Problem problem = random_problem(seed, {25, 2, 5, 4});
    const Weights weights = random_weights(seed, 2);
    const Solution slow = integer_program(problem, weights);
    const Solution fast = solve_folded(problem, make_order(problem), weights);
    ASSERT_EQ(fast.option.empty(), slow.option.empty());
    if (slow.option.empty()) continue;
    EXPECT_NEAR(fast.price, slow.price, 1e-9 * slow.price);
    EXPECT_NEAR(slow.lower_bound, slow.price, 1e-6 * slow.price);
  }
}

TEST(Folded, IntegerProgramsAgree) {
  for (uint64_t seed = 5000; seed < 5100; ++seed) {
    SCOPED_TRACE(seed);
    const Problem problem = random_problem(seed, {15, 2, 5, 4});
    const Weights weights = random_weights(seed, 2);
    const Solution flows = integer_program(problem, weights);
    const Solution sets = integer_program_by_sets(problem, weights);
    ASSERT_EQ(flows.option.empty(), sets.option.empty());
    if (flows.option.empty()) continue;
    EXPECT_NEAR(flows.price, sets.price, 1e-9 * flows.price);
    EXPECT_EQ(check_solution(problem, sets, weights), "");
  }
}

// The most bits that sets of live values take between two nodes.
int widest(const Problem& problem, const Order& order) {
  int live = 0, most = 0;
  for (const OrderStep& step : order.steps) {
    for (int t = step.touch_begin; t < step.touch_end; ++t) {
      const Touch& touch = order.touches[t];
      const int forms = problem.form_tables[problem.value_table[touch.value]].forms;
      if (touch.before == Role::kAbsent && touch.after != Role::kAbsent) live += forms;
      if (touch.before != Role::kAbsent && touch.after == Role::kAbsent) live -= forms;
    }
    most = std::max(most, live);
  }
  return most;
}

TEST(Folded, EqualsTheIntegerProgramOnWideProblems) {
  int wide = 0;
  for (uint64_t seed = 0; seed < 8; ++seed) {
    SCOPED_TRACE(seed);
    const Problem problem = random_problem(seed, {45, 2, 12, 3, false});
    const Weights weights = random_weights(seed, 2);
    const Order order = make_order(problem);
    wide += widest(problem, order) > 64;
    const Solution fast = solve_folded(problem, order, weights);
    const Solution slow = integer_program(problem, weights);
    EXPECT_EQ(fast.stop, StopReason::kOptimal);
    EXPECT_NEAR(fast.price, slow.price, 1e-9 * slow.price);
    EXPECT_EQ(check_solution(problem, fast, weights), "");
  }
  EXPECT_GE(wide, 3) << "too few problems need keys of more than one word";
}

TEST(Folded, EqualsTheIntegerProgramOnTransformers) {
  for (int layers : {1, 2, 4}) {
    for (bool tied : {false, true}) {
      if (tied && layers == 4) continue;
      SCOPED_TRACE(testing::Message() << layers << " layers, tied " << tied);
      const Problem problem = gpt(layers, tied, 2);
      const Weights weights{{0.4, 0.6}, {}};
      const Solution fast = solve_folded(problem, make_order(problem), weights);
      const Solution slow = integer_program(problem, weights);
      EXPECT_EQ(fast.stop, StopReason::kOptimal);
      EXPECT_NEAR(fast.price, slow.price, 1e-9 * slow.price);
      EXPECT_EQ(check_solution(problem, fast, weights), "");
    }
  }
}

TEST(Folded, SkippingRepeatedBlocksChangesNothing) {
  for (bool tied : {false, true}) {
    for (double hidden : {256.0, 1024.0, 4096.0}) {
      SCOPED_TRACE(testing::Message() << "tied " << tied << " hidden " << hidden);
      GptShape shape;
      shape.layers = 48;
      shape.tied = tied;
      shape.hidden = hidden;
      const Problem problem = gpt_problem(shape);
      const Weights weights{{1}, {}};
      const Order order = make_order(problem);
      ASSERT_EQ(order.repeats.size(), 1u);
      EXPECT_GE(order.repeats[0].count, 40);
      Order whole = order;
      whole.repeats.clear();
      const Solution skipped = solve_folded(problem, order, weights);
      const Solution solved = solve_folded(problem, whole, weights);
      EXPECT_NEAR(skipped.price, solved.price, 1e-9 * solved.price);
      EXPECT_EQ(skipped.stop, StopReason::kOptimal);
      EXPECT_EQ(check_solution(problem, skipped, weights), "");
    }
  }
}

TEST(Folded, DepthIsNearlyFree) {
  const Weights weights{{0.5, 0.5}, {}};
  const Problem shallow = gpt(12, false, 2), deep = gpt(48, false, 2);
  const Solution a = solve_folded(shallow, make_order(shallow), weights);
  const Solution b = solve_folded(deep, make_order(deep), weights);
  EXPECT_LT(b.states, 1.3 * a.states);
  // Cost is linear in depth.
  const Problem middle = gpt(30, false, 2);
  const Solution c = solve_folded(middle, make_order(middle), weights);
  EXPECT_NEAR(c.price, (a.price + b.price) / 2, 1e-9 * c.price);
}

TEST(Folded, OneOrderServesOtherWeightsAndCosts) {
  const Problem problem = gpt(3, false, 2);
  const Order order = make_order(problem);
  Problem costlier = problem;
  for (FormTable& table : costlier.form_tables) {
    for (double& seconds : table.convert) seconds *= 3;
  }
  for (const Weights& weights : {Weights{{1, 0}, {}}, Weights{{0.2, 0.8}, {1e-15, 2e-15}}}) {
    for (const Problem* p : std::initializer_list<const Problem*>{&problem, &costlier}) {
      const Solution a = solve_folded(*p, order, weights);
      const Solution b = solve_folded(*p, make_order(*p), weights);
      EXPECT_NEAR(a.price, b.price, 1e-9 * b.price);
      EXPECT_EQ(check_solution(*p, a, weights), "");
    }
  }
}

TEST(Folded, SameSeedSameAnswer) {
  const Problem problem = gpt(6, true, 2);
  const Weights weights{{0.5, 0.5}, {}};
  const Solution a = solve_folded(problem, make_order(problem), weights);
  const Solution b = solve_folded(problem, make_order(problem), weights);
  EXPECT_EQ(a.option, b.option);
  EXPECT_EQ(a.conversions, b.conversions);
  EXPECT_EQ(a.price, b.price);
  EXPECT_EQ(a.states, b.states);
}

TEST(Folded, LimitsReturnTheBestAndABound) {
  const Problem problem = gpt(12, false, 2);
  const Weights weights{{0.5, 0.5}, {}};
  const Order order = make_order(problem);
  const Solution best = solve_folded(problem, order, weights);
  // One state at a time: the path that looks best at each step.
  Limits narrow;
  narrow.max_states = 1;
  const Solution beam = solve_folded(problem, order, weights, narrow);
  EXPECT_EQ(beam.stop, StopReason::kStateLimit);
  EXPECT_GE(beam.price, best.price);
  EXPECT_LE(beam.lower_bound, best.price);
  EXPECT_GT(beam.lower_bound, 0);
  EXPECT_EQ(check_solution(problem, beam, weights), "");
  Limits hurried;
  hurried.time_limit_s = 0;
  const Solution quick = solve_folded(problem, order, weights, hurried);
  EXPECT_EQ(quick.stop,
            quick.lower_bound < quick.price ? StopReason::kTimeLimit : StopReason::kOptimal);
  EXPECT_GE(quick.price, best.price);
  EXPECT_LE(quick.lower_bound, best.price);
}

TEST(Folded, FewWaysThroughANodeReturnASolutionAndABound) {
  int found = 0, all = 0, worse = 0;
  for (uint64_t seed = 0; seed < 1000; ++seed) {
    SCOPED_TRACE(seed);
    const Problem problem = random_problem(seed, {static_cast<int>(3 + seed % 8), 2, 5, 3});
    const Weights weights = random_weights(seed, 2);
    const Order order = make_order(problem);
    const Solution best = solve_folded(problem, order, weights);
    Limits few;
    few.max_ways = 1 + seed % 3;
    const Solution some = solve_folded(problem, order, weights, few);
    ASSERT_LE(some.lower_bound, best.price * (1 + 1e-9));
    if (some.option.empty()) {
      EXPECT_EQ(some.stop, best.option.empty() ? some.stop : StopReason::kStateLimit);
      continue;
    }
    ++found;
    ASSERT_GE(some.price, best.price * (1 - 1e-9));
    EXPECT_EQ(check_solution(problem, some, weights), "");
    all += some.stop == StopReason::kOptimal;
    worse += some.price > best.price * (1 + 1e-9);
    if (some.stop == StopReason::kOptimal) {
      EXPECT_NEAR(some.price, best.price, 1e-9 * best.price);
    }
  }
  EXPECT_GT(found, 300);
  EXPECT_GT(all, 100);
  EXPECT_GT(worse, 10);
}

// As in a DenseNet: a node that reads 40 values of a chain in one form, and one behind it that reads
// them in another. Each can be gathered, which serves both, or cut another way.
TEST(Folded, ANodeWithManyInputsTakesNoTime) {
  constexpr int kInputs = 40;
  enum : uint8_t { kWhole, kRows, kColumns };
  Problem problem;
  problem.form_tables = {{3, {0, 0, 0, 3, 0, 1, 3, 1, 0}}};
  const auto option = [](std::vector<uint8_t> in, std::vector<uint8_t> out, double seconds) {
    return Option{std::move(in), std::move(out), 0, {seconds}, {0}};
  };
  const auto all = [](uint8_t form) { return std::vector<uint8_t>(kInputs, form); };
  problem.option_tables = {
      {{option({}, {kColumns}, 1)}},
      {{option({kColumns}, {kColumns}, 1)}},
      {{option(all(kRows), {}, 1)}},
      {{option(all(kWhole), {}, 1), option(all(kColumns), {}, 2.5 * kInputs)}}};
  std::vector<int> values;
  for (int v = 0; v < kInputs; ++v) {
    problem.value_table.push_back(0);
    problem.nodes.push_back({v > 0, v > 0 ? std::vector<int>{v - 1} : std::vector<int>{}, {v}});
    values.push_back(v);
  }
  problem.nodes.push_back({2, values, {}});
  problem.nodes.push_back({3, values, {}});
  validate(problem);
  const Solution found = solve_folded(problem, make_order(problem), {{1}, {}});
  EXPECT_EQ(check_solution(problem, found, {{1}, {}}), "");
  EXPECT_LE(found.lower_bound, 4 * kInputs + 2);  // all are gathered
  EXPECT_LT(found.price, 4.5 * kInputs + 1.1);    // none is
  EXPECT_LT(found.seconds, 5);
}

TEST(Folded, InfeasibleIsAValue) {
  // The producer makes form 0, the consumer needs form 1, and nothing converts.
  Problem problem;
  const double inf = std::numeric_limits<double>::infinity();
  problem.form_tables = {{2, {0, inf, 3, 0}}};
  problem.option_tables = {{{{{}, {0}, 0, {1}, {0}}}}, {{{{1}, {}, 0, {1}, {0}}}}};
  problem.value_table = {0};
  problem.nodes = {{0, {}, {0}}, {1, {0}, {}}};
  const Solution none = solve_folded(problem, make_order(problem), {{1}, {}});
  EXPECT_EQ(none.stop, StopReason::kInfeasible);
  EXPECT_TRUE(none.option.empty());
  EXPECT_EQ(none.lower_bound, inf);
  problem.form_tables[0].convert[1] = 5;
  const Solution some = solve_folded(problem, make_order(problem), {{1}, {}});
  EXPECT_EQ(some.price, 7);
  EXPECT_EQ(some.conversions, (std::vector<Conversion>{{0, 0, 1}}));
}

}  // namespace
}  // namespace motley::solver
