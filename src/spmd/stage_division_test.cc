#include "spmd/stage_division.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "core/rng.h"

namespace motley::spmd {
namespace {

using ::testing::ElementsAre;

// One device type; each step computes, or communicates what a step before it made.
DivisionProblem random_problem(Rng* rng) {
  DivisionProblem problem;
  const int types = 1 + static_cast<int>(rng->below(2)), n = 2 + static_cast<int>(rng->below(9));
  problem.parts = 2 + static_cast<int>(rng->below(2));
  problem.whole = rng->below(3) > 0;
  for (int t = 0; t < types; ++t)
    problem.interference.push_back(rng->below(2) ? 0 : rng->uniform());
  for (int i = 0; i < n; ++i) {
    DividedStep& step = problem.steps.emplace_back();
    step.once = rng->below(6) == 0;
    if (i == 0 || i + 1 == n || rng->below(3) > 0) {
      for (int t = 0; t < types; ++t) step.compute.push_back(rng->uniform());
      if (rng->below(3) > 0)
        for (const Seconds seconds : step.compute)
          step.all.push_back((1 + rng->uniform() * (problem.parts - 1)) * seconds);
      continue;
    }
    step.comm = 2 * rng->uniform();
    step.made = static_cast<int>(rng->below(i + 1)) - 1;
    step.reader = i + 1 + static_cast<int>(rng->below(n - i));
  }
  return problem;
}

Divided by_brute_force(const DivisionProblem& problem) {
  const int n = static_cast<int>(problem.steps.size());
  Divided best{std::numeric_limits<double>::infinity(), {}, {}};
  for (int cuts = 0; cuts < 1 << (n - 1); ++cuts) {
    std::vector<int> begin = {0};
    for (int i = 1; i < n; ++i)
      if (cuts >> (i - 1) & 1) begin.push_back(i);
    for (int kinds = 0; kinds < (problem.whole ? 1 << begin.size() : 1); ++kinds) {
      std::vector<bool> whole(begin.size());
      for (size_t k = 0; k < begin.size(); ++k) whole[k] = kinds >> k & 1;
      const Seconds seconds = division_seconds(problem, begin, whole);
      if (seconds < best.seconds) best = {seconds, begin, whole};
    }
  }
  return best;
}

TEST(StageDivision, EqualsTheBestOfAllDivisions) {
  Rng rng(25);
  int mixed = 0;
  for (int i = 0; i < 400; ++i) {
    const DivisionProblem problem = random_problem(&rng);
    const Divided found = divide(problem), best = by_brute_force(problem);
    ASSERT_NEAR(found.seconds, best.seconds, 1e-12) << "problem " << i;
    ASSERT_NEAR(division_seconds(problem, found.begin, found.whole), found.seconds, 1e-12)
        << "problem " << i;
    mixed += std::set<bool>(found.whole.begin(), found.whole.end()).size() == 2;
  }
  EXPECT_GT(mixed, 40);
}

// Of three steps the second and third have nothing to hide behind: they run once for both parts.
TEST(StageDivision, TakesAllPartsAtOnceWhereNothingHides) {
  DivisionProblem problem{2, {0.0}, {{{1}}, {{}, 1, 0, 2}, {{1}}, {{2}}, {{2}}}, true};
  for (DividedStep& step : problem.steps)
    if (!step.compute.empty()) step.all = {1.5 * step.compute[0]};
  const Divided found = divide(problem);
  EXPECT_THAT(found.whole, ElementsAre(false, false, true));
  EXPECT_THAT(found.begin, ElementsAre(0, ::testing::AnyOf(1, 2), 3));
  EXPECT_DOUBLE_EQ(found.seconds, 1 + 1 + 1 + 1 + 6);
}

// a computes 1 s, sends 1 s, b computes 1 s: of two parts each, the one's 1 s of sending is beside
// the other's computation.
TEST(StageDivision, OnePartSendsWhileTheOtherComputes) {
  DivisionProblem problem{2, {0.0}, {{{1}}, {{}, 1, 0, 2}, {{1}}}};
  const Divided found = divide(problem);
  EXPECT_THAT(found.begin, ElementsAre(0, ::testing::AnyOf(1, 2)));
  EXPECT_DOUBLE_EQ(found.seconds, 1 + 1 + 1 + 1);  // a1, a2 | send 1, b1 | send 2, b2
  problem.interference = {0.5};
  // Beside 1 s of sending, 1 s of computation gets two thirds done.
  EXPECT_NEAR(divide(problem).seconds, 1 + 4. / 3 + 4. / 3 + 1, 1e-12);
}

// What is gathered once delays the first part alone.
TEST(StageDivision, WhatIsSharedIsSentOnce) {
  DivisionProblem problem{2, {0.0}, {{{}, 3, -1, 1, true}, {{1}}}};
  EXPECT_DOUBLE_EQ(divide(problem).seconds, 3 + 1 + 1);
}

TEST(StageDivision, ThinsOutWhatIsTooLarge) {
  Rng rng(4);
  DivisionProblem problem{2, {0.1}, {}};
  for (int i = 0; i < 3000; ++i) {
    DividedStep& step = problem.steps.emplace_back();
    if (i % 300 == 150) {
      step.comm = 30;
      step.made = i - 100;
      step.reader = i + 1;
    } else {
      step.compute = {rng.uniform()};
    }
  }
  const Divided all = divide(problem, 1e12), few = divide(problem, 1e5);
  EXPECT_LE(all.seconds, few.seconds + 1e-9);
  EXPECT_LE(few.seconds, 1.05 * all.seconds);
}

// Parameters that are gathered may be so anywhere in front: all their places are too many.
TEST(StageDivision, ThinsOutMessagesThatAreTooMany) {
  Rng rng(5);
  DivisionProblem problem{2, {0.1}, {}};
  for (int i = 0; i < 2000; ++i) {
    DividedStep& step = problem.steps.emplace_back();
    if (i % 4 == 0) {
      step.comm = 1 + rng.uniform();
      step.reader = i + 1;
      if (i % 100 == 40) step.made = i - 30;  // some have to have a boundary
    } else {
      step.compute = {rng.uniform()};
    }
  }
  const Divided all = divide(problem, 1e12);
  for (const double most : {1e3, 1e5, 1e6}) {
    const Divided few = divide(problem, most);
    EXPECT_NEAR(division_seconds(problem, few.begin), few.seconds, 1e-9) << most;
    EXPECT_LE(all.seconds, few.seconds + 1e-9) << most;
    EXPECT_LE(few.seconds, (most < 1e4 ? 2 : 1.05) * all.seconds) << most;
  }
}

}  // namespace
}  // namespace motley::spmd
