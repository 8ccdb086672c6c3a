#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "core/rng.h"
#include "pipeline/schedules.h"
#include "pipeline/simulate.h"

namespace motley::pipeline {
namespace {

// Unequal stages of integral times; of the backward pass any part may be split off.
Pipeline random_pipeline(Rng* rng, int least, int most) {
  Pipeline p;
  const int stages = static_cast<int>(rng->between(least, most));
  for (int i = 0; i < stages; ++i) {
    const auto backward = static_cast<double>(rng->between(2, 40));
    p.stages.push_back({static_cast<double>(rng->between(1, 20)), backward,
                        rng->chance(0.15) ? 0 : std::floor(backward * rng->uniform())});
  }
  for (int i = 0; i + 1 < stages; ++i)
    p.links.push_back({rng->chance(0.3) ? 0.0 : static_cast<double>(rng->below(20)),
                       rng->chance(0.3) ? 0.0 : static_cast<double>(rng->below(20))});
  return p;
}

void limit(Rng* rng, int most, Pipeline* p) {
  for (int i = 0; i < p->size(); ++i) {
    p->in_flight_limit.push_back(static_cast<int>(rng->between(1, most)));
    if (rng->chance(0.5)) p->waiting.resize(p->stages.size(), 1);
  }
  for (double& waiting : p->waiting) waiting = 0.25 * static_cast<double>(rng->between(1, 6));
}

// Of strict orders: at most what the limits allow, with what waits counted in its own size.
bool within(const Pipeline& p, const Launches& l) {
  for (int i = 0; i < p.size(); ++i) {
    const double waiting = p.waiting.empty() ? 1 : p.waiting[i];
    if (l.counts[i] + waiting * l.weights_behind[i] > p.in_flight_limit[i] + 1e-9) return false;
  }
  return true;
}

TEST(Split, PeriodEqualsSimulatedSteadyState) {
  Rng rng(1);
  for (int round = 0; round < 400; ++round) {
    const Pipeline p = random_pipeline(&rng, 2, 8);
    std::vector<int> counts(p.size(), 1), behind(p.size(), 0);
    for (int i = p.size() - 2; i >= 0; --i)
      counts[i] = counts[i + 1] + static_cast<int>(rng.between(0, 3));
    for (int& b : behind) b = static_cast<int>(rng.between(0, 3));
    constexpr int kBatch = 3000;
    const Schedule schedule = strict_schedule("test", counts, kBatch, behind);
    const Timeline timeline = simulate(p, schedule);
    std::vector<Seconds> start;
    for (size_t k = 0; k < schedule.order[0].size(); ++k)
      if (schedule.order[0][k].kind == PassKind::backward) start.push_back(timeline.start[0][k]);
    const Seconds expected = period(p, counts, true);
    const Seconds measured = (start[kBatch - 100] - start[500]) / (kBatch - 600);
    ASSERT_NEAR(measured, expected, 0.01 * expected) << "round " << round;
    ASSERT_LE(expected, period(p, counts) * (1 + 1e-12));
  }
}

TEST(Split, ExactCountsAreElementwiseMinimal) {
  Rng rng(2);
  int fewer = 0;
  for (int round = 0; round < 1000; ++round) {
    const Pipeline p = random_pipeline(&rng, 2, 4);
    const Seconds target = least_period(p);
    const std::vector<int> least = exact_counts(p, target, true);
    ASSERT_LE(period(p, least, true), target * (1 + 1e-9));
    std::vector<int> counts(p.size(), 1);
    std::function<void(int)> grow = [&](int i) {
      if (i < 0) {
        if (period(p, counts, true) > target * (1 - 1e-9)) return;
        for (int k = 0; k < p.size(); ++k) ASSERT_GE(counts[k], least[k]);
        return;
      }
      for (counts[i] = counts[i + 1]; counts[i] <= least[i] + 2; ++counts[i]) grow(i - 1);
    };
    grow(p.size() - 2);
    fewer += exact_counts(p, target)[0] > least[0];
  }
  EXPECT_GT(fewer, 300);  // less memory for the same period
}

TEST(Split, RunsEveryPassOnceAndBoundsHold) {
  Rng rng(3);
  int tight = 0;
  for (int round = 0; round < 1000; ++round) {
    Pipeline p = random_pipeline(&rng, 1, 6);
    if (rng.chance(0.5)) limit(&rng, 8, &p);
    const int batch = static_cast<int>(rng.between(1, 24));
    const ScheduleRun run = run_schedule(*find_schedule("zero-bubble"), p, batch);
    ASSERT_GE(run.timeline.makespan * (1 + 1e-12), run.lower_bound);
    tight += run.timeline.makespan <= run.lower_bound * (1 + 1e-9);
    for (int i = 0; i < p.size(); ++i) {
      std::vector<int> seen(batch, 0);
      for (const Task& t : run.schedule.order[i])
        ASSERT_EQ(seen[t.micro_batch]++, static_cast<int>(t.kind));
      ASSERT_EQ(std::count(seen.begin(), seen.end(), 3), batch);
      if (!p.in_flight_limit.empty() && p.waiting.empty()) {
        ASSERT_LE(run.timeline.in_flight[i], p.in_flight_limit[i]);
      }
    }
  }
  EXPECT_GT(tight, 100);
}

// All counts and lags of small pipelines, which the search tries too in the first half of the rounds.
TEST(Split, SearchIsAsGoodAsAllStrictOrders) {
  Rng rng(4);
  int equal = 0;
  double worst = 1;
  constexpr int kRounds = 2000;
  for (int round = 0; round < kRounds; ++round) {
    const bool small = round < kRounds / 2;
    Pipeline p = random_pipeline(&rng, 2, 3);
    limit(&rng, small ? 4 : 5, &p);
    const int batch = static_cast<int>(rng.between(2, small ? 5 : 8));
    const Launches found = zero_bubble_launches(p, batch);
    ASSERT_TRUE(within(p, found));
    auto makespan = [&](const Launches& l) {
      return simulate(p, strict_schedule("", l.counts, batch, l.weights_behind)).makespan;
    };
    Seconds best = std::numeric_limits<double>::infinity();
    Launches l{std::vector<int>(p.size(), 1), std::vector<int>(p.size(), 0)};
    std::function<void(int)> grow = [&](int i) {
      if (i == p.size()) {
        if (within(p, l)) best = std::min(best, makespan(l));
        return;
      }
      for (l.counts[i] = 1; l.counts[i] <= (i == 0 ? 5 : l.counts[i - 1]); ++l.counts[i])
        for (l.weights_behind[i] = 0; l.weights_behind[i] <= batch; ++l.weights_behind[i])
          grow(i + 1);
    };
    grow(0);
    if (small) {
      ASSERT_LE(makespan(found), best * (1 + 1e-9));
    }
    equal += makespan(found) <= best * (1 + 1e-9);
    worst = std::max(worst, makespan(found) / best);
  }
  std::printf("equal in %d of %d, at worst %.4f times as long\n", equal, kRounds, worst);
  EXPECT_GE(equal, kRounds - 10);
  EXPECT_LE(worst, 1.05);
}

// Never slower than the best of the others with the same memory.
TEST(Split, NeverSlowerThanWhole) {
  Rng rng(5);
  int faster = 0;
  double sum = 0;
  constexpr int kRounds = 100;
  for (int round = 0; round < kRounds; ++round) {
    Pipeline p = random_pipeline(&rng, 2, 8);
    for (int i = 0; i < p.size(); ++i)
      p.in_flight_limit.push_back(static_cast<int>(rng.between(1, 2 * p.size())));
    const int batch = static_cast<int>(rng.between(2, 64));
    Seconds best = std::numeric_limits<double>::infinity();
    for (const ScheduleDef& def : schedule_table())
      if (def.launches == nullptr)
        best = std::min(best, run_schedule(def, p, batch).timeline.makespan);
    const ScheduleRun split = run_schedule(*find_schedule("zero-bubble"), p, batch);
    for (int i = 0; i < p.size(); ++i) ASSERT_LE(split.timeline.in_flight[i], p.in_flight_limit[i]);
    ASSERT_LE(split.timeline.makespan, best * (1 + 1e-12)) << "round " << round;
    faster += split.timeline.makespan < best * (1 - 1e-9);
    sum += best / split.timeline.makespan;
  }
  std::printf("faster in %d of %d, %.3f times as fast in the mean\n", faster, kRounds,
              sum / kRounds);
  EXPECT_GT(faster, 50);
}

// Equal stages, in the memory that 1F1B's first stage takes.
TEST(Split, LeavesAThirdOfTheBubble) {
  for (int stages : {2, 4, 8, 16})
    for (int batch : {2 * stages, 4 * stages, 64}) {
      Pipeline p;
      p.stages.assign(stages, {1, 2, 1});
      p.links.assign(stages - 1, {0, 0});
      p.in_flight_limit.assign(stages, stages);
      auto bubble = [&](const char* name) {
        return run_schedule(*find_schedule(name), p, batch).timeline.makespan - 3.0 * batch;
      };
      EXPECT_EQ(bubble("1f1b"), 3 * (stages - 1));
      EXPECT_LE(bubble("zero-bubble"), (stages - 1) * (1 + 1e-9)) << stages << " " << batch;
    }
}

}  // namespace
}  // namespace motley::pipeline
