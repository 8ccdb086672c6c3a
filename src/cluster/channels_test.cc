#include "cluster/channels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>

#include "core/rng.h"

namespace motley {
namespace {

using Links = std::vector<std::vector<int>>;  // left, [a][b]

// The most that sets of rings (or chains) carry one way, by trying all sets of all orders.
double most_by_all_sets(int n, const std::vector<DirectLink>& links, bool ring, int first) {
  std::vector<std::vector<double>> speed(n, std::vector<double>(n, 0));
  Links left(n, std::vector<int>(n, 0));
  for (const DirectLink& l : links) {
    speed[l.a][l.b] = speed[l.b][l.a] = l.bandwidth;
    left[l.a][l.b] = left[l.b][l.a] = l.links;
  }
  std::vector<std::vector<int>> orders;
  std::vector<int> order(n);
  std::iota(order.begin(), order.end(), 0);
  do {
    if ((ring && order[0] != 0) || (!ring && first >= 0 && order[0] != first)) continue;
    orders.push_back(order);
  } while (std::next_permutation(order.begin(), order.end()));
  const std::function<double(size_t)> most = [&](size_t from) {
    double best = 0;
    for (size_t o = from; o < orders.size(); ++o) {
      double slowest = std::numeric_limits<double>::infinity();
      bool possible = true;
      const int hops = ring ? n : n - 1;
      for (int i = 0; i < hops; ++i) {
        const int a = orders[o][i], b = orders[o][(i + 1) % n];
        possible = possible && left[a][b] > 0;
        slowest = std::min(slowest, speed[a][b]);
      }
      if (!possible) continue;
      const auto take = [&](int by) {
        for (int i = 0; i < hops; ++i) {
          const int a = orders[o][i], b = orders[o][(i + 1) % n];
          left[a][b] += by;
          left[b][a] = left[a][b];
        }
      };
      take(-1);
      best = std::max(best, slowest + most(o));
      take(1);
    }
    return best;
  };
  return most(0);
}

double sum_of(const std::vector<Channel>& channels) {
  double sum = 0;
  for (const Channel& c : channels) sum += c.bandwidth;
  return sum;
}

TEST(Channels, AgreeWithAllSetsOfAllOrders) {
  Rng rng(1);
  int rings = 0, without = 0;
  for (int trial = 0; trial < 300; ++trial) {
    const int n = static_cast<int>(rng.between(3, 5));
    const bool equal = rng.chance(0.5);
    std::vector<DirectLink> links;
    for (int a = 0; a < n; ++a)
      for (int b = a + 1; b < n; ++b)
        if (const int k = static_cast<int>(rng.between(0, n < 5 ? 3 : 2)); k > 0)
          links.push_back({a, b, k, equal ? 10. : static_cast<double>(rng.between(1, 9)), 0});
    const double ring = sum_of(ring_channels(n, links));
    EXPECT_DOUBLE_EQ(ring, most_by_all_sets(n, links, true, 0));
    const int first = static_cast<int>(rng.between(-1, n - 1));
    EXPECT_DOUBLE_EQ(sum_of(chain_channels(n, links, first)),
                     most_by_all_sets(n, links, false, first));
    for (const Channel& c : chain_channels(n, links, first))
      EXPECT_TRUE(first < 0 || c.order[0] == first);
    ring > 0 ? ++rings : ++without;
  }
  EXPECT_GT(rings, 50);
  EXPECT_GT(without, 20);
}

TEST(Channels, ThroughAMachineLeaveByTheNicTheyCameIn) {
  // A ring 0-1-2-3: from 0 to its neighbour 1 through all; from 0 to 2 there is no chain.
  const std::vector<DirectLink> ring = {
      {0, 1, 1, 9, 0}, {1, 2, 1, 9, 0}, {2, 3, 1, 9, 0}, {0, 3, 1, 9, 0}};
  EXPECT_EQ(chain_from(4, ring, {0, 1}), (std::vector<int>{0, 3, 2, 1}));
  EXPECT_EQ(chain_from(4, ring, {0, 2}), (std::vector<int>{0, 1, 2, 3}));
  EXPECT_EQ(chain_from(4, {ring[0], ring[2]}, {0, 1}), std::vector<int>());
}

TEST(Channels, OfTwoDevicesAreTheirLinks) {
  const std::vector<DirectLink> links = {{0, 1, 2, 25, 0}};
  EXPECT_EQ(ring_bandwidth(2, ring_channels(2, links)), 50);
  EXPECT_EQ(chain_channels(2, links, 1)[0].order, (std::vector<int>{1, 0}));
}

TEST(Channels, OfARingAndOfALine) {
  std::vector<DirectLink> links = {{0, 1, 3, 20, 0}, {1, 2, 3, 20, 0}, {0, 2, 3, 20, 0}};
  EXPECT_EQ(direct_bandwidth(3, links), 120);  // three rings, both ways
  links.pop_back();  // 0 - 1 - 2: half of the bandwidth, 2 (n-1) / n of it
  EXPECT_EQ(direct_bandwidth(3, links), 0.5 * 60 * 4 / 3);
  EXPECT_EQ(direct_bandwidth(3, {links[0]}), 0);
}

}  // namespace
}  // namespace motley
