#include "spmd/folded.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "twins/spmd_gpt.h"
#include "twins/spmd_twins.h"

namespace motley::spmd {
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

}  // namespace
}  // namespace motley::spmd
