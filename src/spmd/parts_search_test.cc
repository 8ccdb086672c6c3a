#include "spmd/parts_search.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "reference/brute_force.h"
#include "reference/hidup.h"

namespace motley::spmd {
namespace {

using namespace solver;

struct Case {
  Problem problem;
  PartsSearch search;
};

Case random_case(uint64_t seed, int types, bool interference) {
  RandomShape shape;
  shape.nodes = 3 + static_cast<int>(seed % 4);
  shape.types = types;
  shape.max_forms = 3;
  shape.max_options = 3;
  shape.gaps = false;
  Case made{random_problem(seed, shape), {}};
  for (int t = 0; t < types; ++t)
    made.search.interference.push_back(interference ? 0.1 * static_cast<double>(1 + seed % 5) : 0);
  return made;
}

// All options of all nodes, in all divisions.
TEST(PartsSearch, EqualsTheBestOfAllProgramsAndDivisions) {
  int compared = 0;
  for (uint64_t seed = 1; compared < 200; ++seed) {
    const Case c = random_case(seed, 1 + static_cast<int>(seed % 2), seed % 3 == 0);
    const Seconds best = best_of_all_in_parts(c.problem, c.search);
    if (!std::isfinite(best)) continue;
    ++compared;
    const PartsProgram found = search_in_parts(c.problem, make_order(c.problem), c.search);
    ASSERT_NEAR(found.divided.seconds, best, 1e-9 * best) << "problem " << seed;
    ASSERT_LE(found.lower_bound, best * (1 + 1e-9)) << "problem " << seed;
  }
}

// Six layers, each either split (1 s of computation and 1 s of communication) or whole (1.5 s). One
// after another, whole layers are faster; side by side, split ones are.
TEST(PartsSearch, TheBestProgramWithOverlapIsNotTheBestWithout) {
  constexpr double inf = std::numeric_limits<double>::infinity();
  Problem problem;
  problem.form_tables = {{2, {0, inf, 1, 0}}};  // partial sums become whole
  problem.option_tables = {{{{{}, {0}, 0, {0.01}, {0}}}},
                           {{{{0}, {1}, 0, {1}, {0}}, {{0}, {0}, 0, {1.5}, {0}}}},
                           {{{{0}, {}, 0, {0.01}, {0}}}}};
  problem.nodes.push_back({0, {}, {0}});
  for (int layer = 0; layer < 6; ++layer) problem.nodes.push_back({1, {layer}, {layer + 1}});
  problem.nodes.push_back({2, {6}, {}});
  problem.value_table.assign(7, 0);
  validate(problem);
  const Weights one{{1}, {}};
  const Solution without = brute_force(problem, one);
  EXPECT_NEAR(without.price, 6 * 1.5 + 0.02, 1e-9);  // all layers whole
  PartsSearch search;
  search.interference = {0};
  const PartsProgram with = search_in_parts(problem, make_order(problem), search);
  EXPECT_NE(with.solution.option, without.option);
  // Of the program that is best without overlap, both parts compute one after another.
  EXPECT_NEAR(divide(division_of(problem, without, search)).seconds, 2 * without.price, 1e-9);
  EXPECT_NEAR(with.divided.seconds, 2 * (6 * 1 + 0.02) + 1,
              0.03);  // all split, one collective shows
}

// On the same graphs and prices, two parts, one type and no interference as there.
TEST(PartsSearch, IsNeverWorseThanHidup) {
  int compared = 0, better = 0;
  double gain = 0;
  for (uint64_t seed = 1001; compared < 200; ++seed) {
    const Case c = random_case(seed, 1, false);
    const Seconds theirs = hidup(c.problem);
    if (!std::isfinite(theirs)) continue;
    ++compared;
    const Seconds ours =
        search_in_parts(c.problem, make_order(c.problem), c.search).divided.seconds;
    EXPECT_LE(ours, theirs * (1 + 1e-9)) << "problem " << seed;
    if (ours >= theirs * (1 - 1e-9)) continue;
    ++better;
    gain += theirs / ours - 1;
  }
  std::printf("better than HiDup's own on %d of %d problems, by %.1f%% in the mean\n", better,
              compared, better > 0 ? 100 * gain / better : 0.0);
}

}  // namespace
}  // namespace motley::spmd
