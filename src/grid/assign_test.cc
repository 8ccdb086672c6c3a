// Layers and micro-batches are given to stages and replicas as the best of all ways would.
#include "grid/assign.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "core/rng.h"
#include "grid/search.h"
#include "reference/grid.h"

namespace motley::grid {
namespace {

using testing::ElementsAre;

Assignment try_all(const AssignProblem& p) {
  const int layers = p.layers(), stages = p.stages();
  Assignment best;
  std::vector<int> counts(stages, 0);
  auto fill = [&](auto&& self, int s, int left) -> void {
    if (s + 1 == stages) {
      counts[s] = left;
      const Assignment a = price_assignment(p, counts);
      if (a.feasible && (!best.feasible || a.cost < best.cost)) best = a;
      return;
    }
    for (counts[s] = 1; counts[s] < left; ++counts[s]) {
      const int n = counts[s];
      self(self, s + 1, left - n);
      counts[s] = n;
    }
  };
  if (stages <= layers) fill(fill, 0, layers);
  return best;
}

TEST(Assign, EqualsBruteForce) {
  Rng rng(3);
  int feasible = 0;
  for (int trial = 0; trial < 10000; ++trial) {
    AssignProblem p;
    const int stages = static_cast<int>(rng.between(1, 5));
    const int layers = static_cast<int>(rng.between(1, 11));
    p.micro_batches = static_cast<int>(rng.between(1, 12));
    p.blocking = rng.chance(0.5);
    std::vector<Seconds> layer(layers);
    std::vector<Bytes> bytes(layers);
    for (int l = 0; l < layers; ++l) {
      layer[l] = rng.uniform();
      bytes[l] = static_cast<double>(rng.between(0, 9));
      if (trial % 3 == 0) p.block.push_back(rng.chance(0.6));
    }
    for (int s = 0; s < stages; ++s) {
      const double speed = rng.between(1, 3);
      std::vector<Seconds> time, transfer;
      for (int l = 0; l < layers; ++l) {
        time.push_back(trial % 2 ? layer[l] / speed : rng.uniform());
        transfer.push_back(rng.chance(0.3) ? rng.uniform() : 0);
      }
      p.time.push_back(time);
      if (s + 1 < stages) p.transfer.push_back(transfer);
      if (trial % 5 < 2) {
        p.memory.push_back(bytes);
        p.limit.push_back(static_cast<double>(rng.between(5, 60)));
      }
    }
    const Assignment found = assign_layers(p), best = try_all(p);
    ASSERT_EQ(found.feasible, best.feasible) << trial;
    if (!best.feasible) continue;
    ++feasible;
    ASSERT_NEAR(found.cost, best.cost, 1e-9 * best.cost) << trial;
    EXPECT_NEAR(price_assignment(p, found.stages).cost, found.cost, 1e-9 * best.cost);
  }
  EXPECT_GT(feasible, 5000);
}

// Sums where transfers overlap are found by a faster loop; of ways that cost the same both take one.
TEST(Assign, WithoutTransfersOverlapIsNoMatter) {
  Rng rng(7);
  int feasible = 0;
  for (int trial = 0; trial < 3000; ++trial) {
    const int stages = static_cast<int>(rng.between(1, 8)),
              layers = static_cast<int>(rng.between(stages, 40));
    AssignProblem p;
    p.micro_batches = static_cast<int>(rng.between(1, 12));
    p.transfer.assign(stages - 1, std::vector<Seconds>(layers, 0));
    for (int l = 0; l < layers && trial % 3 == 0; ++l) p.block.push_back(rng.chance(0.6));
    for (int s = 0; s < stages; ++s) {
      // Sums are exact, so that what is equally good is so for both.
      const double speed = std::exp2(rng.between(0, 2));
      std::vector<Seconds> time;
      std::vector<Bytes> bytes;
      for (int l = 0; l < layers; ++l) {
        time.push_back(static_cast<double>(rng.between(0, 2)) / speed);
        bytes.push_back(static_cast<double>(rng.between(0, 3)));
      }
      p.time.push_back(std::move(time));
      if (trial % 2 == 0) continue;
      p.memory.push_back(std::move(bytes));
      p.limit.push_back(static_cast<double>(rng.between(layers / stages, 4 * layers / stages)));
    }
    const Assignment overlapped = assign_layers(p);
    p.blocking = true;
    const Assignment blocking = assign_layers(p);
    ASSERT_EQ(overlapped.feasible, blocking.feasible) << trial;
    feasible += blocking.feasible;
    EXPECT_EQ(overlapped.cost, blocking.cost) << trial;
    EXPECT_EQ(overlapped.stages, blocking.stages) << trial;
    EXPECT_EQ(overlapped.solves, blocking.solves) << trial;
  }
  EXPECT_GT(feasible, 1500);
}

TEST(Assign, NoStageIsAnEmbeddingAlone) {
  AssignProblem p;
  p.time.assign(3, {9, 1, 1, 1});
  p.transfer.assign(2, {0, 0, 0, 0});
  p.block = {false, true, true, true};
  EXPECT_THAT(assign_layers(p).stages, ElementsAre(2, 1, 1));
  p.block.clear();
  p.micro_batches = 8;
  EXPECT_EQ(assign_layers(p).stages[0], 1);
}

TEST(Assign, Baselines) {
  EXPECT_THAT(uniform_layers({false, true, true, true, true, false}, 2), ElementsAre(3, 3));
  EXPECT_THAT(uniform_parameters({10, 1, 1, 1, 1, 1}, 2), ElementsAre(1, 5));
}

TEST(Assign, MicroBatchesAreSharedBySpeed) {
  EXPECT_THAT(share_micro_batches(8, {1, 1, 1, 1}), ElementsAre(2, 2, 2, 2));
  EXPECT_THAT(share_micro_batches(8, {1, 3}), ElementsAre(6, 2));
  Rng rng(4);
  for (int trial = 0; trial < 300; ++trial) {
    const int n = static_cast<int>(rng.between(1, 4)), total = static_cast<int>(rng.between(n, 14));
    std::vector<double> per_micro_batch;
    for (int r = 0; r < n; ++r) per_micro_batch.push_back(static_cast<double>(rng.between(1, 9)));
    double best = std::numeric_limits<double>::infinity();
    std::vector<int> c(n, 1);
    auto fill = [&](auto&& self, int r, int left) -> void {
      if (r + 1 == n) {
        c[r] = left;
        double worst = 0;
        for (int i = 0; i < n; ++i) worst = std::max(worst, c[i] * per_micro_batch[i]);
        best = std::min(best, worst);
        return;
      }
      for (int k = 1; k <= left - (n - 1 - r); ++k) {
        c[r] = k;
        self(self, r + 1, left - k);
      }
    };
    fill(fill, 0, total);
    const std::vector<int> found = share_micro_batches(total, per_micro_batch);
    double worst = 0;
    for (int i = 0; i < n; ++i) worst = std::max(worst, found[i] * per_micro_batch[i]);
    EXPECT_EQ(std::accumulate(found.begin(), found.end(), 0), total);
    EXPECT_DOUBLE_EQ(worst, best);
  }
}

}  // namespace
}  // namespace motley::grid
