#include "reduce/cluster.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "cluster/part.h"
#include "core/rng.h"
#include "net/collectives.h"
#include "net/traffic.h"
#include "reduce/best.h"

namespace motley::reduce {
namespace {

Cluster two_level(const std::vector<int>& nodes, BytesPerSecond outer, BytesPerSecond inner) {
  std::string yaml =
      fmt::format("name: c\nlink: {{bandwidth: {} B/s, latency: 10 us}}\ngroups:\n", outer);
  for (size_t i = 0; i < nodes.size(); ++i)
    yaml += fmt::format(
        "  - name: node{}\n    link: {{bandwidth: {} B/s, latency: 1 us}}\n    devices: [{{type: "
        "V100-16GB, "
        "count: {}}}]\n",
        i, inner, nodes[i]);
  return parse_cluster(yaml, "c.yaml");
}

TEST(ClusterReductions, EqualNodesGetASynthesisedProgramThatIsSoundAndFaster) {
  for (const auto& [nodes, inner] : std::vector<std::pair<std::vector<int>, double>>{
           {{2, 2}, 1e10}, {{4, 4, 4}, 1e10}, {{8, 8, 8, 8}, 5e9}}) {
    const Cluster cluster = two_level(nodes, 1e9, inner);
    const auto programs = reductions_of_all(cluster);
    ASSERT_EQ(programs.size(), 1u);
    const ReductionProgram& p = programs[0];
    EXPECT_EQ(check(p.steps, cluster.size()), "");
    const CollectiveModel plain(cluster), with(cluster, programs);
    for (double bytes : {p.from, 8 * p.from, 1e9}) {
      EXPECT_EQ(with.all_reduce(bytes), p.fixed + bytes * p.seconds_per_byte);
      EXPECT_LT(with.all_reduce(bytes), 0.97 * plain.all_reduce(bytes));
    }
    EXPECT_EQ(with.all_reduce(p.from / 2), plain.all_reduce(p.from / 2));
    // Reduce-scatter inside, all-reduce across, all-gather inside: an n-th of the ring's traffic
    // goes over the slow links of n nodes.
    const double n = static_cast<double>(nodes.size());
    EXPECT_NEAR(p.seconds_per_byte, 2 * (n - 1) / n / 1e9 + 2 * (nodes[0] - 1.) / nodes[0] / inner,
                1e-3 / 1e9);
  }
}

// Small messages took 3 ms a round and large ones 0.3 ms and their bytes: what the least is made of
// is not paid again by large ones.
TEST(ClusterReductions, WhatSmallMessagesTakeAtLeastIsNotAddedToLargeOnes) {
  Cluster cluster = two_level({2, 2}, 1e8, 1e10);
  cluster.groups[0].measured = {{Collective::all_reduce, 3e-4, 1e8, 3e-3}};
  const auto programs = reductions_of_all(cluster);
  ASSERT_EQ(programs.size(), 1u);
  const ReductionProgram& p = programs[0];
  const CollectiveModel plain(cluster), with(cluster, programs);
  EXPECT_NEAR(p.least, 10 * p.fixed, 1e-9);
  EXPECT_LT(p.least, plain.all_reduce(0));
  EXPECT_EQ(with.all_reduce(p.from), p.seconds(p.from));
  EXPECT_GE(with.all_reduce(p.from), p.least);
  EXPECT_EQ(with.all_reduce(1e8), p.fixed + 1e8 * p.seconds_per_byte);
  for (double bytes = p.from; bytes < 1e9; bytes *= 2)
    EXPECT_LT(with.all_reduce(bytes), 0.97 * plain.all_reduce(bytes));
}

TEST(ClusterReductions, RepricedProgramsTakeWhatTheyWouldHaveBeenFoundToTake) {
  const Cluster before = two_level({4, 4, 4}, 1e9, 1e10);
  for (const auto& [outer, inner] : {std::pair(2e9, 1e10), {1e9, 1.1e10}, {1.1e9, 1e10}}) {
    const Cluster after = two_level({4, 4, 4}, outer, inner);
    std::vector<ReductionProgram> programs = reductions_of_all(before);
    const std::vector<ReductionProgram> found = reductions_of_all(after);
    ASSERT_EQ(programs.size(), 1u);
    ASSERT_EQ(programs[0].steps, found.at(0).steps);
    reprice(before, after, &programs);
    EXPECT_NEAR(programs[0].fixed, found[0].fixed, 1e-3 * found[0].fixed);
    EXPECT_NEAR(programs[0].seconds_per_byte, found[0].seconds_per_byte,
                1e-3 * found[0].seconds_per_byte);
  }
}

TEST(ClusterReductions, UnequalNodesGoThroughTheirHeads) {
  const Cluster cluster = two_level({5, 2}, 1e8, 1e11);
  const auto programs = reductions_of_all(cluster);
  ASSERT_EQ(programs.size(), 1u);
  EXPECT_EQ(check(programs[0].steps, cluster.size()), "");
  ASSERT_EQ(programs[0].steps.size(), 3u);
  EXPECT_EQ(programs[0].steps[1].groups, (net::Groups{{0, 5}}));
}

// Four replicas of stages of two on two nodes: the first devices of the replicas reduce together
// with the second ones, and both share the link between the nodes.
TEST(ClusterReductions, GroupsThatReduceTogetherShareTheLinks) {
  const Cluster cluster = two_level({4, 4}, 1e9, 1e10);
  const net::Groups groups = {{0, 6, 2, 4}, {1, 7, 3, 5}};  // in any order
  const auto programs = reductions_of(cluster, groups);
  ASSERT_EQ(programs.size(), 2u);
  for (size_t g = 0; g < 2; ++g) {
    EXPECT_EQ(programs[g].devices, groups[g]);
    EXPECT_EQ(check(programs[g].steps, 4), "");
    EXPECT_EQ(programs[g].steps[0].groups, (net::Groups{{0, 2}, {3, 1}}));  // ranks
    // Each of the two sends S between the nodes, and S/2 twice inside.
    EXPECT_NEAR(programs[g].seconds_per_byte, 2 * 1.0 / 1e9 + 2 * 0.5 / 1e10, 1e-3 / 1e9);
  }
  EXPECT_EQ(programs_for(programs, {1, 7, 3, 5}, 8), std::vector{programs[1]});
  EXPECT_TRUE(programs_for(programs, {0, 1}, 8).empty());
  // Groups on one node have nothing to gain.
  EXPECT_TRUE(reductions_of(cluster, {{0, 1, 2}, {4, 5, 6}}).empty());
}

TEST(ClusterReductions, OneLevelHasNone) {
  DeviceType type = device_catalogue()[0];
  EXPECT_TRUE(reductions_of_all(flat_cluster({type}, {8}, {})).empty());
}

// The times here follow the device states; PlacementCost follows the levels.
TEST(ClusterReductions, TimesEqualThoseOfTheSynthesis) {
  const Cluster cluster = two_level({4, 4, 4, 4}, 1e9, 7e9);
  const net::Topology network(cluster);
  const Hierarchy hierarchy = *hierarchy_of(cluster);
  const Matrix matrix = placements(hierarchy, {16})[0];
  PlacementCost cost({&network, net::Algorithm::ring, {}}, 1e8, hierarchy, matrix, {0});
  for (const Program& program : programs_of(program_space(cost.levels(), 4))) {
    std::vector<ReductionStep> steps;
    for (const Step& step : program)
      steps.push_back({step.collective, lower(step.form, cost.hierarchy())});
    EXPECT_EQ(check(steps, 16), "");
    EXPECT_NEAR(seconds_of(steps, network, 1e8), cost.program(program), 1e-12);
  }
}

// The axis that moves more bytes is the one inside the nodes.
TEST(ClusterReductions, AxesArePlacedJointly) {
  const Cluster cluster = two_level({4, 4}, 1e9, 7e9);
  EXPECT_EQ(devices_jointly(cluster, {2, 4}, {{{0}, 1e6}, {{1}, 1e10}}),
            (std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7}));
  const std::vector<int> turned = devices_jointly(cluster, {4, 2}, {{{0}, 1e10}, {{1}, 1e6}});
  ASSERT_EQ(turned.size(), 8u);
  for (int t = 0; t < 2; ++t)
    for (int r = 1; r < 4; ++r) EXPECT_EQ(turned[r * 2 + t] / 4, turned[t] / 4);
  // Pipelines of two stages have an axis that reduces nothing; every device is there once.
  std::vector<int> three = devices_jointly(cluster, {2, 2, 2}, {{{1}, 1e8}, {{2}, 1e9}});
  std::sort(three.begin(), three.end());
  EXPECT_EQ(three, (std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_TRUE(devices_jointly(cluster, {2, 3}, {{{0}, 1}}).empty());
  EXPECT_TRUE(devices_jointly(two_level({4, 2}, 1e9, 7e9), {2, 3}, {{{0}, 1}}).empty());
}

// What a ring takes in the cluster as its group sees it is what the rings of all groups at once
// take in the simulator of the whole.
TEST(ClusterReductions, SharedLinksCostWhatTheyDoTogether) {
  Rng rng(11);
  int shared = 0;
  for (int trial = 0; trial < 200; ++trial) {
    std::string yaml = "name: c\nlink: {bandwidth: 1 GB/s, latency: 10 us}\ngroups:\n";
    std::vector<int> first = {0};
    const int64_t nodes = rng.between(2, 4), per_node = rng.between(1, 4) * 2;
    for (int64_t n = 0; n < nodes; ++n) {
      const char* kind = rng.chance(0.5) ? "switch" : "bus";
      yaml += fmt::format(
          "  - {{name: n{}, {}link: {{kind: {}, bandwidth: {} GB/s, latency: 1 us}}, devices: "
          "[{{type: T4, count: {}}}]}}\n",
          n, rng.chance(0.3) ? "uplink: 3 GB/s, " : "", kind, rng.between(2, 20), per_node);
      first.push_back(first.back() + static_cast<int>(per_node));
    }
    const Cluster cluster = parse_cluster(yaml, "c.yaml");
    // As virtual devices take them: the i-th of every two, or of every node.
    const int size = rng.chance(0.5) ? 2 : static_cast<int>(per_node);
    net::Groups groups(size);
    for (int d = 0; d < cluster.size(); ++d) groups[d % size].push_back(d);
    const Cluster seen = shared_by(cluster, groups);
    const net::Topology network(cluster);
    auto together = [&](Bytes bytes) {
      return net::collective_time(network, Collective::all_reduce, net::Algorithm::ring, groups,
                                  bytes);
    };
    Seconds slowest = 0;
    for (const std::vector<int>& group : groups) {
      const net::Topology part(part_of(seen, group));
      net::Groups all(1);
      for (size_t i = 0; i < group.size(); ++i) all[0].push_back(static_cast<int>(i));
      slowest = std::max(slowest, net::collective_time(part, Collective::all_reduce,
                                                       net::Algorithm::ring, all, 1e9));
    }
    EXPECT_NEAR(slowest / together(1e9), 1, 1e-3) << yaml << size;
    const net::Topology alone(part_of(cluster, groups[0]));
    net::Groups one(1);
    for (size_t i = 0; i < groups[0].size(); ++i) one[0].push_back(static_cast<int>(i));
    shared += net::collective_time(alone, Collective::all_reduce, net::Algorithm::ring, one, 1e9) <
              0.9 * slowest;
  }
  EXPECT_GT(shared, 50);
  // Neighbours on a ring do not meet; those that reach across do.
  const Cluster ring = parse_cluster(
      "name: r\nlink: {kind: ring, bandwidth: 1 GB/s}\ndevices: [{type: T4, count: 8}]\n",
      "r.yaml");
  EXPECT_EQ(shared_by(ring, {{0, 1}, {2, 3}, {4, 5}, {6, 7}}).groups[0].link.bandwidth, 1e9);
  EXPECT_EQ(shared_by(ring, {{0, 2}, {1, 3}}).groups[0].link.bandwidth, 0.5e9);
  EXPECT_EQ(shared_by(ring, {{0, 7}, {5, 6}}).groups[0].link.bandwidth, 1e9);
}

// One reduction over the ranks and the replicas of virtual devices: three steps, the bytes of one
// tensor between machines, however many devices they have; no slower than anything else offered.
TEST(ClusterReductions, JointReductionsAreThreeStepsOverBothAxes) {
  const Cluster cluster = two_level({4, 4, 2}, 1e9, 1e10);  // 5 virtual devices of 2
  const net::Groups groups = {{0, 2, 4, 6, 8}, {1, 3, 5, 7, 9}};
  const ReductionProgram joint = joint_reduction(cluster, groups, 1e8);
  EXPECT_EQ(check(joint.steps, 10), "");
  ASSERT_EQ(joint.steps.size(), 3u);
  EXPECT_EQ(joint.from, 0);
  std::vector<int> all(10);
  std::iota(all.begin(), all.end(), 0);
  EXPECT_EQ(joint.devices, all);
  const CollectiveModel plain(cluster);
  EXPECT_LT(joint.fixed + 1e8 * joint.seconds_per_byte, 0.97 * plain.plain_all_reduce(1e8));
  const net::Topology network(cluster);
  EXPECT_NEAR((joint.fixed + 1e8 * joint.seconds_per_byte) / seconds_of(joint.steps, network, 1e8),
              1, 1e-3);
  // Devices that are joined alike reduce on one ring.
  const Cluster flat = flat_cluster({device_catalogue()[0]}, {4}, {LinkKind::switched, 1e9, 1e-5});
  EXPECT_EQ(joint_reduction(flat, {{0, 2}, {1, 3}}, 1e8).steps.size(), 1u);
  // Groups of different sizes, part of the devices.
  const ReductionProgram part = joint_reduction(cluster, {{0, 4}, {1}, {8}}, 1e8);
  EXPECT_EQ(part.devices, (std::vector<int>{0, 1, 4, 8}));
  EXPECT_EQ(check(part.steps, 4), "");
}

TEST(ClusterReductions, WrongStepsAreRefused) {
  const ReductionStep scatter{Collective::reduce_scatter, {{0, 1}, {2, 3}}};
  const ReductionStep across{Collective::all_reduce, {{0, 2}, {1, 3}}};
  const ReductionStep gather{Collective::all_gather, {{0, 1}, {2, 3}}};
  EXPECT_EQ(check({scatter, across, gather}, 4), "");
  EXPECT_NE(check({scatter, gather}, 4), "");         // halves of the sum
  EXPECT_NE(check({scatter, across}, 4), "");         // left scattered
  EXPECT_NE(check({across, across, gather}, 4), "");  // twice
  EXPECT_NE(check({{Collective::all_reduce, {{0, 1, 2, 3, 4}}}}, 4), "");
  EXPECT_NE(check({{Collective::all_reduce, {{0, 0, 1, 2, 3}}}}, 4), "");
  EXPECT_NE(check({{Collective::all_reduce, {{0, 1, 2}, {3}}}}, 4), "");
  EXPECT_NE(check({}, 4), "");
  EXPECT_EQ(check({}, 1), "");
}

}  // namespace
}  // namespace motley::reduce
