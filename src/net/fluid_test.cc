// Transfers that share links: answers worked out by hand, and the definition of max-min fairness.
#include "net/fluid.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "core/rng.h"

namespace motley::net {
namespace {

TEST(Fluid, ThreeTransfersOnTwoLinks) {
  // Links of 10 and 4. A on both, B on the first, C on the second. The second fills at level 4/2: A
  // = C = 2. B takes the rest of the first: 10 - 2 = 8.
  std::vector<NetworkLink> links = {{"x", 10}, {"y", 4}};
  Transfer a{100, {{0, 1}, {1, 1}}}, b{100, {{0, 1}}}, c{100, {{1, 1}}};
  EXPECT_EQ(max_min_rates(links, {&a, &b, &c}), (std::vector<double>{2, 8, 2}));
  // With a cap of 1 on A, C gets 3 and B gets 9.
  a.cap = 1;
  EXPECT_EQ(max_min_rates(links, {&a, &b, &c}), (std::vector<double>{1, 9, 3}));
  // With two flows of C on the second link: level 4/3 of each flow.
  a.cap = std::numeric_limits<double>::infinity();
  c.uses[0].flows = 2;
  auto rates = max_min_rates(links, {&a, &b, &c});
  EXPECT_DOUBLE_EQ(rates[0], 4.0 / 3);
  EXPECT_DOUBLE_EQ(rates[2], 4.0 / 3);
  EXPECT_DOUBLE_EQ(rates[1], 10 - 4.0 / 3);
}

TEST(Fluid, ASharedLinkIsFreedWhenTheShorterEnds) {
  // 10 and 30 bytes on a link of 10: both at 5 until the first ends at 2; the other has 20 left and
  // ends at 2 + 20/10 = 4. A third that starts after a delay of 4 has the link to itself: 4 + 1.
  std::vector<NetworkLink> links = {{"x", 10}};
  Transfer a{10, {{0, 1}}}, b{30, {{0, 1}}}, late{10, {{0, 1}}};
  late.delay = 4;
  FluidResult r = simulate(links, {{a}, {b}, {late}});
  EXPECT_DOUBLE_EQ(r.finish[0], 2);
  EXPECT_DOUBLE_EQ(r.finish[1], 4);
  EXPECT_DOUBLE_EQ(r.finish[2], 5);
  EXPECT_DOUBLE_EQ(r.makespan, 5);
  // In a chain the second starts when the first ends: 10/10 + 30/10.
  EXPECT_DOUBLE_EQ(simulate(links, {{a, b}}).makespan, 4);
}

// The definition of max-min fairness, checked directly: every transfer is at its cap, or crosses a
// full link on which nothing is faster than it.
void expect_max_min(const std::vector<NetworkLink>& links, const std::vector<Transfer>& transfers) {
  std::vector<const Transfer*> active;
  for (const Transfer& t : transfers) active.push_back(&t);
  std::vector<double> rates = max_min_rates(links, active);
  std::vector<double> used(links.size(), 0.0), fastest(links.size(), 0.0);
  for (size_t i = 0; i < active.size(); ++i)
    for (const LinkUse& use : active[i]->uses) {
      used[use.link] += use.flows * rates[i];
      fastest[use.link] = std::max(fastest[use.link], rates[i]);
    }
  for (size_t l = 0; l < links.size(); ++l) EXPECT_LE(used[l], links[l].bandwidth * (1 + 1e-9));
  for (size_t i = 0; i < active.size(); ++i) {
    bool blocked = rates[i] >= active[i]->cap * (1 - 1e-9);
    for (const LinkUse& use : active[i]->uses)
      blocked = blocked || (used[use.link] >= links[use.link].bandwidth * (1 - 1e-9) &&
                            rates[i] >= fastest[use.link] * (1 - 1e-9));
    EXPECT_TRUE(blocked) << "transfer " << i << " could be faster";
  }
}

TEST(Fluid, RandomRatesAreMaxMinFair) {
  Rng rng(1);
  for (int trial = 0; trial < 300; ++trial) {
    std::vector<NetworkLink> links(rng.between(1, 12));
    for (NetworkLink& l : links) l.bandwidth = 1 + 99 * rng.uniform();
    std::vector<Transfer> transfers(rng.between(1, 15));
    for (Transfer& t : transfers) {
      for (int l = 0; l < static_cast<int>(links.size()); ++l)
        if (rng.chance(0.3)) t.uses.push_back({l, 0.5 * static_cast<double>(rng.between(1, 6))});
      if (t.uses.empty() || rng.chance(0.2)) t.cap = 1 + 20 * rng.uniform();
    }
    expect_max_min(links, transfers);
  }
}

TEST(Fluid, RandomChainsMoveEveryByteAndComponentsAgreeWithOneWhole) {
  // A transfer on a link of practically unlimited bandwidth joins all chains in one component
  // without changing any rate: the times must be those of the chains simulated apart.
  Rng rng(2);
  for (int trial = 0; trial < 100; ++trial) {
    std::vector<NetworkLink> links(8);
    for (NetworkLink& l : links) l.bandwidth = static_cast<double>(rng.between(1, 20));
    std::vector<Chain> chains(rng.between(2, 8));
    for (Chain& chain : chains)
      for (int64_t p = rng.between(1, 3); p > 0; --p) {
        Transfer t;
        t.bytes = static_cast<double>(rng.between(1, 50));
        t.uses = {{static_cast<int>(rng.below(8)), 1}};
        t.delay = rng.chance(0.5) ? static_cast<double>(rng.below(4)) : 0;
        chain.push_back(t);
      }
    FluidResult apart = simulate(links, chains);
    links.push_back({"joins all", 1e12});
    for (Chain& chain : chains) chain[0].uses.push_back({8, 1});
    FluidResult whole = simulate(links, chains);
    for (size_t c = 0; c < chains.size(); ++c)
      EXPECT_NEAR(apart.finish[c], whole.finish[c], 1e-9 * whole.finish[c]);
    // A link's bytes need at least bytes/bandwidth.
    std::vector<double> load(8, 0.0);
    for (const Chain& chain : chains)
      for (const Transfer& t : chain) load[t.uses[0].link] += t.bytes;
    for (int l = 0; l < 8; ++l)
      EXPECT_GE(whole.makespan * (1 + 1e-9), load[l] / links[l].bandwidth);
  }
}

}  // namespace
}  // namespace motley::net
