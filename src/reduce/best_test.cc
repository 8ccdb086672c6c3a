#include "reduce/best.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>

#include "cluster/cluster.h"
#include "core/error.h"
#include "core/rng.h"

namespace motley::reduce {
namespace {

using net::Algorithm;

Cluster a100(int count) {
  return parse_cluster(
      fmt::format("name: c\nlink: {{bandwidth: 8 GB/s}}\n"
                  "groups:\n  - {{name: node, count: {}, link: {{bandwidth: 270 GB/s}}, "
                  "devices: [{{type: A100-40GB, count: 16}}]}}\n",
                  count),
      "c");
}

TEST(Best, HandComputedOnTwoNodesOfSixteen) {
  // [[2 16]], S = 16 GB: one ring of 32: 2 * 31/32 * 16 / 8 = 3.875 s. Reduce-scatter inside
  // 15/16 * 16 / 270, sixteen all-reduces of 1 GB across 16 * 1 / 8 = 2, all-gather inside the
  // same.
  net::Topology network(a100(2));
  Hierarchy h = parse_hierarchy("node:2,gpu:16");
  PlacementCost cost({&network, Algorithm::ring, {}}, 16e9, h, placements(h, {32})[0], {0});
  EXPECT_NEAR(cost.all_reduce(), 3.875, 1e-9);
  Program program = {{{Shape::inside, 1, 0}, Collective::reduce_scatter},
                     {{Shape::parallel, 1, 0}, Collective::all_reduce},
                     {{Shape::inside, 1, 0}, Collective::all_gather}};
  double expected = 2 * 15.0 / 16 * 16 / 270 + 2;
  EXPECT_NEAR(cost.program(program), expected, 1e-9);
  EXPECT_NEAR(best_program(program_space(2, 5), &cost).seconds, expected, 1e-9);
  // On trees the all-reduce across is one of two nodes, S/16 through each way of a NIC: the same 2
  // s.
  PlacementCost tree({&network, Algorithm::tree, {}}, 16e9, h, placements(h, {32})[0], {0});
  EXPECT_NEAR(tree.program(program), expected, 1e-9);
}

TEST(Best, AReductionOfOneDeviceIsNothing) {
  net::Topology network(a100(2));
  Hierarchy h = parse_hierarchy("node:2,gpu:16");
  for (const Matrix& m : placements(h, {1, 32})) {
    PlacementCost cost({&network, Algorithm::ring, {}}, 1e9, h, m, {0});
    EXPECT_EQ(cost.all_reduce(), 0);
    BestProgram best = best_program(program_space(0, 5), &cost);
    EXPECT_TRUE(best.program.empty());
    EXPECT_EQ(best.seconds, 0);
  }
}

TEST(Best, TheClusterMustHaveTheHierarchysDevices) {
  net::Topology network(a100(2));
  Hierarchy h = parse_hierarchy("node:4,gpu:16");
  EXPECT_THROW(PlacementCost({&network, Algorithm::ring, {}}, 1e9, h, placements(h, {64})[0], {0}),
               UserError);
}

// A cluster of the given sizes, outermost first, with random links, uplinks and latencies; or, if
// `regular` is false, one whose leaf groups differ in size though the number of devices is the
// same.
Cluster random_cluster(Rng* rng, const std::vector<int>& sizes, bool regular) {
  Cluster c;
  c.types = {device_catalogue()[0]};
  int total = 1;
  for (int s : sizes) total *= s;
  std::function<void(GroupId, size_t, int)> grow = [&](GroupId parent, size_t depth, int devices) {
    GroupId id(static_cast<int64_t>(c.groups.size()));
    c.groups.emplace_back();
    Group g;
    g.name = "g";
    g.parent = parent;
    auto kind = rng->chance(0.6)   ? LinkKind::switched
                : rng->chance(0.5) ? LinkKind::ring
                                   : LinkKind::bus;
    g.link = {kind, static_cast<double>(rng->between(1, 40)) * 1e9,
              static_cast<double>(rng->below(3)) * 1e-5};
    if (parent.valid() && rng->chance(0.3))
      g.uplink = static_cast<double>(rng->between(1, 40)) * 1e9;
    g.first_device = c.size();
    g.device_count = devices;
    if (depth + 1 < sizes.size()) {
      int left = devices;
      for (int k = sizes[depth]; k > 0 && left > 0; --k) {
        int share = regular  ? devices / sizes[depth]
                    : k == 1 ? left
                             : static_cast<int>(rng->between(1, std::max(1, left - k + 1)));
        g.children.push_back(GroupId(static_cast<int64_t>(c.groups.size())));
        grow(id, depth + 1, share);
        left -= share;
      }
    } else {
      for (int d = 0; d < devices; ++d) c.devices.push_back({0, id});
    }
    c.groups[id.index] = g;
  };
  grow(GroupId(), 0, total);
  return c;
}

struct Drawn {
  std::vector<int> sizes, axes;
};
const std::vector<Drawn> kDrawn = {{{2, 4}, {4, 2}},       {{3, 4}, {6, 2}},    {{2, 2, 2}, {2, 4}},
                                   {{2, 2, 3}, {6, 2}},    {{4, 4}, {2, 4, 2}}, {{2, 3, 2}, {12}},
                                   {{2, 2, 2, 2}, {8, 2}}, {{4, 2, 2}, {4, 4}}};

TEST(Best, EqualsTheBestOfAllPrograms) {
  Rng rng(11);
  int64_t simulated = 0, listed = 0;
  for (int trial = 0; trial < 200; ++trial) {
    const Drawn& drawn = kDrawn[rng.below(static_cast<int64_t>(kDrawn.size()))];
    Hierarchy h;
    for (int s : drawn.sizes) h.push_back({"l", s});
    net::Topology network(random_cluster(&rng, drawn.sizes, rng.chance(0.6)));
    ASSERT_EQ(network.devices(), devices_of(h));
    net::Tuning tuning{rng.chance(0.5) ? 1e-3 : 0, rng.chance(0.5) ? 0.6 : 1};
    auto algorithm = static_cast<Algorithm>(rng.below(4));
    int limit = static_cast<int>(rng.between(2, 4));
    ProgramSpaces spaces(limit);
    std::vector<int> reduce = {0};
    if (drawn.axes.size() == 3) reduce = {0, 2};
    for (const Matrix& m : placements(h, drawn.axes)) {
      CostModel model{&network, algorithm, tuning};
      PlacementCost cost(model, 1e9, h, m, reduce), all(model, 1e9, h, m, reduce);
      const ProgramSpace& space = spaces.of(cost.levels());
      BestProgram best = best_program(space, &cost);
      double least = std::numeric_limits<double>::infinity();
      for (const Program& p : programs_of(space)) least = std::min(least, all.program(p));
      EXPECT_EQ(best.seconds, least) << to_string(m) << " " << net::to_string(algorithm);
      EXPECT_EQ(cost.program(best.program), best.seconds);
      EXPECT_TRUE(verify(best.program, cost.hierarchy().levels));
      // Both bounds, everywhere: of each step, and of the cheapest way on from each state.
      std::vector<double> left(space.states.size(), std::numeric_limits<double>::infinity());
      for (size_t i = 0; i < left.size(); ++i)
        if (space.states[i].goal) left[i] = 0;
      for (int round = 0; round < limit; ++round)
        for (size_t i = left.size(); i-- > 0;)
          for (const Transition& t : space.states[i].next) {
            double step = all.step(t.step, space.states[i].scattered);
            EXPECT_LE(cost.at_least(t.step, space.states[i].scattered), step);
            left[i] = std::min(left[i], step + left[t.to]);
          }
      for (size_t i = 0; i < left.size(); ++i)
        EXPECT_LE(cost.at_least(space.states[i]), left[i]) << to_string(m);
      simulated += cost.steps_simulated(), listed += all.steps_simulated();
    }
  }
  EXPECT_LT(simulated, listed);
}

TEST(Best, JointPlacementEqualsTryingEveryPlacement) {
  Rng rng(12);
  for (int trial = 0; trial < 25; ++trial) {
    const Drawn& drawn = kDrawn[rng.below(static_cast<int64_t>(kDrawn.size()))];
    Hierarchy h;
    for (int s : drawn.sizes) h.push_back({"l", s});
    net::Topology network(random_cluster(&rng, drawn.sizes, rng.chance(0.7)));
    CostModel model{&network, rng.chance(0.5) ? Algorithm::ring : Algorithm::tree, {}};
    std::vector<Reduction> reductions;
    for (int a = 0; a < static_cast<int>(drawn.axes.size()); ++a)
      reductions.push_back({{a}, 1e9 * static_cast<double>(rng.between(1, 20))});
    JointPlacement joint = place_jointly(model, h, drawn.axes, reductions, 4);
    ProgramSpaces spaces(4);
    double least = std::numeric_limits<double>::infinity();
    for (const Matrix& m : placements(h, drawn.axes)) {
      double total = 0;
      for (const Reduction& r : reductions) {
        PlacementCost cost(model, r.bytes, h, m, r.axes);
        double one = std::numeric_limits<double>::infinity();
        for (const Program& p : programs_of(spaces.of(cost.levels())))
          one = std::min(one, cost.program(p));
        total += one;
      }
      least = std::min(least, total);
    }
    EXPECT_EQ(joint.seconds, least);
    EXPECT_EQ(joint.programs.size(), reductions.size());
  }
}

TEST(Best, JointPlacementKeepsWhatItHasWhenTimeIsUp) {
  const Hierarchy h = parse_hierarchy("node:4,gpu:16");
  const net::Topology network(a100(4));
  const CostModel model{&network, Algorithm::ring, {}};
  const std::vector<int> axes = {4, 4, 4};
  const std::vector<Reduction> reductions = {{{0}, 1e9}, {{1}, 2e9}, {{2}, 3e9}};
  const JointPlacement all = place_jointly(model, h, axes, reductions, 3);
  int none = 0, worse = 0, same = 0;
  for (int work = 0; work < 4000 && same == 0; work += 10) try {
      const Deadline deadline(Deadline::Limits{.work = work});
      const JointPlacement some = place_jointly(model, h, axes, reductions, 3, deadline);
      ASSERT_EQ(some.programs.size(), reductions.size());
      EXPECT_GE(some.seconds, all.seconds);
      ++(some.seconds > all.seconds ? worse : same);
    } catch (const TimeIsUp&) {
      ++none;
    }
  EXPECT_GT(none, 0);
  EXPECT_GT(worse + same, 0);
  EXPECT_EQ(same, 1);
}

TEST(Best, JointPlacementPutsTheHeavyReductionInside) {
  // 2 x 16, axes 2 and 16: the axis that reduces more bytes goes inside the node, where there is
  // room for it. Axis 0 (2 wide) with all the bytes: [[1 2] [2 8]]; axis 1: [[2 1] [1 16]].
  net::Topology network(a100(2));
  Hierarchy h = parse_hierarchy("node:2,gpu:16");
  CostModel model{&network, Algorithm::ring, {}};
  EXPECT_EQ(to_string(place_jointly(model, h, {2, 16}, {{{0}, 1e10}, {{1}, 1e6}}).matrix),
            "[[1 2] [2 8]]");
  EXPECT_EQ(to_string(place_jointly(model, h, {2, 16}, {{{0}, 1e6}, {{1}, 1e10}}).matrix),
            "[[2 1] [1 16]]");
}

}  // namespace
}  // namespace motley::reduce
