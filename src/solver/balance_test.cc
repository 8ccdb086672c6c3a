#include "solver/balance.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "core/infinity.h"
#include "core/rng.h"

namespace motley::solver {
namespace {

BalanceProblem random_balance(uint64_t seed, int types, int segments, bool memory) {
  Rng rng(seed);
  BalanceProblem problem;
  for (int j = 0; j < types; ++j) {
    problem.devices.push_back(static_cast<int>(rng.between(1, 10)));
    problem.fixed.push_back(1e9 * rng.uniform());
    problem.capacity.push_back(memory ? 1e9 + 20e9 * rng.uniform() : kInfinity);
  }
  for (int s = 0; s < segments; ++s) {
    problem.sharded.emplace_back();
    for (int j = 0; j < types; ++j) problem.sharded[s].push_back(100e9 * rng.uniform());
  }
  const int64_t stages = rng.between(1, 12);
  for (int64_t i = 0; i < stages; ++i) {
    BalanceStage stage;
    stage.comm_fixed = 1e-3 * rng.uniform();
    stage.comm_padded = rng.chance(0.5) ? 0 : 0.05 * rng.uniform();
    stage.segment = static_cast<int>(rng.below(segments));
    for (int j = 0; j < types; ++j) {
      stage.sharded.push_back(rng.chance(0.1) ? 0 : 0.1 * rng.uniform());
      stage.replicated.push_back(rng.chance(0.5) ? 0 : 1e-3 * rng.uniform());
    }
    problem.stages.push_back(stage);
  }
  return problem;
}

// Stages in several segments and boundaries between them, on devices in random order behind ports
// of one or several devices.
void add_exchanges(uint64_t seed, BalanceProblem* problem) {
  Rng rng(seed ^ 0x5e9);
  const int types = static_cast<int>(problem->devices.size());
  const int segments = static_cast<int>(problem->sharded.size());
  for (BalanceStage& stage : problem->stages) {
    if (rng.chance(0.5)) continue;
    std::vector<double> all;
    for (int s = 0; s < segments; ++s)
      for (int j = 0; j < types; ++j) all.push_back(rng.chance(0.3) ? 0 : 0.1 * rng.uniform());
    stage.sharded = all;
  }
  std::vector<int> order;
  for (int j = 0; j < types; ++j) order.insert(order.end(), problem->devices[j], j);
  for (size_t i = order.size(); i > 1; --i)
    std::swap(order[i - 1], order[static_cast<size_t>(rng.below(static_cast<int64_t>(i)))]);
  for (size_t first = 0; first < order.size();) {
    const size_t end = std::min(
        order.size(), first + static_cast<size_t>(rng.chance(0.7) ? 1 : rng.between(2, 4)));
    BalancePort port{std::vector<double>(types, 0), {}, 1e-10 * (1 + rng.uniform())};
    for (size_t d = 0; d < first; ++d) ++port.before[order[d]];
    port.until = port.before;
    for (size_t d = first; d < end; ++d) ++port.until[order[d]];
    problem->ports.push_back(std::move(port));
    first = end;
  }
  for (int a = 0; a < segments; ++a)
    for (int b = a + 1; b < segments; ++b)
      if (rng.chance(0.8)) problem->exchanges.push_back({a, b, 3e8 * rng.uniform()});
}

bool fits(const BalanceProblem& problem, const std::vector<std::vector<double>>& ratio,
          double slack) {
  for (size_t j = 0; j < problem.devices.size(); ++j) {
    double bytes = problem.fixed[j];
    for (size_t s = 0; s < ratio.size(); ++s) bytes += problem.sharded[s][j] * ratio[s][j];
    if (bytes > problem.capacity[j] * (1 + slack)) return false;
  }
  return true;
}

TEST(Balance, OneTypeNeedsNoLinearProgram) {
  int feasible = 0, infeasible = 0;
  for (uint64_t seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE(seed);
    const int segments = 1 + static_cast<int>(seed % 3);
    BalanceProblem problem = random_balance(seed, 1, segments, seed % 2 == 1);
    if (segments > 1) add_exchanges(seed, &problem);
    const Balance fast = balance(problem), slow = balance_by_linear_program(problem);
    ASSERT_EQ(fast.feasible, slow.feasible);
    ++(fast.feasible ? feasible : infeasible);
    EXPECT_EQ(fast.rows, slow.rows);
    EXPECT_EQ(fast.lacking_bytes, slow.lacking_bytes);
    if (!fast.feasible) continue;
    for (int s = 0; s < segments; ++s) EXPECT_DOUBLE_EQ(fast.ratio[s][0], slow.ratio[s][0]);
    EXPECT_DOUBLE_EQ(fast.seconds, slow.seconds);
    EXPECT_EQ(fast.weights.compute, slow.weights.compute);
    EXPECT_TRUE(slow.weights.memory.empty());
  }
  EXPECT_GT(feasible, 100);
  EXPECT_GT(infeasible, 50);
}

// Two types, one segment: the time is convex in b_0, so a ternary search between the bounds that
// memory leaves finds the optimum.
double two_type_twin(const BalanceProblem& problem) {
  double low = 0, high = 1.0 / problem.devices[0];
  const auto other = [&](double b0) {
    return std::max(0.0, (1 - problem.devices[0] * b0) / problem.devices[1]);
  };
  if (problem.capacity[0] < kInfinity) {
    if (problem.fixed[0] > problem.capacity[0] || problem.fixed[1] > problem.capacity[1]) {
      return kInfinity;
    }
    high = std::min(high, (problem.capacity[0] - problem.fixed[0]) / problem.sharded[0][0]);
    const double most = (problem.capacity[1] - problem.fixed[1]) / problem.sharded[0][1];
    low = std::max(low, (1 - most * problem.devices[1]) / problem.devices[0]);
    if (low > high) return kInfinity;
  }
  const auto time = [&](double b0) { return step_seconds(problem, {{b0, other(b0)}}); };
  for (int i = 0; i < 300; ++i) {
    const double a = low + (high - low) / 3, b = high - (high - low) / 3;
    (time(a) <= time(b) ? high : low) = time(a) <= time(b) ? b : a;
  }
  return time((low + high) / 2);
}

TEST(Balance, EqualsTernarySearchOnTwoTypes) {
  int feasible = 0, infeasible = 0;
  for (uint64_t seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE(seed);
    const BalanceProblem problem = random_balance(seed, 2, 1, seed % 2 == 1);
    const Balance fast = balance(problem);
    const double slow = two_type_twin(problem);
    ASSERT_EQ(fast.feasible, slow < kInfinity);
    if (!fast.feasible) {
      ++infeasible;
      continue;
    }
    ++feasible;
    EXPECT_NEAR(fast.seconds, slow, 1e-8 * slow);
    EXPECT_TRUE(fits(problem, fast.ratio, 1e-8));
  }
  EXPECT_GT(feasible, 200);
  EXPECT_GT(infeasible, 10);
}

// Two types, two segments: convex in both first shares, so nested ternary searches.
TEST(Balance, EqualsNestedTernarySearchOnTwoSegments) {
  int moving = 0, still = 0;
  for (uint64_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    BalanceProblem problem = random_balance(seed, 2, 2, false);
    add_exchanges(seed, &problem);
    const Balance fast = balance(problem);
    ASSERT_TRUE(fast.feasible);
    const auto at = [&](double x, double y) {
      const auto other = [&](double b) {
        return std::max(0.0, (1 - problem.devices[0] * b) / problem.devices[1]);
      };
      return step_seconds(problem, {{x, other(x)}, {y, other(y)}});
    };
    const auto least = [&](const auto& time) {
      double low = 0, high = 1.0 / problem.devices[0];
      for (int i = 0; i < 100; ++i) {
        const double a = low + (high - low) / 3, b = high - (high - low) / 3;
        (time(a) <= time(b) ? high : low) = time(a) <= time(b) ? b : a;
      }
      return time((low + high) / 2);
    };
    const double slow = least([&](double x) { return least([&](double y) { return at(x, y); }); });
    EXPECT_NEAR(fast.seconds, slow, 1e-6 * slow);
    EXPECT_LE(fast.seconds, slow * (1 + 1e-9));
    const bool differ = std::abs(fast.ratio[0][0] - fast.ratio[1][0]) > 1e-6;
    moving += differ;
    still += !differ && !problem.exchanges.empty();
  }
  EXPECT_GT(moving, 10);
  EXPECT_GT(still, 10);
}

TEST(Balance, NoRandomPointIsBetter) {
  for (uint64_t seed = 0; seed < 100; ++seed) {
    SCOPED_TRACE(seed);
    BalanceProblem problem = random_balance(seed, 4, 3, seed % 2 == 1);
    if (seed % 4 < 2) add_exchanges(seed, &problem);
    const Balance best = balance(problem);
    if (!best.feasible) continue;
    EXPECT_TRUE(fits(problem, best.ratio, 1e-8));
    Rng rng(seed);
    for (int trial = 0; trial < 300; ++trial) {
      // Near the answer and far from it.
      auto ratio = best.ratio;
      const double amount = trial % 2 == 0 ? 0.02 : 1;
      for (auto& b : ratio) {
        double sum = 0;
        for (size_t j = 0; j < b.size(); ++j) {
          b[j] = (1 - amount) * b[j] + amount * rng.uniform() / 10;
          sum += b[j] * problem.devices[j];
        }
        for (double& x : b) x /= sum;
      }
      if (fits(problem, ratio, 0)) {
        EXPECT_GE(step_seconds(problem, ratio), best.seconds * (1 - 1e-8));
      }
    }
  }
}

TEST(Balance, SharesFollowSpeedWhenNothingElseMatters) {
  // One stage, type 0 three times as fast: 4 b0 + 4 b1 = 1 and b0 = 3 b1.
  const BalanceProblem problem{
      {4, 4}, {{0, 0, {1, 3}, {0, 0}, 0}}, {{0, 0}}, {0, 0}, {kInfinity, kInfinity}};
  const Balance answer = balance(problem);
  ASSERT_TRUE(answer.feasible);
  EXPECT_NEAR(answer.ratio[0][0], 3.0 / 16, 1e-9);
  EXPECT_NEAR(answer.ratio[0][1], 1.0 / 16, 1e-9);
  EXPECT_NEAR(answer.seconds, 3.0 / 16, 1e-9);
  // Both types decide: moving work either way lengthens the stage, in proportion to n_j / a_j.
  EXPECT_NEAR(answer.weights.compute[0], 0.75, 1e-9);
  EXPECT_NEAR(answer.weights.compute[1], 0.25, 1e-9);
}

TEST(Balance, WeightsBoundTheTime) {
  // Weak duality: with the weights, no ratio makes the weighted mean of the work less than the
  // optimum less communication, when a single kind of stage is there.
  for (uint64_t seed = 0; seed < 50; ++seed) {
    SCOPED_TRACE(seed);
    BalanceProblem problem = random_balance(seed, 3, 1, false);
    problem.stages.resize(1);
    problem.stages[0].comm_padded = 0;
    const Balance answer = balance(problem);
    ASSERT_TRUE(answer.feasible);
    double least = kInfinity;  // linear in b: attained where one type has all
    for (size_t all = 0; all < 3; ++all) {
      double mean = problem.stages[0].comm_fixed;
      for (size_t j = 0; j < 3; ++j) {
        const double b = j == all ? 1.0 / problem.devices[j] : 0;
        mean += answer.weights.compute[j] *
                (problem.stages[0].sharded[j] * b + problem.stages[0].replicated[j]);
      }
      least = std::min(least, mean);
    }
    EXPECT_NEAR(least, answer.seconds, 1e-8 * answer.seconds);
  }
}

// Two types: the cheapest line is concave in the weight of the first.
TEST(Balance, DearestWeightsEqualTernarySearch) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    Rng rng(seed);
    std::vector<PriceLine> lines(rng.between(1, 8));
    for (PriceLine& line : lines)
      line = {1e-3 * rng.uniform(), {1e-3 * rng.uniform(), 1e-3 * rng.uniform()}};
    const auto cheapest = [&](double w) {
      double least = kInfinity;
      for (const PriceLine& line : lines)
        least = std::min(least, line.comm + w * line.compute[0] + (1 - w) * line.compute[1]);
      return least;
    };
    double low = 0, high = 1;
    for (int i = 0; i < 200; ++i) {
      const double a = low + (high - low) / 3, b = high - (high - low) / 3;
      (cheapest(a) < cheapest(b) ? low : high) = cheapest(a) < cheapest(b) ? a : b;
    }
    const MaxMin best = max_min(lines);
    const std::vector<double>& weights = best.weights;
    const double price = best.price;
    EXPECT_NEAR(weights[0] + weights[1], 1, 1e-12);
    EXPECT_NEAR(price, cheapest((low + high) / 2), 1e-8 * price);
    EXPECT_NEAR(price, cheapest(weights[0]), 1e-12);
  }
}

