#include "pipeline/schedule.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "core/error.h"
#include "core/rng.h"
#include "pipeline/schedules.h"
#include "pipeline/simulate.h"

namespace motley::pipeline {
namespace {

using ::testing::ElementsAre;

Pipeline make(std::vector<StageTime> stages, std::vector<LinkTime> links,
              std::vector<int> limits = {}) {
  return {std::move(stages), std::move(links), std::move(limits), {}};
}

// Integral times, so that simulated times are exact: 2 to max_stages stages, equal to 10x unequal,
// any f:b, links up to 1.6 t_max and unequal in the two directions.
Pipeline random_pipeline(Rng* rng, int max_stages) {
  int stages = static_cast<int>(rng->between(2, max_stages));
  int64_t base = rng->between(20, 60), spread = rng->between(1, 10);
  Pipeline p;
  double t_max = 0;
  for (int i = 0; i < stages; ++i) {
    double total = static_cast<double>(rng->between(base, base * spread));
    double forward = static_cast<double>(rng->between(1, static_cast<int64_t>(total) - 1));
    p.stages.push_back({forward, total - forward});
    t_max = std::max(t_max, total);
  }
  for (int i = 0; i + 1 < stages; ++i) {
    auto time = [&] {
      return rng->chance(0.3) ? 0.0
                              : static_cast<double>(rng->below(static_cast<int64_t>(1.6 * t_max)));
    };
    p.links.push_back({time(), 0});
    p.links.back().backward = rng->chance(0.3) ? p.links.back().forward : time();
  }
  return p;
}

std::vector<int> random_counts(Rng* rng, int stages, int max_step) {
  std::vector<int> counts(stages, 1);
  for (int i = stages - 2; i >= 0; --i)
    counts[i] = counts[i + 1] + static_cast<int>(rng->between(0, max_step));
  return counts;
}

// Whether the simulated steady state repeats exactly with the closed form: some critical circuit
// of n micro-batches and D seconds recurs, start(m + n) == start(m) + D for the last `window`
// micro-batches of the stage it starts on.
bool recurs(const Pipeline& p, const std::vector<int>& counts, Seconds expected) {
  int stages = p.size();
  std::vector<std::vector<Seconds>> forward(stages);
  for (int batch = 300; batch <= 20000; batch *= 4) {
    Schedule schedule = strict_schedule("test", counts, batch);
    Timeline timeline = simulate(p, schedule);
    for (int i = 0; i < stages; ++i) {
      forward[i].clear();
      for (size_t k = 0; k < schedule.order[i].size(); ++k)
        if (schedule.order[i][k].kind == PassKind::forward)
          forward[i].push_back(timeline.start[i][k]);
    }
    auto steady = [&](int stage, int n, Seconds d) {
      for (int m = batch - 20 - 4 * n; m + n < batch; ++m)
        if (forward[stage][m + n] - forward[stage][m] != d) return false;
      return true;
    };
    for (int i = 0; i < stages; ++i) {
      Seconds d = p.stages[i].total();
      if (d == expected && steady(i, 1, d)) return true;
      if (i > 0 && p.links[i - 1].forward == expected && steady(i, 1, expected)) return true;
      // A backward link shows on the forward passes that follow its gradients.
      if (i > 0 && p.links[i - 1].backward == expected && steady(i - 1, 1, expected)) return true;
      for (int j = i + 1; j < stages; ++j) {
        d += p.links[j - 1].total() + p.stages[j].total();
        int n = counts[i] - counts[j] + 1;
        if (d / n == expected && steady(i, n, d)) return true;
      }
    }
  }
  return false;
}

TEST(Period, EqualsSimulatedSteadyState) {
  Rng rng(1);
  for (int round = 0; round < 10000; ++round) {
    Pipeline p = random_pipeline(&rng, 16);
    std::vector<int> counts =
        rng.chance(0.5) ? exact_counts(p, least_period(p)) : random_counts(&rng, p.size(), 4);
    ASSERT_TRUE(recurs(p, counts, period(p, counts))) << "round " << round;
  }
}

// The constraints N_i >= N_j - 1 + D_ij / p themselves, in integers.
std::vector<int> obvious_counts(const Pipeline& p, int64_t target) {
  std::vector<int> counts(p.size(), 1);
  for (int i = p.size() - 2; i >= 0; --i) {
    auto d = static_cast<int64_t>(p.stages[i].total());
    for (int j = i + 1; j < p.size(); ++j) {
      d += static_cast<int64_t>(p.links[j - 1].total() + p.stages[j].total());
      counts[i] =
          std::max<int>(counts[i], counts[j] - 1 + static_cast<int>((d + target - 1) / target));
    }
  }
  return counts;
}

TEST(ExactCounts, EqualTheConstraintsTwin) {
  Rng rng(2);
  for (int round = 0; round < 10000; ++round) {
    Pipeline p = random_pipeline(&rng, 16);
    auto target = static_cast<int64_t>(least_period(p)) + rng.below(100);
    ASSERT_EQ(exact_counts(p, static_cast<double>(target)), obvious_counts(p, target));
  }
}

// All count vectors of small pipelines: none that reaches the target is below in any element.
TEST(ExactCounts, AreElementwiseMinimal) {
  Rng rng(3);
  int64_t reached = 0, short_of = 0;
  for (int round = 0; round < 1000; ++round) {
    Pipeline p = random_pipeline(&rng, 4);
    Seconds target = least_period(p);
    std::vector<int> least = exact_counts(p, target);
    ASSERT_LE(period(p, least), target);
    std::vector<int> counts(p.size(), 1);
    std::function<void(int)> grow = [&](int i) {
      if (i < 0) {
        bool reaches = period(p, counts) <= target;
        ++(reaches ? reached : short_of);
        if (!reaches) return;
        for (int k = 0; k < p.size(); ++k) ASSERT_GE(counts[k], least[k]);
        return;
      }
      for (counts[i] = counts[i + 1]; counts[i] <= least[i] + 2; ++counts[i]) grow(i - 1);
    };
    grow(p.size() - 2);
  }
  EXPECT_GT(reached, 3000);
  EXPECT_GT(short_of, 3000);
}

TEST(ExactCounts, WithinLimitsAreBestOfAllCounts) {
  Rng rng(4);
  int bound = 0;
  for (int round = 0; round < 3000; ++round) {
    Pipeline p = random_pipeline(&rng, 4);
    for (int i = 0; i < p.size(); ++i)
      p.in_flight_limit.push_back(static_cast<int>(rng.between(1, 6)));
    ExactCounts found = exact_counts(p);
    Seconds best = std::numeric_limits<double>::infinity();
    std::vector<int> counts(p.size(), 1);
    std::function<void(int)> grow = [&](int i) {
      if (i < 0) {
        best = std::min(best, period(p, counts));
        return;
      }
      for (counts[i] = counts[i + 1]; counts[i] <= p.in_flight_limit[i]; ++counts[i]) grow(i - 1);
    };
    grow(p.size() - 2);
    for (int i = 0; i < p.size(); ++i) ASSERT_LE(found.counts[i], p.in_flight_limit[i]);
    ASSERT_EQ(found.period, best) << "round " << round;
    ASSERT_EQ(found.period, period(p, found.counts));
    bound += best > least_period(p);
  }
  EXPECT_GT(bound, 1000);  // the limits mattered
}

TEST(ExactCounts, LargeCapsAreRespected) {
  Rng rng(5);
  for (int round = 0; round < 2000; ++round) {
    Pipeline p = random_pipeline(&rng, 16);
    for (int i = 0; i < p.size(); ++i)
      p.in_flight_limit.push_back(static_cast<int>(rng.between(1, 40)));
    ExactCounts found = exact_counts(p);
    Timeline timeline = simulate(p, strict_schedule("exact", found.counts, 100));
    for (int i = 0; i < p.size(); ++i) ASSERT_LE(timeline.in_flight[i], p.in_flight_limit[i]);
    // No shorter period is within the limits: just below it the least counts break one.
    if (found.period > least_period(p)) {
      std::vector<int> less = exact_counts(p, found.period * (1 - 1e-9));
      bool breaks = false;
      for (int i = 0; i < p.size(); ++i) breaks |= less[i] > p.in_flight_limit[i];
      ASSERT_TRUE(breaks);
    }
  }
}

// Eq. 11 reaches t_max where links allow it, and never with fewer launches than the exact counts.
TEST(ExactCounts, NeverMoreThanEquation11) {
  Rng rng(6);
  for (int round = 0; round < 10000; ++round) {
    Pipeline p = random_pipeline(&rng, 16);
    std::vector<int> paper = find_schedule("h1f1b")->counts(p);
    EXPECT_LE(period(p, paper), least_period(p) * (1 + 1e-12));
    std::vector<int> exact = exact_counts(p, least_period(p));
    for (int i = 0; i < p.size(); ++i) ASSERT_LE(exact[i], paper[i]);
  }
}

TEST(Simulate, OneStageByHand) {
  Pipeline p = make({{1, 2}}, {});
  Timeline t = simulate(p, strict_schedule("test", {1}, 4));
  EXPECT_EQ(t.makespan, 12);
  EXPECT_THAT(t.in_flight, ElementsAre(1));
  EXPECT_THAT(t.start[0], ElementsAre(0, 1, 3, 4, 6, 7, 9, 10));
}

// Two stages of f = 1, b = 2, links of 1: F1 at 0, stage 2 runs 2..5, gradient back at 6.
TEST(Simulate, TwoStagesByHand) {
  Pipeline p = make({{1, 2}, {1, 2}}, {{1, 1}});
  Timeline one = simulate(p, strict_schedule("test", {1, 1}, 2));
  EXPECT_EQ(one.makespan, 16);  // round trips of 8, one after the other
  EXPECT_EQ(period(p, {1, 1}), 8);
  EXPECT_EQ(period(p, {2, 1}), 4);
  EXPECT_EQ(period(p, {3, 1}), 3);
  EXPECT_THAT(exact_counts(p, 3.0), ElementsAre(3, 1));
  Pipeline reduced = p;
  reduced.epilogue = {0, 100};
  EXPECT_EQ(simulate(reduced, strict_schedule("test", {1, 1}, 2)).makespan, 5 + 8 + 100);
}

TEST(Simulate, LowerBoundHolds) {
  Rng rng(7);
  double tight = 0;
  for (int round = 0; round < 2000; ++round) {
    Pipeline p = random_pipeline(&rng, 8);
    if (rng.chance(0.5))
      for (int i = 0; i < p.size(); ++i)
        p.in_flight_limit.push_back(static_cast<int>(rng.between(1, 8)));
    int batch = static_cast<int>(rng.between(1, 40));
    for (const ScheduleDef& def : schedule_table()) {
      if (def.launches != nullptr) continue;  // zero_bubble_test.cc
      ScheduleRun run = run_schedule(def, p, batch);
      ASSERT_GE(run.timeline.makespan, run.lower_bound) << def.name;
      for (int i = 0; i < p.size() && !p.in_flight_limit.empty(); ++i)
        ASSERT_LE(run.timeline.in_flight[i], p.in_flight_limit[i]) << def.name;
      for (int i = 0; i < p.size(); ++i)
        ASSERT_LE(run.schedule.counts[i], run.timeline.in_flight[i]);
    }
    ScheduleRun best = run_best(p, batch);
    for (const ScheduleDef& def : schedule_table()) {
      if (def.launches != nullptr) continue;
      ASSERT_LE(best.timeline.makespan,
                run_schedule(def, p, batch).timeline.makespan * (1 + 1e-12));
    }
    tight += best.timeline.makespan == best.lower_bound;
  }
  EXPECT_GT(tight, 200);
}

// A dispatched schedule is a list schedule: replaying its order changes nothing, and no stage
// idles while a pass that its limit allows is ready. One stage: no idle time at all.
TEST(Dispatch, RunsEveryPassOnce) {
  Rng rng(8);
  for (int round = 0; round < 500; ++round) {
    Pipeline p = random_pipeline(&rng, 6);
    for (const char* name : {"greedy", "deadline"}) {
      Schedule s = find_schedule(name)->make(p, 20);
      for (const auto& order : s.order) {
        std::vector<int> seen(20, 0);
        for (Task t : order) {
          ASSERT_EQ(seen[t.micro_batch], t.kind == PassKind::backward ? 1 : 0);
          ++seen[t.micro_batch];
        }
        ASSERT_EQ(std::count(seen.begin(), seen.end(), 2), 20);
      }
    }
  }
}

TEST(Schedules, TableIsAlphabetical) {
  for (size_t i = 1; i < schedule_table().size(); ++i)
    EXPECT_LT(std::string(schedule_table()[i - 1].name), schedule_table()[i].name);
}

// HAPT section 2.3.2, Figure 3: t_1 = 1.13, t_2 = t_3 = 1.1 forward, backward twice that (the
// paper gives no ratio; any will do), a slow link between stages 1 and 2 of more than half of
// t_max and a fast one between 2 and 3. Eager launches {5,3,1}; Eq. 2 and the exact rule {5,2,1};
// Eq. 11 as written {6,3,1}.
TEST(Schedules, CaseStudyOfThePaper) {
  Pipeline p = make({{1.13, 2.26}, {1.1, 2.2}, {1.1, 2.2}}, {{2.6, 2.6}, {0.05, 0.05}});
  EXPECT_THAT(find_schedule("eager")->counts(p), ElementsAre(5, 3, 1));
  EXPECT_THAT(find_schedule("h1f1b-table")->counts(p), ElementsAre(5, 2, 1));
  EXPECT_THAT(find_schedule("exact")->counts(p), ElementsAre(5, 2, 1));
  EXPECT_THAT(find_schedule("h1f1b")->counts(p), ElementsAre(6, 3, 1));
  EXPECT_EQ(period(p, {5, 2, 1}), least_period(p));
  EXPECT_GT(period(p, {5, 3, 1}), 1.03 * least_period(p));
  EXPECT_THAT(find_schedule("1f1b")->counts(p), ElementsAre(3, 2, 1));
}

TEST(Schedules, SlowLinkBeyondTmax) {
  Pipeline p = make({{1, 1}, {1, 1}}, {{3, 5}});
  EXPECT_EQ(least_period(p), 5);
  EXPECT_THAT(find_schedule("exact")->counts(p), ElementsAre(3, 1));  // ceil((2+2+8)/5)
}

TEST(Draw, ShowsWhoRunsWhen) {
  Pipeline p = make({{1, 1}, {1, 1}}, {{0, 0}});
  Schedule s = strict_schedule("1f1b", {2, 1}, 2);
  EXPECT_EQ(draw(p, s, simulate(p, s), 6), "   1 12.a.b\n   2 .1a2b.\n");
}

TEST(Validate, NamesTheField) {
  auto message = [](const Pipeline& p) {
    try {
      validate(p, "p.json");
    } catch (const UserError& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  EXPECT_EQ(message(make({{1, 1}, {1, 1}}, {{0, 0}})), "");
  EXPECT_EQ(message(make({}, {})), "[schedule] p.json: stages is empty; give at least one stage");
  EXPECT_EQ(message(make({{1, 1}}, {{0, 0}})),
            "[schedule] p.json: links has 1 entries; give 0, one fewer than stages");
  EXPECT_EQ(message(make({{1, -1}}, {})),
            "[schedule] p.json: stages[0].backward_s is -1; give seconds, 0 to 1e9");
  EXPECT_EQ(message(make({{0, 0}}, {})),
            "[schedule] p.json: stages[0].forward_s and backward_s are 0; give a positive time");
  EXPECT_EQ(message(make({{1, 1}}, {}, {0})),
            "[schedule] p.json: in_flight_limit[0] is 0; give at least 1");
  EXPECT_EQ(message(make({{1, 1}}, {}, {1, 1})),
            "[schedule] p.json: in_flight_limit has 2 entries; give 1, one per stage");
}

}  // namespace
}  // namespace motley::pipeline
