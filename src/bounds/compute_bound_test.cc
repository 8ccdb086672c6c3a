#include "bounds/compute_bound.h"

#include <gtest/gtest.h>

#include "core/rng.h"
#include "planner/program_plan.h"
#include "sim/simulate.h"

namespace motley::bounds {
namespace {

// With two types the best prices can be looked for on a fine grid.
TEST(Bound, PricesAreNearlyTheBest) {
  Rng rng(1);
  for (int trial = 0; trial < 200; ++trial) {
    const std::vector<int> count = {static_cast<int>(rng.between(1, 8)),
                                    static_cast<int>(rng.between(1, 8))};
    std::vector<std::vector<Seconds>> a;
    for (int64_t op = rng.between(1, 12); op > 0; --op)
      a.push_back({0.1 + rng.uniform(), 0.1 + 5 * rng.uniform()});
    Seconds best = 0;
    constexpr int kGrid = 4000;
    for (int k = 0; k <= kGrid; ++k) {
      const double first = static_cast<double>(k) / kGrid;
      Seconds bound = 0;
      for (const auto& op : a)
        bound += std::min(op[0] * first / count[0], op[1] * (1 - first) / count[1]);
      best = std::max(best, bound);
    }
    const Seconds found = assignment_bound(a, count);
    EXPECT_LE(found, best * (1 + 1e-2));
    EXPECT_GE(found, best * (1 - 2e-2)) << "trial " << trial;
  }
}

// No assignment of whole ops to single devices, and so none in shares, is below it.
TEST(Bound, IsBelowEveryAssignment) {
  Rng rng(2);
  for (int trial = 0; trial < 200; ++trial) {
    const std::vector<int> count = {1, 2};
    std::vector<std::vector<Seconds>> a;
    for (int op = 0; op < 6; ++op) a.push_back({rng.uniform(), 2 * rng.uniform()});
    Seconds least = 1e30;
    for (int choice = 0; choice < 729; ++choice) {  // 3^6
      Seconds busy[3] = {0, 0, 0};
      for (int op = 0, rest = choice; op < 6; ++op, rest /= 3)
        busy[rest % 3] += a[static_cast<size_t>(op)][rest % 3 == 0 ? 0 : 1];
      least = std::min(least, *std::max_element(busy, busy + 3));
    }
    EXPECT_LE(assignment_bound(a, count), least * (1 + 1e-9));
  }
}

// Types of which there are no devices do nothing.
TEST(Bound, CountsTypesThatAreThere) {
  Rng rng(3);
  for (int trial = 0; trial < 100; ++trial) {
    std::vector<std::vector<Seconds>> all, present;
    for (int op = 0; op < 5; ++op) {
      const Seconds a = rng.uniform(), b = rng.uniform(), c = rng.uniform();
      all.push_back({a, 1e-6 * b, c});
      present.push_back({a, c});
    }
    EXPECT_DOUBLE_EQ(assignment_bound(all, {2, 0, 3}), assignment_bound(present, {2, 3}));
  }
}

TEST(Bound, OfAnEvenlyDividedProduct) {
  // 2 * 64 * 512 * 256 operations on devices of 1 and 3 Gflop/s, memory without end.
  const Graph graph = parse_graph(
      "%0 = motley::input(\"x\") : f32[64,512]\n"
      "%1 = motley::parameter(\"w\") : f32[512,256]\n"
      "%2 = aten::mm(%0, %1) : f32[64,256]\n",
      "g.txt");
  DeviceType slow = device_catalogue().back(), fast = slow;
  slow.name = "slow", fast.name = "fast";
  slow.flops = 1e9, fast.flops = 3e9;
  slow.memory_bandwidth = fast.memory_bandwidth = 1e15;
  const Cluster cluster = flat_cluster({slow, fast}, {2, 1}, {LinkKind::switched, 1e9, 1e-5});
  const CostModel model(cluster);
  EXPECT_NEAR(compute_bound(Theory(graph), model, 7), 7 * 2.0 * 64 * 512 * 256 / 5e9, 1e-9);
}

}  // namespace
}  // namespace motley::bounds