// With a limit, multipliers prove what the best mixture of lines that keeps it on average costs.
TEST(Balance, MaxMinEqualsTheBestMixture) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    Rng rng(seed);
    std::vector<PriceLine> lines(rng.between(2, 8));
    for (PriceLine& line : lines) line = {rng.uniform(), {rng.uniform()}, {rng.uniform() - 0.5}};
    lines[0].excess[0] = -0.5;
    const auto cost = [&](size_t i) { return lines[i].comm + lines[i].compute[0]; };
    double least = kInfinity;
    for (size_t a = 0; a < lines.size(); ++a)
      for (size_t b = 0; b < lines.size(); ++b) {
        const double over = lines[a].excess[0], under = lines[b].excess[0];
        if (over <= 0) least = std::min(least, cost(a));
        if (over <= 0 || under >= 0) continue;
        const double part = under / (under - over);
        least = std::min(least, part * cost(a) + (1 - part) * cost(b));
      }
    const MaxMin d = max_min(lines, 1e4);
    EXPECT_NEAR(d.price, least, 1e-6);
    EXPECT_NEAR(d.weights[0], 1, 1e-12);
    double mixed = 0, excess = 0, sum = 0;
    for (size_t i = 0; i < lines.size(); ++i) {
      mixed += d.mix[i] * cost(i);
      excess += d.mix[i] * lines[i].excess[0];
      sum += d.mix[i];
    }
    EXPECT_NEAR(sum, 1, 1e-9);
    EXPECT_NEAR(mixed, least, 1e-6);
    EXPECT_LE(excess, 1e-6);
  }
}

