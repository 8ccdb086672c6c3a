// Machines with several media: channels over direct links, PCIe buses, sockets, NICs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <numeric>
#include <sstream>

#include "cluster/part.h"
#include "core/error.h"
#include "core/rng.h"
#include "net/collectives.h"
#include "net/traffic.h"

namespace motley::net {
namespace {

constexpr double kGB = 1e9;

std::vector<int> range(int count, int first = 0) {
  std::vector<int> devices(count);
  std::iota(devices.begin(), devices.end(), first);
  return devices;
}

// The bandwidth of the bus as nccl-tests print it.
double bus(const Topology& net, const std::vector<int>& devices, Algorithm algorithm,
           Bytes bytes = 1 << 30) {
  const double n = static_cast<double>(devices.size());
  return 2 * (n - 1) / n * bytes /
         collective_time(net, Collective::all_reduce, algorithm, {devices}, bytes) / kGB;
}

// gpu, number of GPUs -> GB/s of the largest all-reduce of tests/data/vtrain/allreduce.csv.
std::map<std::pair<std::string, int>, double> measured() {
  std::ifstream in(MOTLEY_SOURCE_DIR "/tests/data/vtrain/allreduce.csv");
  std::map<std::pair<std::string, int>, double> bandwidths;
  for (std::string line; std::getline(in, line);) {
    std::stringstream cells(line);
    std::string gpu, n, bytes, seconds;
    if (line[0] == '#' || !std::getline(cells, gpu, ',') || gpu == "gpu") continue;
    std::getline(cells, n, ','), std::getline(cells, bytes, ','), std::getline(cells, seconds);
    const double count = std::stod(n);
    if (std::stod(bytes) == 1 << 30)
      bandwidths[{gpu, std::stoi(n)}] =
          2 * (count - 1) / count * std::stod(bytes) / std::stod(seconds) / kGB;
  }
  return bandwidths;
}

TEST(Media, AllReducesOfADgx1AreAsMeasured) {
  // Rings over NVLinks alone: 1, 2, 4, -, 2, 4 and 6 one-way rings of 22.5 GB/s; of five GPUs one has
  // a single neighbour, so that chains are left, at half of their two links.
  const auto table = measured();
  const Topology net(load_cluster("dgx-1-v100"));
  for (int n = 2; n <= 8; ++n)
    EXPECT_NEAR(bus(net, range(n), Algorithm::automatic) / table.at({"V100", n}), 1, 0.06) << n;
  const Topology switched(
      parse_cluster("link: {type: NVSwitch-A100}\ndevices: [{type: A100-40GB, count: 8}]", "a100"));
  for (int n = 4; n <= 8; ++n)
    EXPECT_NEAR(bus(switched, range(n), Algorithm::automatic) / table.at({"A100", n}), 1, 0.06)
        << n;
}

TEST(Media, PublicFiguresOfNccl) {
  // Bandwidths of the bus of all_reduce_perf as NVIDIA and users publish them, large tensors: a DGX A100
  // about 230 GB/s; two of them with eight ports of 200 Gbit/s about 190; a DGX-1 V100 about 130; a
  // box of GPUs on PCIe 3 switches under one socket about 10 to 12, across sockets below that.
  const auto all = [](const std::string& yaml, Algorithm algorithm = Algorithm::automatic) {
    const Cluster cluster = parse_cluster(yaml, "public");
    return bus(Topology(cluster), range(cluster.size()), algorithm);
  };
  EXPECT_NEAR(all("link: {type: NVSwitch-A100}\ndevices: [{type: A100-80GB, count: 8}]"), 230, 12);
  EXPECT_NEAR(bus(Topology(load_cluster("dgx-1-v100")), range(8), Algorithm::automatic), 130, 7);
  std::string nics;
  for (int n = 0; n < 8; ++n)
    nics += fmt::format("{}{{type: InfiniBand-200, near: [{}]}}", n ? ", " : "", n);
  EXPECT_NEAR(
      all(fmt::format("link: {{type: InfiniBand-200}}\ngroups: [{{count: 2, nics: [{}], link: "
                      "{{type: NVSwitch-A100}}, devices: [{{type: A100-80GB, count: 8}}]}}]",
                      nics)),
      190, 15);
  const char* box =
      "link: {{type: UPI}}\ngroups: [{{count: {}, link: {{type: PCIe3}}, groups: [{{count: 2, "
      "link: "
      "{{type: PCIe3}}, devices: [{{type: 1080Ti, count: 2}}]}}]}}]";
  EXPECT_NEAR(all(fmt::format(fmt::runtime(box), 1), Algorithm::ring), 11, 1.5);
  EXPECT_LT(all(fmt::format(fmt::runtime(box), 2), Algorithm::ring), 10.5);
}

TEST(Media, ADgx2IsDrivenAtItsSixLinks) {
  // No table of all_reduce_perf on a DGX-2 is public. NCCL's topology search counts with 20 GB/s of
  // each of the six links of a V100, through the switch at any number of them: 120.
  const Topology net(parse_cluster(
      "link: {type: NVSwitch-V100}\ndevices: [{type: V100-32GB, count: 16}]", "dgx2"));
  for (int n : {2, 4, 5, 8, 16})
    EXPECT_NEAR(bus(net, range(n), Algorithm::automatic) / 120, 1, 0.1) << n;
  // Five GPUs of a DGX-1, which has no ring of them, are slower by far.
  EXPECT_GT(bus(net, range(5), Algorithm::automatic),
            2 * bus(Topology(load_cluster("dgx-1-v100")), range(5), Algorithm::automatic));
}

TEST(Media, WhatIsNoNeighbourGoesThroughTheHost) {
  const Topology net(load_cluster("p2-v100-2"));
  // The ring at the total of its links: 2 * 3 * 22.5 GB/s.
  EXPECT_NEAR(bus(net, range(8), Algorithm::ring), 135, 0.5);
  EXPECT_NEAR(bus(net, {0, 1}, Algorithm::ring), 67.5, 0.1);
  // 0 and 2 are pairs of one CPU, whose buses carry both directions: 32 / 2. 0 and 3 as well; 0 and
  // 5 are of two CPUs.
  EXPECT_NEAR(bus(net, {0, 2}, Algorithm::ring), 16, 0.1);
  EXPECT_NEAR(bus(net, {0, 5}, Algorithm::ring), 10, 0.1);
  // All four such pairs at once share what is between the CPUs.
  const Seconds four = collective_time(net, Collective::all_reduce, Algorithm::ring,
                                       {{0, 4}, {1, 5}, {2, 6}, {3, 7}}, 10 * kGB);
  EXPECT_NEAR(four, 4, 0.1);
  // The neighbours 7 and 0 are of two CPUs, and have NVLinks.
  EXPECT_NEAR(bus(net, {0, 7}, Algorithm::ring), 67.5, 0.1);
  // Both machines: the NIC.
  EXPECT_NEAR(bus(net, range(16), Algorithm::ring), 8, 0.05);
  // Broadcasts take the ring both ways; a chain of four takes its links once.
  const auto seconds = [&](Collective c, const std::vector<int>& devices) {
    return collective_time(net, c, Algorithm::ring, {devices}, 135 * kGB);
  };
  EXPECT_NEAR(seconds(Collective::broadcast, range(8)), 1, 0.01);
  EXPECT_NEAR(seconds(Collective::reduce, range(4)), 2, 0.01);
  EXPECT_NEAR(seconds(Collective::reduce_scatter, range(8)), 7. / 8, 0.01);
}

TEST(Media, SeveralNicsAreUsedTogetherByOneRing) {
  const Cluster cluster = load_cluster("dgx-1-v100");
  const Topology net(cluster);
  EXPECT_NEAR(bus(net, range(16), Algorithm::ring), 44, 0.5);
  // A group near one NIC has that one.
  EXPECT_NEAR(bus(net, {0, 1, 8, 9}, Algorithm::ring), 11, 0.2);
  // 0 leaves by the NIC at its own PCIe switch, and does not cross the CPU's links.
  LinkLoad load(static_cast<int>(net.links().size()));
  net.add_path(0, 8, 1, &load);
  std::vector<std::string> names;
  for (const LinkUse& use : load.take()) names.push_back(net.links()[use.link].name);
  EXPECT_THAT(names, ::testing::UnorderedElementsAre("device 0 up", "device 8 down",
                                                     "node[0] nic 0 up", "node[1] nic 0 down"));
  EXPECT_DOUBLE_EQ(net.bandwidth_into(0, 8), 44 * kGB);
  // The model of searches: the NICs of a machine together, or its direct links.
  EXPECT_NEAR(CollectiveModel(cluster).ring_bandwidth(), 44 * kGB, 1);
  const auto part = [&](const std::vector<int>& devices) {
    return CollectiveModel(part_of(cluster, devices)).ring_bandwidth() / kGB;
  };
  EXPECT_NEAR(part(range(8)), 135, 0.1);
  EXPECT_NEAR(part(range(4)), 90, 0.1);
  EXPECT_NEAR(part({1, 3, 5, 7}), 45, 0.1);
  EXPECT_NEAR(part({8, 9, 10, 11}), 90, 0.1);
  EXPECT_NEAR(part({0, 5}), 9.984, 0.1);  // sockets
  EXPECT_NEAR(part({0, 1, 8, 9}), 11, 0.1);
}

// Random machines: the fast builder of paths against following the tree by hand.
TEST(Media, PathsAgreeWithTheTreeWalkedByHand) {
  Rng rng(3);
  for (int trial = 0; trial < 200; ++trial) {
    const int sockets = static_cast<int>(rng.between(1, 2)),
              per = static_cast<int>(rng.between(2, 3));
    const int n = 2 * sockets * per;
    std::string direct, nics;
    std::vector<std::vector<bool>> joined(n, std::vector<bool>(n, false));
    for (int a = 0; a < n; ++a)
      for (int b = a + 1; b < n; ++b)
        if (rng.chance(0.3)) {
          direct +=
              fmt::format("{}[{}, {}, {}]", direct.empty() ? "" : ", ", a, b, rng.between(1, 3));
          joined[a][b] = joined[b][a] = true;
        }
    const bool several = rng.chance(0.5);  // one NIC for each pair
    for (int p = 0; several && p < n / 2; ++p)
      nics += fmt::format("{}{{bandwidth: {} GB/s, near: [{}, {}]}}", p ? ", " : "", 5 + p, 2 * p,
                          2 * p + 1);
    const Cluster cluster = parse_cluster(
        fmt::format(
            "link: {{bandwidth: 3 GB/s}}\ngroups:\n  - count: 2\n    link: {{bandwidth: 7 "
            "GB/s}}\n{}{}"
            "    groups:\n      - count: {}\n        link: {{bandwidth: 9 GB/s}}\n        groups: "
            "[{{count: {}, link: {{kind: bus, bandwidth: 11 GB/s}}, devices: [{{type: T4, count: "
            "2}}]}}]\n",
            direct.empty()
                ? ""
                : fmt::format("    direct: [{{bandwidth: 20 GB/s, between: [{}]}}]\n", direct),
            nics.empty() ? "" : fmt::format("    nics: [{}]\n", nics), sockets, per),
        "m.yaml");
    EXPECT_EQ(to_yaml(parse_cluster(to_yaml(cluster), "again")), to_yaml(cluster));
    const Topology net(cluster);
    for (int from = 0; from < 2 * n; ++from)
      for (int to = 0; to < 2 * n; ++to) {
        if (from == to) continue;
        std::vector<std::string> by_hand;
        const int a = from % n, b = to % n;
        const auto pair_of = [&](int d) {
          return fmt::format("node{}.socket{}.pair{}", d / n, d % n / (2 * per),
                             d % n % (2 * per) / 2);
        };
        const auto socket_of = [&](int d) {
          return fmt::format("node{}.socket{}", d / n, d % n / (2 * per));
        };
        if (from / n == to / n && joined[a][b]) {
          by_hand = {fmt::format("direct {} to {}", from, to)};
        } else {
          const bool out = from / n != to / n;
          for (const auto& [d, way] : {std::pair(from, "up"), std::pair(to, "down")}) {
            if (out || pair_of(from) != pair_of(to)) by_hand.push_back(pair_of(d) + " bus");
            if (out && several) {
              by_hand.push_back(fmt::format("node{} nic {} {}", d / n, d % n / 2, way));
              continue;
            }
            if (out || pair_of(from) != pair_of(to)) by_hand.push_back(pair_of(d) + " " + way);
            if (out || socket_of(from) != socket_of(to))
              by_hand.push_back(socket_of(d) + " " + way);
            if (out) by_hand.push_back(fmt::format("node{} {}", d / n, way));
          }
          if (pair_of(from) == pair_of(to)) by_hand.push_back(pair_of(from) + " bus");
        }
        LinkLoad load(static_cast<int>(net.links().size()));
        net.add_path(from, to, 1, &load);
        EXPECT_EQ(load.take().size(), by_hand.size())
            << from << " to " << to << ": " << fmt::format("{}", fmt::join(by_hand, ", "));
      }
  }
}

TEST(Media, RefusalsNameTheField) {
  const auto failure = [](const std::string& media) {
    try {
      parse_cluster(
          "link: {bandwidth: 1 GB/s}\ngroups:\n  - link: {bandwidth: 1 GB/s}\n    devices: "
          "[{type: T4, count: 4}]\n    " +
              media + "\n",
          "c.yaml");
    } catch (const UserError& e) {
      return std::string(e.what());
    }
    return std::string("no error");
  };
  using ::testing::HasSubstr;
  EXPECT_EQ(failure("direct: [{kind: ring, bandwidth: 25 GB/s, latency: 2 us, links: 2}]"),
            "no error");
  EXPECT_THAT(failure("direct: {}"), HasSubstr("groups[0].direct is not a list"));
  EXPECT_THAT(failure("direct: [{kind: star, bandwidth: 1 GB/s}]"),
              HasSubstr("groups[0].direct[0].kind is 'star'; give ring or mesh"));
  EXPECT_THAT(failure("direct: [{bandwidth: 1 GB/s}]"), HasSubstr("either 'kind' or 'between'"));
  EXPECT_THAT(failure("direct: [{bandwidth: 1 GB/s, between: [[0, 4]]}]"),
              HasSubstr("between[0][1] is 4; give a device from 0 to 3"));
  EXPECT_THAT(failure("direct: [{bandwidth: 1 GB/s, between: [[1, 1]]}]"),
              HasSubstr("joins 1 to itself"));
  EXPECT_THAT(failure("direct: [{bandwidth: 1 GB/s, between: [[0, 1], [1, 0]]}]"),
              HasSubstr("joins 1 and 0 again"));
  EXPECT_THAT(failure("direct: [{kind: ring, type: NVLink9}]"), HasSubstr("no known type of link"));
  EXPECT_THAT(failure("direct: [{kind: ring, nominal: 1 GB/s}]"), HasSubstr("nominal has no type"));
  EXPECT_THAT(failure("direct: [{kind: ring}]"), HasSubstr("direct[0].bandwidth is missing"));
  EXPECT_THAT(failure("direct: [{kind: ring, bandwidth: 1 GB/s, links: 1000}]"),
              HasSubstr("links is 1000; give at most 64"));
  EXPECT_THAT(failure("nics: [{bandwidth: 1 GB/s, near: [0, 1]}]"),
              HasSubstr("nics leaves out device 2"));
  EXPECT_THAT(failure("nics: [{bandwidth: 1 GB/s, near: [0, 1, 2, 3, 3]}]"),
              HasSubstr("names device 3 again"));
  EXPECT_THAT(failure("uplink: 1 GB/s\n    nics: [{bandwidth: 1 GB/s, near: [0]}]"),
              HasSubstr("stands beside uplink"));
}

}  // namespace
}  // namespace motley::net
