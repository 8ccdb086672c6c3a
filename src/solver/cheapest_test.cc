#include "solver/cheapest.h"

#include <gtest/gtest.h>

#include "core/infinity.h"
#include "reference/brute_force.h"
#include "solver/folded.h"
#include "solver/order.h"

namespace motley::solver {
namespace {

TEST(Cheapest, NoSolutionIsBetter) {
  int found = 0;
  for (uint64_t seed = 0; seed < 3000; ++seed) {
    SCOPED_TRACE(seed);
    // The fewer forms, the likelier do cheapest options meet.
    const Problem problem = random_problem(seed, {static_cast<int>(3 + seed % 5), 2, 2, 2});
    const Weights weights = random_weights(seed, 2);
    const auto solution = cheapest(problem, weights);
    if (!solution) continue;
    ++found;
    const Solution slow = brute_force(problem, weights),
                   folded = solve_folded(problem, make_order(problem), weights);
    EXPECT_NEAR(solution->price, slow.price, 1e-9 * slow.price) << to_text(problem);
    EXPECT_NEAR(solution->price, folded.price, 1e-9 * folded.price);
    EXPECT_EQ(solution->stop, StopReason::kOptimal);
    EXPECT_TRUE(solution->conversions.empty());
    EXPECT_EQ(check_solution(problem, *solution, weights), "");
  }
  EXPECT_GT(found, 100);
}

// One node that makes a value and one that reads it.
Problem pair_of(std::vector<Option> make, std::vector<Option> read) {
  Problem problem;
  problem.form_tables = {{2, {0, 1, 1, 0}}};
  problem.option_tables = {{std::move(make)}, {std::move(read)}};
  problem.value_table = {0};
  problem.nodes = {{0, {}, {0}}, {1, {0}, {}}};
  validate(problem);
  return problem;
}

TEST(Cheapest, LeavesConversionsToSearches) {
  const Weights weights{{1}, {}};
  const Option makes{{}, {0}, 0, {1}, {0}}, same{{}, {1}, 0, {1}, {0}}, dear{{}, {1}, 0, {2}, {0}},
      never{{}, {1}, kInfinity, {0}, {0}}, reads{{0}, {}, 0, {1}, {0}}, other{{1}, {}, 0, {1}, {0}},
      slow{{0}, {}, 0, {1.5}, {0}};
  using Options = std::vector<int>;
  const auto options = [&](const Problem& problem) {
    const auto solution = cheapest(problem, weights);
    return solution ? solution->option : Options();
  };
  EXPECT_EQ(options(pair_of({makes, dear}, {reads})), (Options{0, 0}));
  EXPECT_EQ(options(pair_of({dear, makes}, {reads})), (Options{1, 0}));
  EXPECT_EQ(options(pair_of({never, makes}, {other, reads})), (Options{1, 1}));
  EXPECT_EQ(options(pair_of({same, makes}, {reads, other})), (Options{0, 1}));
  EXPECT_EQ(options(pair_of({same, makes}, {reads})), Options());
  EXPECT_EQ(options(pair_of({makes, dear}, {other, slow})), Options());
  EXPECT_EQ(options(pair_of({never}, {other})), Options());
}

}  // namespace
}  // namespace motley::solver
