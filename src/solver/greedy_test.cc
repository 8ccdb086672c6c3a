#include "solver/greedy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "reference/brute_force.h"
#include "reference/spmd_gpt.h"

namespace motley::solver {
namespace {

// What Greedy does, word for word: what an item changes is worked out each time it is looked at.
std::vector<int> plain_improve(const Wiring& wiring, const OrderOptions& options,
                               const std::vector<int>& items, int from, int to) {
  std::vector<int> left = wiring.uses;
  double width = 0;
  const auto change = [&](int item) {
    double sum = 0;
    for (int at = wiring.begin[item]; at < wiring.begin[item + 1]; ++at) {
      const int value = wiring.list[at];
      if (left[value] == wiring.uses[value]) sum += wiring.weight[value];
      if (left[value] == 1) sum -= wiring.weight[value];
    }
    return sum;
  };
  const auto eliminate = [&](int item) {
    for (int at = wiring.begin[item]; at < wiring.begin[item + 1]; ++at) {
      const int value = wiring.list[at];
      if (left[value] == wiring.uses[value]) width += wiring.weight[value];
      if (--left[value] == 0) width -= wiring.weight[value];
    }
    return std::exp2(width);
  };
  for (int k = 0; k < from; ++k) eliminate(items[k]);
  const std::vector<int> before = left;
  const auto restart = [&] { left = before, width = 0; };
  std::vector<int> best(to - from);
  std::iota(best.begin(), best.end(), 0);
  double best_cost = 0;
  restart();
  for (int k = from; k < to; ++k) best_cost += eliminate(items[k]);
  Rng rng(options.seed);
  for (int r = 0; r < options.restarts; ++r) {
    restart();
    const double noise = r == 0 ? 0 : 0.5 * (1 + r % 6);
    std::vector<int> pending(to - from), chosen;
    std::iota(pending.begin(), pending.end(), 0);
    double cost = 0;
    while (!pending.empty() && cost < best_cost) {
      int pick = 0;
      double least = std::numeric_limits<double>::infinity();
      for (int c = 0; c < std::min<int>(options.window, static_cast<int>(pending.size())); ++c) {
        const double score =
            change(items[from + pending[c]]) + 0.02 * c + (noise > 0 ? noise * rng.uniform() : 0);
        if (score < least) least = score, pick = c;
      }
      cost += eliminate(items[from + pending[pick]]);
      chosen.push_back(pending[pick]);
      pending.erase(pending.begin() + pick);
    }
    if (pending.empty() && cost < best_cost) best_cost = cost, best = chosen;
  }
  return best;
}

// Items of one or a few nodes that lie together, in a slightly random order.
std::vector<Item> random_items(const Problem& problem, Rng* rng) {
  std::vector<Item> items;
  for (int n = 0; n < static_cast<int>(problem.nodes.size()); ++n)
    if (!items.empty() && rng->chance(0.4))
      items.back().push_back(n);
    else
      items.push_back({n});
  for (size_t i = 1; i < items.size(); ++i)
    if (rng->chance(0.3)) std::swap(items[i - 1], items[i]);
  return items;
}

void check_against_plain(const Problem& problem, uint64_t seed, int* improved) {
  Rng rng(seed);
  const std::vector<Item> items = random_items(problem, &rng);
  const Wiring wiring(problem, items);
  OrderOptions options;
  options.window = static_cast<int>(rng.between(1, 25));
  options.restarts = static_cast<int>(rng.between(1, 40));
  options.seed = seed;
  const int count = static_cast<int>(items.size()), from = static_cast<int>(rng.below(count)),
            to = static_cast<int>(rng.between(from, std::min(count, from + 60)));
  std::vector<int> order(count);
  std::iota(order.begin(), order.end(), 0);
  Greedy greedy(wiring, options);
  for (int k = 0; k < from; ++k) greedy.eliminate(k);
  const std::vector<int> found = greedy.improve(order, from, to);
  EXPECT_EQ(found, plain_improve(wiring, options, order, from, to)) << seed;
  *improved += !std::is_sorted(found.begin(), found.end());
}

TEST(Greedy, FindsWhatThePlainOneFinds) {
  int improved = 0;
  for (uint64_t seed = 0; seed < 300; ++seed) {
    Rng rng(seed);
    check_against_plain(random_problem(seed % 60, {static_cast<int>(rng.between(4, 30)), 2, 5, 4}),
                        seed, &improved);
  }
  for (uint64_t seed = 0; seed < 60; ++seed) {
    GptShape shape;
    shape.layers = static_cast<int>(1 + seed % 4);
    shape.tied = seed % 2 == 0;
    check_against_plain(gpt_problem(shape), seed, &improved);
  }
  EXPECT_GT(improved, 150);
}

}  // namespace
}  // namespace motley::solver