TEST(Balance, InfeasibleSaysWhichTypeLacksWhat) {
  // Type 1 holds 3 GB too much of replicated state, whatever the ratios.
  const BalanceProblem fixed{
      {1, 2}, {{0, 0, {1, 1}, {0, 0}, 0}}, {{0, 0}}, {1e9, 8e9}, {16e9, 5e9}};
  const Balance a = balance(fixed);
  ASSERT_FALSE(a.feasible);
  EXPECT_NEAR(a.lacking_bytes[0], 0, 1);
  EXPECT_NEAR(a.lacking_bytes[1], 3e9, 10);
  // 100 GB of shards over two devices of 16 GB each: 68 GB are missing.
  const BalanceProblem sharded{
      {1, 1}, {{0, 0, {1, 1}, {0, 0}, 0}}, {{100e9, 100e9}}, {0, 0}, {16e9, 16e9}};
  const Balance b = balance(sharded);
  ASSERT_FALSE(b.feasible);
  EXPECT_NEAR(b.lacking_bytes[0] + b.lacking_bytes[1], 68e9, 100);
}

TEST(Balance, MemoryPriceIsTheSavingPerByte) {
  // Type 0 is faster but full; a byte more on it saves what its dual says.
  BalanceProblem problem{
      {1, 1}, {{0, 0, {1, 4}, {0, 0}, 0}}, {{10e9, 10e9}}, {0, 0}, {5e9, kInfinity}};
  const Balance full = balance(problem);
  ASSERT_TRUE(full.feasible);
  ASSERT_EQ(full.weights.memory.size(), 2u);
  problem.capacity[0] += 1e8;
  const Balance more = balance(problem);
  EXPECT_NEAR((full.seconds - more.seconds) / 1e8, full.weights.memory[0],
              1e-6 * full.weights.memory[0]);
}

TEST(Balance, EqualStagesMerge) {
  BalanceProblem problem = random_balance(7, 2, 1, false);
  const auto stages = problem.stages;
  const int rows = balance(problem).rows;
  for (int layer = 0; layer < 400; ++layer) {
    for (BalanceStage stage : stages) {
      for (double& x : stage.sharded) x *= 1 + layer;
      for (double& x : stage.replicated) x *= 1 + layer;
      problem.stages.push_back(stage);
    }
  }
  const Balance answer = balance(problem);
  EXPECT_EQ(answer.rows, rows);
  EXPECT_NEAR(answer.seconds, two_type_twin(problem), 1e-8 * answer.seconds);
}

}  // namespace
}  // namespace motley::solver
