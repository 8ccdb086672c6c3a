// Exchanges, paths and collectives. Each test states its system, the formula and the answer worked
// out by hand.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <ctime>
#include <functional>

#include "core/error.h"
#include "core/rng.h"
#include "net/collectives.h"
#include "net/fluid.h"
#include "net/topology.h"
#include "net/traffic.h"

namespace motley::net {
namespace {

constexpr double kGB = 1e9;

// Nodes on a switch of `nic` bytes/s, each joining its devices as `inside` says.
Cluster nodes(std::vector<int> sizes, double nic, Link inside, std::vector<double> uplinks = {}) {
  Cluster c;
  c.types = {device_catalogue()[0]};
  Group root;
  root.name = "cluster";
  root.link = {LinkKind::switched, nic, 0};
  c.groups.push_back(root);
  for (size_t i = 0; i < sizes.size(); ++i) {
    GroupId id(static_cast<int64_t>(c.groups.size()));
    c.groups[0].children.push_back(id);
    Group g;
    g.name = "node";
    g.parent = GroupId(0);
    g.link = inside;
    g.uplink = uplinks.empty() ? 0 : uplinks[i];
    g.first_device = c.size();
    g.device_count = sizes[i];
    for (int d = 0; d < sizes[i]; ++d) c.devices.push_back({0, id});
    c.groups.push_back(g);
  }
  c.groups[0].device_count = c.size();
  return c;
}
Cluster flat(int devices, LinkKind kind, double bandwidth, Seconds latency = 0) {
  return flat_cluster({device_catalogue()[0]}, {devices}, {kind, bandwidth, latency});
}
Link nvswitch(double bandwidth, Seconds latency = 0) {
  return {LinkKind::switched, bandwidth, latency};
}
std::vector<int> range(int first, int count, int stride = 1) {
  std::vector<int> devices(count);
  for (int i = 0; i < count; ++i) devices[i] = first + i * stride;
  return devices;
}

// ---- exchanges between shares ----

// Row by row: what a port sends and receives when every row goes from the device that had it to the
// one that needs it.
TEST(Collectives, AnExchangeMovesWhatTheRowsSay) {
  Rng rng(5);
  for (int trial = 0; trial < 300; ++trial) {
    std::vector<int> sizes(static_cast<size_t>(rng.between(1, 4)));
    for (int& s : sizes) s = static_cast<int>(rng.between(1, 4));
    if (sizes.size() == 1 && sizes[0] == 1) continue;
    const Cluster cluster = nodes(sizes, 1e9 * (1 + rng.uniform()), nvswitch(3e9));
    const CollectiveModel model(cluster);
    const int64_t rows = rng.between(1, 40);
    auto owners = [&] {
      std::vector<int> owner(static_cast<size_t>(rows));
      for (int& o : owner) o = static_cast<int>(rng.below(cluster.size()));
      std::sort(owner.begin(), owner.end());
      return owner;
    };
    const std::vector<int> from = owners(), to = trial % 10 == 0 ? from : owners();
    std::vector<double> a(cluster.size(), 0), b(cluster.size(), 0);
    for (size_t r = 0; r < from.size(); ++r) {
      a[from[r]] += 1. / static_cast<double>(rows);
      b[to[r]] += 1. / static_cast<double>(rows);
    }
    double worst = 0;
    for (const auto& port : model.exchange_ports()) {
      double out = 0, in = 0;
      auto below = [&](int d) { return d >= port.first && d < port.first + port.count; };
      for (size_t r = 0; r < from.size(); ++r) {
        out += below(from[r]) && !below(to[r]);
        in += !below(from[r]) && below(to[r]);
      }
      worst =
          std::max(worst, std::max(out, in) / static_cast<double>(rows) * port.seconds_per_byte);
    }
    EXPECT_NEAR(model.exchange(a, b), worst, 1e-9 * worst + 1e-18);
    EXPECT_EQ(model.exchange(1e6, model.exchange(a, a)), 0);
  }
}

// ---- topology ----

TEST(Topology, PathsCrossPortsNicsHopsAndBuses) {
  Topology net(nodes({2, 2}, 8, nvswitch(270)));
  auto names = [](const Topology& t, int from, int to) {
    LinkLoad load(static_cast<int>(t.links().size()));
    t.add_path(from, to, 1, &load);
    std::vector<std::string> out;
    for (const LinkUse& use : load.take())
      out.push_back(fmt::format("{}*{}", t.links()[use.link].name, use.flows));
    std::sort(out.begin(), out.end());
    return fmt::format("{}", fmt::join(out, ", "));
  };
  EXPECT_EQ(names(net, 0, 1), "device 0 up*1, device 1 down*1");
  EXPECT_EQ(names(net, 1, 2), "device 1 up*1, device 2 down*1, node[0] up*1, node[1] down*1");
  Topology ring(flat(4, LinkKind::ring, 100));
  EXPECT_EQ(names(ring, 0, 1), "cluster hop 0 cw*1");
  EXPECT_EQ(names(ring, 0, 3), "cluster hop 3 ccw*1");
  EXPECT_EQ(names(ring, 3, 0), "cluster hop 3 cw*1");
  EXPECT_EQ(
      names(ring, 0, 2),
      "cluster hop 0 cw*0.5, cluster hop 1 cw*0.5, cluster hop 2 ccw*0.5, cluster hop 3 ccw*0.5");
  Topology bus(nodes({2, 2}, 8, {LinkKind::bus, 16, 0}));
  EXPECT_EQ(names(bus, 0, 1), "node[0] bus*1");
  EXPECT_EQ(names(bus, 0, 2), "node[0] bus*1, node[0] up*1, node[1] bus*1, node[1] down*1");
}

TEST(Topology, LatencyAddsTheGroupsCrossed) {
  // 5 us inside, 30 us across: 5 within a node, 5 + 30 + 5 between nodes.
  Cluster c = nodes({2, 2}, 8, nvswitch(270, 5e-6));
  c.groups[0].link.latency = 30e-6;
  Topology net(c);
  EXPECT_DOUBLE_EQ(net.latency(0, 1), 5e-6);
  EXPECT_DOUBLE_EQ(net.latency(0, 2), 40e-6);
}

TEST(Topology, LinksAreNoFasterThanMessagesWereMeasured) {
  // Two nodes of two devices; inside ports of 10 GB/s, between them 2 GB/s and 1 GB/s.
  Cluster c = nodes({2, 2}, 8 * kGB, nvswitch(10 * kGB, 1e-6), {2 * kGB, 1 * kGB});
  c.groups[1].measured = {{Collective::broadcast, 50e-6, 4 * kGB},
                          {Collective::all_reduce, 90e-6, 3 * kGB}};
  c.groups[2].measured = {{Collective::broadcast, 0, 12 * kGB}};
  c.groups[0].measured = {{Collective::broadcast, 70e-6, 0.5 * kGB}};
  const Topology t(c);
  EXPECT_DOUBLE_EQ(t.latency(0, 1), 50e-6);
  EXPECT_DOUBLE_EQ(t.latency(2, 3), 1e-6);
  for (const NetworkLink& link : t.links()) {
    const bool first = link.name.starts_with("device 0") || link.name.starts_with("device 1");
    const double expected = link.name.starts_with("device")    ? (first ? 4 : 10)
                            : link.name.starts_with("node[0]") ? 1
                                                               : 0.5;
    EXPECT_DOUBLE_EQ(link.bandwidth, expected * kGB) << link.name;
  }
}

TEST(Collectives, APartOfAMeasuredGroupTakesItsRounds) {
  Cluster c = nodes({2, 2, 2}, 8 * kGB, nvswitch(10 * kGB), {2 * kGB, 1 * kGB, 4 * kGB});
  c.groups[0].measured = {{Collective::all_reduce, 1e-3, 0.5 * kGB}};
  // Without the slowest port, and with it.
  const CollectiveModel fast(part_of(c, {0, 1, 4})), slow(part_of(c, {0, 2, 4}));
  EXPECT_DOUBLE_EQ(fast.ring_bandwidth(), 1 * kGB);
  EXPECT_DOUBLE_EQ(slow.ring_bandwidth(), 0.5 * kGB);
  EXPECT_DOUBLE_EQ(slow.latency_of_ring(), 1e-3);
  EXPECT_NEAR(slow.all_reduce(3e6), 4 * (1e-3 + 1e6 / (0.5 * kGB)), 1e-9);
  // One node of two is not what was measured.
  EXPECT_DOUBLE_EQ(CollectiveModel(part_of(c, {0, 1})).ring_bandwidth(), 10 * kGB);
}

TEST(Topology, BandwidthIntoARangeIsItsPort) {
  Topology net(nodes({2, 3}, 8, nvswitch(270), {0, 4}));
  EXPECT_EQ(net.bandwidth_into(0, 2), 8);
  EXPECT_EQ(net.bandwidth_into(2, 3), 4);
  EXPECT_EQ(net.bandwidth_into(1, 1), 270);
  EXPECT_TRUE(std::isinf(net.bandwidth_into(1, 2)));
  EXPECT_TRUE(std::isinf(net.bandwidth_into(0, 5)));
}

// A random cluster tree of at most three levels with switches, rings, buses and uplinks.
Cluster random_cluster(Rng* rng) {
  Cluster c;
  c.types = {device_catalogue()[0]};
  auto link = [&] {
    return Link{static_cast<LinkKind>(rng->below(3)), static_cast<double>(rng->between(1, 50)),
                static_cast<double>(rng->below(3))};
  };
  std::function<void(GroupId, int)> grow = [&](GroupId parent, int depth) {
    GroupId id(static_cast<int64_t>(c.groups.size()));
    c.groups.emplace_back();
    Group g;
    g.name = fmt::format("g{}", depth);
    g.parent = parent;
    g.link = link();
    g.uplink = parent.valid() && rng->chance(0.3) ? static_cast<double>(rng->between(1, 50)) : 0;
    g.first_device = c.size();
    if (depth < 2 && rng->chance(0.7)) {
      for (int64_t k = rng->between(1, 5); k > 0; --k) {
        g.children.push_back(GroupId(static_cast<int64_t>(c.groups.size())));
        grow(id, depth + 1);
      }
    } else {
      for (int64_t k = rng->between(1, 6); k > 0; --k) c.devices.push_back({0, id});
    }
    g.device_count = c.size() - g.first_device;
    c.groups[id.index] = g;
  };
  grow(GroupId(), 0);
  return c;
}

TEST(Topology, AllPairsEqualsThePairsOneByOne) {
  Rng rng(3);
  int compared = 0;
  for (int trial = 0; trial < 400; ++trial) {
    Topology net(random_cluster(&rng));
    std::vector<int> devices;
    for (int d = 0; d < net.devices(); ++d)
      if (rng.chance(0.6)) devices.push_back(d);
    if (devices.size() < 2) continue;
    int links = static_cast<int>(net.links().size());
    LinkLoad fast(links), slow(links);
    net.add_all_pairs(devices, &fast);
    for (int a : devices)
      for (int b : devices)
        if (a != b) net.add_path(a, b, 1, &slow);
    auto f = fast.take(), s = slow.take();
    ASSERT_EQ(f.size(), s.size());
    for (size_t i = 0; i < f.size(); ++i) {
      EXPECT_EQ(f[i].link, s[i].link);
      EXPECT_NEAR(f[i].flows, s[i].flows, 1e-7);
      ++compared;
    }
  }
  EXPECT_GT(compared, 1000);
}

// ---- collectives ----

TEST(Traffic, RingOnOneSwitch) {
  // n = 4, S = 12, ports of 3: 2(n-1)/n S / 3 = 6; half of it for the halves; S/3 for a chain.
  Topology net(flat(4, LinkKind::switched, 3));
  auto time = [&](Collective c) {
    return collective_time(net, c, Algorithm::ring, {range(0, 4)}, 12);
  };
  EXPECT_DOUBLE_EQ(time(Collective::all_reduce), 6);
  EXPECT_DOUBLE_EQ(time(Collective::reduce_scatter), 3);
  EXPECT_DOUBLE_EQ(time(Collective::all_gather), 3);
  EXPECT_DOUBLE_EQ(time(Collective::broadcast), 4);
  EXPECT_DOUBLE_EQ(time(Collective::reduce), 4);
}

TEST(Traffic, RingUsesBothWaysOfAnNvlinkRing) {
  // 8 devices in a ring of 135 GB/s a way: half the data goes each way, so the ring all-reduce of S
  // takes 2 * 7/8 S / 270 GB/s. A pair of neighbours uses one hop each way: S / 135 (the long way
  // round is not taken).
  Topology net(flat(8, LinkKind::ring, 135 * kGB));
  EXPECT_NEAR(
      collective_time(net, Collective::all_reduce, Algorithm::ring, {range(0, 8)}, 270 * kGB), 1.75,
      1e-12);
  EXPECT_NEAR(collective_time(net, Collective::all_reduce, Algorithm::ring, {{0, 1}}, 135 * kGB), 1,
              1e-12);
  // Broadcast over the ring: half each way, S / 270.
  EXPECT_NEAR(
      collective_time(net, Collective::broadcast, Algorithm::ring, {range(0, 8)}, 270 * kGB), 1,
      1e-12);
}

TEST(Traffic, RingOnAHalfDuplexBus) {
  // A bus carries every hop: n * 2(n-1)/n S = 2(n-1) S. n = 4, S = 5, 10 bytes/s: 3 s.
  Topology net(flat(4, LinkKind::bus, 10));
  EXPECT_DOUBLE_EQ(collective_time(net, Collective::all_reduce, Algorithm::ring, {range(0, 4)}, 5),
                   3);
  // Direct: n(n-1) flows of S/n, twice: 2 * 3 * 5 / 10.
  EXPECT_DOUBLE_EQ(
      collective_time(net, Collective::all_reduce, Algorithm::direct, {range(0, 4)}, 5), 3);
}

TEST(Traffic, GroupsOfANodeShareItsNic) {
  // Two nodes of 16, NIC 8 GB/s, one group across the nodes for each of the 16 pairs, S = 2 GB:
  // 16 * 2 * 1/2 * 2 GB / 8 GB/s = 4 s. Alone a group takes 1/16.
  Topology net(nodes({16, 16}, 8 * kGB, nvswitch(270 * kGB)));
  std::vector<std::vector<int>> groups;
  for (int i = 0; i < 16; ++i) groups.push_back({i, 16 + i});
  EXPECT_NEAR(collective_time(net, Collective::all_reduce, Algorithm::ring, groups, 2 * kGB), 4,
              1e-9);
  EXPECT_NEAR(collective_time(net, Collective::all_reduce, Algorithm::ring, {groups[0]}, 2 * kGB),
              0.25, 1e-9);
  // One ring over all 32 enters each node once: 2 * 31/32 * 2 / 8.
  EXPECT_NEAR(
      collective_time(net, Collective::all_reduce, Algorithm::ring, {range(0, 32)}, 2 * kGB),
      2 * 31.0 / 32 * 2 / 8, 1e-9);
}

TEST(Traffic, UnequalNicsAndUnequalGroups) {
  // Nodes of 2 and 4 devices with NICs of 8 and 2. A ring over all 6 with S = 6 moves 10 bytes a
  // hop: the slow NIC takes 5 s. Two groups at once, {0, 2} and {1, 3, 4} with S = 6: the hops
  // carry 6 and 8 bytes and share the slow NIC, 1 byte/s each until the first ends at 6 s; the
  // second has 2 bytes left, at 2 bytes/s: 7 s.
  Topology net(nodes({2, 4}, 8, nvswitch(100), {8, 2}));
  EXPECT_NEAR(collective_time(net, Collective::all_reduce, Algorithm::ring, {range(0, 6)}, 6), 5,
              1e-9);
  EXPECT_NEAR(collective_time(net, Collective::all_reduce, Algorithm::ring, {{0, 2}, {1, 3, 4}}, 6),
              7, 1e-9);
}

TEST(Traffic, DoubleBinaryTreesOfFourAreComplementary) {
  // First: 0 - 2, 2 - {1, 3}. Second (mirrored): 3 - 1, 1 - {2, 0}.
  std::vector<int> first, second;
  for (int r = 0; r < 4; ++r) {
    first.push_back(tree_parent(4, r));
    second.push_back(second_tree_parent(4, r));
  }
  EXPECT_EQ(first, (std::vector<int>{-1, 2, 0, 2}));
  EXPECT_EQ(second, (std::vector<int>{1, 3, 1, -1}));
}

TEST(Traffic, DoubleBinaryTreesSpanAndAreBalanced) {
  for (int n = 2; n <= 130; ++n)
    for (auto parent : {tree_parent, second_tree_parent}) {
      std::vector<int> children(n, 0);
      int roots = 0;
      for (int r = 0; r < n; ++r) {
        int steps = 0;
        for (int x = r; x >= 0; x = parent(n, x))
          ASSERT_LE(++steps, 2 + std::bit_width(unsigned(n)));
        if (parent(n, r) < 0)
          ++roots;
        else
          ++children[parent(n, r)];
      }
      EXPECT_EQ(roots, 1);
      EXPECT_LE(*std::max_element(children.begin(), children.end()), 2);
    }
}

TEST(Traffic, TreeAcrossNodes) {
  // Two nodes: each NIC carries S/2 up one tree and S/2 down the other, each way: S / 8.
  Topology two(nodes({2, 2}, 8, nvswitch(1000)));
  EXPECT_NEAR(collective_time(two, Collective::all_reduce, Algorithm::tree, {range(0, 4)}, 16), 2,
              1e-9);
  // Four nodes: node 1 sends S/2 up the first tree, S/2 up and twice S/2 down the second: 2S / 8.
  Topology four(nodes({1, 1, 1, 1}, 8, nvswitch(1000)));
  EXPECT_NEAR(collective_time(four, Collective::all_reduce, Algorithm::tree, {range(0, 4)}, 16), 4,
              1e-9);
  // Inside one node the tree is a chain: a device in the middle sends S up and S down.
  Topology node(flat(4, LinkKind::switched, 8));
  EXPECT_NEAR(collective_time(node, Collective::all_reduce, Algorithm::tree, {range(0, 4)}, 16), 4,
              1e-9);
  // With a share of 1/2 the two-node tree runs at 4: 16 / 4.
  EXPECT_NEAR(collective_time(two, Collective::all_reduce, Algorithm::tree, {range(0, 4)}, 16,
                              Tuning{0, 0.5}),
              4, 1e-9);
}

TEST(Traffic, TreeOfRootedAndScatteredOperations) {
  // Four single-device nodes at 8, S = 16. Broadcast from 0: it feeds tree one through 2 (S/2) and
  // tree two's root 3 (S/2): S out; node 2 (first tree) sends S/2 to 1 and 3, node 1 (second tree)
  // S/2 to 2 (0 has it): the busiest port carries S. 16 / 8 = 2. Reduce is the reverse.
  Topology net(nodes({1, 1, 1, 1}, 8, nvswitch(1000)));
  auto time = [&](Collective c) {
    return collective_time(net, c, Algorithm::tree, {range(0, 4)}, 16);
  };
  EXPECT_NEAR(time(Collective::broadcast), 2, 1e-9);
  EXPECT_NEAR(time(Collective::reduce), 2, 1e-9);
  // Reduce-scatter: out of node 1: up both trees S/2 each, down the second S/8 to each of 2 and 0:
  // 1.25 S; into node 1: up from 2 and 0 S/2 each, down the first S/8, the second 3S/8: 1.5 S.
  // 24 / 8 = 3.
  EXPECT_NEAR(time(Collective::reduce_scatter), 3, 1e-9);
  // All-gather: out of node 1: up S/8 in the first, 3S/8 in the second, down the second to 2 and 0
  // 3S/8 each: 1.25 S; into node 1: S/8 from each of 2 and 0, down 3S/8 in the first (edge 2 - 1),
  // S/8 in the second (edge 3 - 1): 0.75 S. 20 / 8 = 2.5.
  EXPECT_NEAR(time(Collective::all_gather), 2.5, 1e-9);
}

TEST(Traffic, HierarchicalAllReduce) {
  // Two nodes of 4, NVSwitch 12, NIC 3, S = 48. Inside: 3/4 S / 12 = 3. Across: four rings of 2
  // with S/4: 4 * 2 * 1/2 * 12 / 3 = 16. Inside again: 3. Sum 22; the flat ring takes 2 * 7/8 * 48
  // / 3 = 28.
  Topology net(nodes({4, 4}, 3, nvswitch(12)));
  auto time = [&](Collective c, Algorithm a) {
    return collective_time(net, c, a, {range(0, 8)}, 48);
  };
  EXPECT_NEAR(time(Collective::all_reduce, Algorithm::hierarchical), 22, 1e-9);
  EXPECT_NEAR(time(Collective::all_reduce, Algorithm::ring), 28, 1e-9);
  EXPECT_NEAR(time(Collective::reduce_scatter, Algorithm::hierarchical), 3 + 8, 1e-9);
  EXPECT_NEAR(time(Collective::all_gather, Algorithm::hierarchical), 3 + 8, 1e-9);
  // Chains: 48 / 12 inside, 48 / 3 across.
  EXPECT_NEAR(time(Collective::broadcast, Algorithm::hierarchical), 4 + 16, 1e-9);
  EXPECT_NEAR(time(Collective::reduce, Algorithm::hierarchical), 4 + 16, 1e-9);
}

TEST(Traffic, HierarchicalOnUnequalNodes) {
  // Nodes of 1 and 3, NVSwitch 12, NIC 3, S = 48: reduce to the head 4, two heads all-reduce
  // 2 * 1/2 * 48 / 3 = 16, broadcast 4.
  Topology net(nodes({1, 3}, 3, nvswitch(12)));
  auto time = [&](Collective c) {
    return collective_time(net, c, Algorithm::hierarchical, {range(0, 4)}, 48);
  };
  EXPECT_NEAR(time(Collective::all_reduce), 24, 1e-9);
  // Reduce-scatter: 4 + (3/4 of 48 over the heads' ring) 12 + the head hands out two shares of
  // 12: 2.
  EXPECT_NEAR(time(Collective::reduce_scatter), 18, 1e-9);
  EXPECT_NEAR(time(Collective::all_gather), 18, 1e-9);
}

TEST(Traffic, Direct) {
  // Two nodes of 2, NVSwitch 12, NIC 3, S = 12: a NIC carries 2 * 2 flows of S/4 out: 12 / 3 = 4
  // for each half; broadcast: the root sends three flows of 12 through its port (3 s), two of them
  // through the NIC: 24 / 3 = 8.
  Topology net(nodes({2, 2}, 3, nvswitch(12)));
  auto time = [&](Collective c) {
    return collective_time(net, c, Algorithm::direct, {range(0, 4)}, 12);
  };
  EXPECT_NEAR(time(Collective::reduce_scatter), 4, 1e-9);
  EXPECT_NEAR(time(Collective::all_gather), 4, 1e-9);
  EXPECT_NEAR(time(Collective::all_reduce), 8, 1e-9);
  EXPECT_NEAR(time(Collective::broadcast), 8, 1e-9);
  EXPECT_NEAR(time(Collective::reduce), 8, 1e-9);
}

TEST(Traffic, LatencyAndLaunch) {
  // A ring of 4 hops of 2 s: all-reduce waits 2 * 3/4 * 8 = 12 s, then moves 2 * 3/4 * 4 / 1 = 6.
  Topology net(flat(4, LinkKind::switched, 1, 2));
  EXPECT_DOUBLE_EQ(collective_time(net, Collective::all_reduce, Algorithm::ring, {range(0, 4)}, 4),
                   18);
  EXPECT_DOUBLE_EQ(
      collective_time(net, Collective::all_reduce, Algorithm::ring, {range(0, 4)}, 4, Tuning{5, 1}),
      23);
  EXPECT_DOUBLE_EQ(collective_time(net, Collective::broadcast, Algorithm::direct, {range(0, 4)}, 4),
                   2 + 12);
}

// What must hold of every collective, algorithm and network: each member receives what it lacks, so
// no time is below the bytes over its port; and the links of strangers are not touched.
TEST(Traffic, RandomCollectivesRespectThePortsOfTheirMembers) {
  Rng rng(4);
  const Collective collectives[] = {Collective::all_reduce, Collective::reduce_scatter,
                                    Collective::all_gather, Collective::reduce,
                                    Collective::broadcast};
  const Algorithm algorithms[] = {Algorithm::ring, Algorithm::tree, Algorithm::hierarchical,
                                  Algorithm::direct};
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<int> sizes(rng.between(1, 5));
    for (int& s : sizes) s = static_cast<int>(rng.between(1, 5));
    Cluster cluster = nodes(sizes, 10, nvswitch(7));
    Topology net(cluster);
    std::vector<int> devices;
    for (int d = 0; d < net.devices(); ++d)
      if (rng.chance(0.7)) devices.push_back(d);
    if (devices.size() < 2) continue;
    std::swap(devices[0], devices[rng.below(static_cast<int64_t>(devices.size()))]);
    double n = static_cast<double>(devices.size()), bytes = 100;
    for (Collective c : collectives)
      for (Algorithm a : algorithms) {
        Chain chain = traffic(net, c, a, devices, bytes);
        std::vector<double> moved(net.links().size(), 0.0);
        for (const Transfer& t : chain)
          for (const LinkUse& use : t.uses) moved[use.link] += t.bytes * use.flows;
        for (size_t l = 0; l < moved.size(); ++l) {
          const std::string& name = net.links()[l].name;
          int device;
          char way[8];
          if (std::sscanf(name.c_str(), "device %d %7s", &device, way) != 2) continue;
          bool member = std::find(devices.begin(), devices.end(), device) != devices.end();
          bool root = device == devices[0], out = way[0] == 'u';
          if (!member) {
            EXPECT_EQ(moved[l], 0) << name;
            continue;
          }
          double least = 0;
          if (c == Collective::all_reduce || c == Collective::reduce_scatter ||
              c == Collective::all_gather)
            least = c == Collective::all_reduce || ((c == Collective::all_gather) != out)
                        ? bytes * (n - 1) / n
                        : bytes / n;
          if (c == Collective::broadcast && !root && !out) least = bytes;
          if (c == Collective::broadcast && root && out) least = bytes;
          if (c == Collective::reduce && !root && out) least = bytes;
          if (c == Collective::reduce && root && !out) least = bytes;
          if (a == Algorithm::direct && c == Collective::all_reduce)
            least = 2 * bytes * (n - 1) / n;
          EXPECT_GE(moved[l] * (1 + 1e-9), least)
              << to_string(c) << " " << to_string(a) << " " << name << " n " << n;
        }
      }
  }
}

// CPU time of collectives on 16 times as many devices, 65,536: not much more than 16 times as long.
TEST(Traffic, TimeGrowsAsDevices) {
  const auto seconds = [](int nodes_) {
    Topology net(nodes(std::vector<int>(nodes_, 16), 8 * kGB, nvswitch(270 * kGB)));
    std::vector<std::vector<int>> across, inside;
    for (int i = 0; i < 16; ++i) across.push_back(range(i, nodes_, 16));
    for (int i = 0; i < nodes_; ++i) inside.push_back(range(16 * i, 16));
    const auto start = std::clock();
    for (const auto& groups : {inside, across})
      EXPECT_GT(collective_time(net, Collective::all_reduce, Algorithm::ring, groups, kGB), 0);
    return static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
  };
  double small = 1, large = 1e3;
  for (int i = 0; i < 3; ++i) {
    small = std::min(small, seconds(256));
    large = std::min(large, seconds(4096));
  }
  EXPECT_LT(large, 40 * small);
}

TEST(Traffic, SixtyFourThousandDevices) {
  Topology net(nodes(std::vector<int>(4096, 16), 8 * kGB, nvswitch(270 * kGB)));
  std::vector<std::vector<int>> across;
  for (int i = 0; i < 16; ++i) across.push_back(range(i, 4096, 16));
  // 16 rings of 4096 through one NIC.
  EXPECT_NEAR(collective_time(net, Collective::all_reduce, Algorithm::ring, across, kGB),
              16 * 2 * 4095.0 / 4096 / 8, 1e-6);
}

TEST(Traffic, UnknownAlgorithm) {
  EXPECT_THROW(parse_algorithm("rong"), UserError);
  EXPECT_EQ(parse_algorithm("tree"), Algorithm::tree);
}

}  // namespace
}  // namespace motley::net
