#include "discover/levels.h"

#include <gtest/gtest.h>

#include <functional>
#include <numeric>

#include "cluster/cluster.h"
#include "core/error.h"
#include "core/rng.h"
#include "discover/discover.h"

namespace motley::discover {
namespace {

double about(Rng& rng, double x, double noise) { return x * (1 + noise * (2 * rng.uniform() - 1)); }

// A tree of two or three levels; inner links are faster and quicker, so that all of it can be seen.
Level random_tree(Rng& rng, int depth, BytesPerSecond bandwidth, Seconds latency, int* next) {
  Level level;
  level.bandwidth = bandwidth;
  level.latency = latency;
  const int n = 2 + static_cast<int>(rng.below(3));
  for (int i = 0; i < n; ++i) {
    if (depth == 1) {
      level.workers.push_back((*next)++);
      continue;
    }
    level.groups.push_back(random_tree(rng, depth - 1, bandwidth * (2 + 4 * rng.uniform()),
                                       latency / (2 + 2 * rng.uniform()), next));
    // One port is as fast as the link; others may be slower.
    level.groups.back().port = i > 0 && rng.below(3) == 0 ? bandwidth * 0.5 : bandwidth;
    const auto& below = level.groups.back().workers;
    level.workers.insert(level.workers.end(), below.begin(), below.end());
  }
  // Two fast ports at least: what a faster one has beyond the others, nobody can see.
  if (depth > 1) level.groups[1].port = bandwidth;
  return level;
}

Distances distances_of(const Level& tree, int size, Rng& rng, double noise) {
  Distances d(size);
  for (int a = 0; a < size; ++a)
    for (int b = 0; b < size; ++b) {
      if (a == b) continue;
      d.bandwidth[a][b] = about(rng, bandwidth_between(tree, a, b), noise);
      d.latency[a][b] = about(rng, latency_between(tree, a, b), noise);
    }
  return d;
}

std::vector<int> apart(int size) {
  std::vector<int> machines(static_cast<size_t>(size));
  std::iota(machines.begin(), machines.end(), 0);
  return machines;
}

void expect_same(const Level& found, const Level& tree, double tolerance) {
  ASSERT_EQ(found.workers, tree.workers);
  EXPECT_NEAR(found.bandwidth, tree.bandwidth, tolerance * tree.bandwidth);
  EXPECT_NEAR(found.latency, tree.latency, 2.5 * tolerance * tree.latency);
  ASSERT_EQ(found.groups.size(), tree.groups.size());
  for (size_t i = 0; i < found.groups.size(); ++i) {
    EXPECT_NEAR(found.groups[i].port, tree.groups[i].port, tolerance * tree.groups[i].port);
    expect_same(found.groups[i], tree.groups[i], tolerance);
  }
}

TEST(Levels, AreThoseOfTheTreeThatMadeThem) {
  Rng rng(1);
  for (int i = 0; i < 300; ++i) {
    int size = 0;
    const Level tree = random_tree(rng, 1 + i % 3, 1e7 * (1 + rng.uniform()), 2e-3, &size);
    const Distances d = distances_of(tree, size, rng, 0.04);
    SCOPED_TRACE(i);
    expect_same(levels_of(d, apart(size)), tree, 0.05);
  }
}

// Without latencies that tell groups apart: what a tree says of bandwidths is right all the same.
TEST(Levels, ExplainEveryPairByBandwidthAlone) {
  Rng rng(2);
  for (int i = 0; i < 300; ++i) {
    int size = 0;
    const Level tree = random_tree(rng, 1 + i % 3, 1e7, 0, &size);
    Distances d = distances_of(tree, size, rng, 0.03);
    for (auto& row : d.latency)
      for (Seconds& x : row) x = about(rng, 60e-6, 0.1);
    const Level found = levels_of(d, apart(size));
    for (int a = 0; a < size; ++a)
      for (int b = 0; b < size; ++b) {
        if (a == b) continue;
        const double is = bandwidth_between(tree, a, b);
        EXPECT_NEAR(bandwidth_between(found, a, b), is, 0.2 * is) << i << " " << a << " " << b;
      }
  }
}

TEST(Levels, KeepMachinesTogether) {
  // 0 and 2 are on one machine, whose inside is no faster than the network.
  Distances d(4);
  for (int a = 0; a < 4; ++a)
    for (int b = 0; b < 4; ++b)
      if (a != b) d.bandwidth[a][b] = 1e9, d.latency[a][b] = 1e-4;
  const Level found = levels_of(d, {0, 1, 0, 1});
  ASSERT_EQ(found.groups.size(), 2U);
  EXPECT_EQ(found.groups[0].workers, (std::vector<int>{0, 2}));
  EXPECT_EQ(found.groups[1].workers, (std::vector<int>{1, 3}));
}

Facts cpu(const std::string& host, double speed = 0) {
  Facts f;
  f.host = f.machine = host;
  f.kind = "cpu";
  f.memory = 8e9;
  f.speed = speed;
  return f;
}

TEST(Discover, AFileSaysWhatWasMeasured) {
  Rng rng(3);
  for (int i = 0; i < 100; ++i) {
    int size = 0;
    const Level tree = random_tree(rng, 1 + i % 3, 1e8, 1e-3, &size);
    const Distances d = distances_of(tree, size, rng, 0.02);
    const Level found = levels_of(d, apart(size));
    std::vector<Facts> facts;
    std::vector<DeviceRates> rates;
    for (int w = 0; w < size; ++w) {
      facts.push_back(cpu("host\"" + std::to_string(w) + ": #\n", rng.below(2) == 0 ? 0.5 : 0.25));
      rates.push_back({about(rng, 1e11 * facts.back().speed, 0.03), 1e10, 1e9, 1e-5});
    }
    std::vector<std::string> warnings;
    const std::vector<int> types = types_of(facts, rates, &warnings);
    EXPECT_TRUE(warnings.empty()) << warnings[0];
    std::vector<int> ranks;
    const Cluster cluster =
        parse_cluster(cluster_file("c", found, d, facts, rates, types, &ranks), "c.yaml");
    ASSERT_EQ(cluster.size(), size);
    for (int a = 0; a < size; ++a) {
      EXPECT_EQ(cluster.type_of(a).speed, facts[static_cast<size_t>(ranks[a])].speed);
      const double is = rates[static_cast<size_t>(ranks[a])].flops;
      EXPECT_NEAR(cluster.type_of(a).flops, is, 0.1 * is);
    }
    // The port of every group: its own, or the link's above.
    std::function<void(const Level&, size_t)> same = [&](const Level& level, size_t g) {
      const Group& group = cluster.groups[g];
      EXPECT_NEAR(group.link.bandwidth, level.bandwidth, 0.01 * level.bandwidth);
      ASSERT_EQ(group.children.size(), level.groups.size());
      for (size_t c = 0; c < level.groups.size(); ++c) {
        const Group& child = cluster.groups[group.children[c].index];
        const double port = child.uplink > 0 ? child.uplink : group.link.bandwidth;
        EXPECT_NEAR(port, level.groups[c].port, 0.12 * port);
        same(level.groups[c], group.children[c].index);
      }
    };
    same(found, 0);
  }
}

TEST(Discover, RefusesFactsThatNoWorkerHas) {
  Json facts = to_json(cpu("a"));
  EXPECT_EQ(to_json(parse_facts(facts.dump(), "facts")), facts);
  for (const char* field : {"gpu", "memory", "speed", "taken"})
    for (const double wrong : {-1e20, 1e300, -2.5}) {
      if (wrong > 0 && std::string(field) != "gpu") continue;
      Json changed = facts;
      changed[field] = wrong;
      EXPECT_THROW(parse_facts(changed.dump(), "facts"), UserError) << field << " " << wrong;
    }
}

TEST(Discover, NamesAThrottledDevice) {
  std::vector<Facts> facts = {cpu("a"), cpu("b"), cpu("c"), cpu("d", 0.5)};
  std::vector<DeviceRates> rates(4, {1e11, 1e11, 1e10, 1e-6});
  rates[2].flops = 0.7e11;
  rates[3].flops = 0.5e11;  // as it should be
  std::vector<std::string> warnings;
  EXPECT_EQ(types_of(facts, rates, &warnings), (std::vector<int>{0, 0, 1, 2}));
  ASSERT_EQ(warnings.size(), 1U);
  EXPECT_EQ(warnings[0], "rank 2 (c) computes at 70% of the fastest cpu: throttled, or not alone?");
}

TEST(Discover, NamesASlowLinkAndASlowDirection) {
  Level tree;
  tree.bandwidth = 1e9;
  std::vector<Facts> facts;
  for (int w = 0; w < 4; ++w) {
    Level one;
    one.workers = {w};
    one.port = w == 3 ? 2e8 : 1e9;
    tree.groups.push_back(one);
    tree.workers.push_back(w);
    facts.push_back(cpu(std::string(1, static_cast<char>('a' + w))));
  }
  Rng rng(4);
  Distances d = distances_of(tree, 4, rng, 0.02);
  for (auto& row : d.latency)
    for (Seconds& x : row) x = 1e-4;
  const Level found = levels_of(d, apart(4));
  std::vector<std::string> warnings;
  check_links(found, d, facts, &warnings);
  ASSERT_EQ(warnings.size(), 1U);
  EXPECT_NE(warnings[0].find("rank 3 (d): "), std::string::npos) << warnings[0];
  warnings.clear();
  d.bandwidth[0][1] = 5e8;
  check_links(found, d, facts, &warnings);
  ASSERT_EQ(warnings.size(), 2U);
  EXPECT_NE(warnings[1].find("rank 0 (a) to rank 1: "), std::string::npos) << warnings[1];
}

TEST(Discover, MeasuresThreadsAndAgrees) {
  std::vector<double> seen(3, 0);
  run_thread_group(3, [&](Communicator& group) {
    DiscoverOptions options;
    options.profile = false;
    Facts mine = cpu("machine");
    const Discovered found = discover(group, mine, options);
    for (int a = 0; a < 3; ++a)
      for (int b = 0; b < 3; ++b) EXPECT_EQ(found.distances.bandwidth[a][b] > 0, a != b);
    EXPECT_EQ(found.cluster.size(), 3);
    seen[static_cast<size_t>(group.rank())] = found.distances.bandwidth[0][1];
  });
  EXPECT_EQ(seen[0], seen[1]);
  EXPECT_EQ(seen[1], seen[2]);
}

// A machine with GPUs has the links that nvidia-smi says, with the measured numbers. Workers are not
// in the order of their GPUs.
TEST(Discover, TakesTheInsideOfAMachineFromNvidiaSmi) {
  const std::string topo =
      read_file(std::string(MOTLEY_SOURCE_DIR) + "/tests/data/topo/dgx-1-v100.txt");
  std::vector<Facts> facts;
  std::vector<int> machines;
  for (int w = 0; w < 8; ++w) {
    Facts f = cpu(w < 4 ? "one" : "two");
    f.kind = "Tesla V100-SXM2-16GB";
    f.gpu = 3 - w % 4;
    f.memory = 16.9e9;
    f.topo = topo;
    facts.push_back(f);
    machines.push_back(w / 4);
  }
  Distances d(8);
  for (int a = 0; a < 8; ++a)
    for (int b = 0; b < 8; ++b)
      if (a != b) d.bandwidth[a][b] = a / 4 == b / 4 ? 4.4e10 : 1e9, d.latency[a][b] = 1e-5;
  const std::vector<DeviceRates> rates(8, {1e13, 1e14, 1e12, 4e-6});
  std::vector<std::string> warnings;
  std::vector<int> ranks;
  const Cluster cluster = parse_cluster(cluster_file("c", levels_of(d, machines), d, facts, rates,
                                                     types_of(facts, rates, &warnings), &ranks),
                                        "c");
  EXPECT_EQ(ranks, (std::vector<int>{3, 2, 1, 0, 7, 6, 5, 4}));
  EXPECT_EQ(cluster.type_of(0).name, "V100-16GB");
  EXPECT_EQ(cluster.groups[0].link.bandwidth, 1e9);
  int direct = 0;
  for (const Group& group : cluster.groups)
    for (const DirectLink& link : group.direct) {
      ++direct;
      EXPECT_NEAR(link.bandwidth * link.links, 4.4e10, 1e8);
    }
  EXPECT_EQ(direct, 2 * 6);  // the four of a quad are joined, each with each
}

}  // namespace
}  // namespace motley::discover
