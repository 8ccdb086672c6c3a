#include "planner/parts.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <numeric>
#include <set>

#include "cluster/part.h"
#include "core/rng.h"
#include "cost/overlap.h"
#include "reference/least_of_all.h"
#include "reference/sample.h"
#include "reference/spmd_graphs.h"
#include "solver/folded.h"
#include "solver/order.h"

namespace motley::spmd {
namespace {

// Groups of devices of one type each, joined by slow links.
Cluster groups_of(const std::vector<std::pair<int, int>>& groups, double slow, double fast) {
  std::string yaml =
      fmt::format("name: tree\nlink: {{bandwidth: {} B/s, latency: 20 us}}\ngroups:\n", slow);
  for (const auto& [type, count] : groups)
    yaml += fmt::format(
        "  - {{name: g, link: {{bandwidth: {} B/s, latency: 5 us}}, devices: [{{type: t{}, count: "
        "{}}}]}}\n",
        fast, type, count);
  yaml += "device_types:\n";
  for (int t = 0; t < 2; ++t)
    yaml += fmt::format(
        "  - {{name: t{}, flops: {} GFLOPS, memory: 16 GiB, memory_bandwidth: {} GB/s, overhead: 1 "
        "us}}\n",
        t, t == 0 ? 400 : 100, t == 0 ? 20 : 5);
  return parse_cluster(yaml, "tree");
}

// The devices of every group in use, sorted where groups are alike (same type and size).
std::vector<std::vector<int>> shape(const Cluster& cluster, const std::vector<int>& devices) {
  std::vector<std::vector<int>> groups;  // type, size, in use
  for (const Group& g : cluster.groups) {
    if (!g.children.empty()) continue;
    int in_use = 0;
    for (int d : devices) in_use += d >= g.first_device && d < g.first_device + g.device_count;
    groups.push_back({cluster.devices[g.first_device].type, g.device_count, in_use});
  }
  std::sort(groups.begin(), groups.end());
  return groups;
}

TEST(Parts, ChoicesAreAllSubsetsButThoseAlike) {
  const Cluster cluster = groups_of({{0, 2}, {1, 3}, {0, 2}, {1, 3}}, 1e9, 1e10);
  std::set<std::vector<std::vector<int>>> shapes, listed;
  for (unsigned set = 1; set < 1u << cluster.size(); ++set) {
    std::vector<int> devices;
    for (int d = 0; d < cluster.size(); ++d)
      if (set >> d & 1) devices.push_back(d);
    shapes.insert(shape(cluster, devices));
  }
  const auto choices = choices_of_devices(cluster, 1000);
  for (const auto& devices : choices) listed.insert(shape(cluster, devices));
  EXPECT_EQ(listed, shapes);
  EXPECT_EQ(choices.size(), shapes.size());
  EXPECT_EQ(shapes.size(), 6 * 10 - 1);
  EXPECT_TRUE(choices_of_devices(cluster, 58).empty());
}

// Seconds of a program with gradients beside the backward pass.
Seconds step_of(const Theory& theory, const CostModel& model, const std::vector<double>& ratios,
                Program program, Optimizer optimizer) {
  const Shares shares(ratios);
  const Fractions fractions(model.cluster(), shares);
  choose_forms(theory, &program, model, fractions);
  return cost_of(theory, program, model, fractions, optimizer, 1, false).step -
         hidden_seconds(theory, program, model, fractions);
}

std::vector<double> by_type(const Cluster& cluster, const std::vector<double>& of_type) {
  const std::vector<int> count = cluster.count_by_type();
  std::vector<double> ratios;
  for (const Device& d : cluster.devices) ratios.push_back(of_type[d.type] / count[d.type]);
  return ratios;
}

std::vector<int> some_devices(const Cluster& cluster, Rng* rng) {
  std::vector<int> devices;
  while (devices.empty())
    for (int d = 0; d < cluster.size(); ++d)
      if (rng->chance(0.5)) devices.push_back(d);
  return devices;
}

// A model of which every program can be looked at.
Graph one_layer(int batch, int inner) {
  return parse_graph(fmt::format(R"(%0 = motley::input("x") : f32[{0},{1}]
%1 = motley::parameter("w") : f32[{1},{1}]
%2 = aten::mm(%0, %1) : f32[{0},{1}]
%3 = aten::sum(%2, none) : f32[]
%4 = aten::ones([{0}, {1}], f32, none, none, none) : f32[{0},{1}] backward
%5 = aten::t(%0) : f32[{1},{0}] backward
%6 = aten::mm(%5, %4) : f32[{1},{1}] backward
loss %3
gradient "w" %6
)",
                                 batch, inner),
                     "one layer");
}

// Against every program on every subset of the devices, at shares all along the line.
TEST(Parts, BoundsAreBelowTheBestOfAllProgramsEverywhere) {
  Rng rng(11);
  int whole = 0, tight = 0;
  for (int trial = 0; trial < 5; ++trial) {
    const Graph graph = one_layer(16 << rng.below(4), 64 << rng.below(3));
    const Theory theory(graph);
    const Cluster cluster =
        groups_of({{0, 2}, {1, 2}}, std::pow(10.0, 6 + 3 * rng.uniform()), 1e10);
    SynthesisOptions options;
    options.optimizer = Optimizer::sgd;
    // The best there is on each choice of devices.
    std::vector<std::pair<Seconds, std::vector<int>>> best;
    for (const std::vector<int>& devices : choices_of_devices(cluster, 100)) {
      const Cluster part = part_of(cluster, devices);
      const CostModel model(part);
      Seconds least = std::numeric_limits<Seconds>::infinity();
      const int points = part.types.size() == 1 ? 0 : 20;
      for (int i = 0; i <= points; ++i) {
        const double x = points == 0 ? 1 : static_cast<double>(i) / points;
        least = std::min(
            least, least_of_all(theory, model,
                                Fractions(model.cluster(), Shares(by_type(part, {x, 1 - x})))));
      }
      best.emplace_back(least, devices);
      // At any shares of its own.
      const Elsewhere own = bound_at_any_shares(theory, model, options, least, 1'000'000);
      EXPECT_LE(own.bound, least * (1 + 1e-9)) << trial;
      tight += own.bound >= 0.98 * least;
    }
    std::sort(best.begin(), best.end());
    whole += best[0].second.size() == 4;
    for (const size_t i : {size_t{0}, best.size() - 1}) {
      const Seconds others = best[i == 0 ? 1 : 0].first;
      const Elsewhere found = bound_elsewhere(theory, cluster, best[i].second, nullptr, options,
                                              best[i].first, 2'000'000);
      EXPECT_LE(found.bound, others * (1 + 1e-9)) << trial;
      EXPECT_LE(found.bound, best[i].first * (1 + 1e-9)) << trial;
      EXPECT_GE(found.bound, 0.95 * std::min(others, best[i].first)) << trial;
      const Elsewhere computed =
          bound_elsewhere(theory, cluster, best[i].second, nullptr, options, best[i].first, 0);
      EXPECT_LE(computed.bound, found.bound * (1 + 1e-9)) << trial;
      EXPECT_EQ(computed.searched, 0);
    }
  }
  EXPECT_GT(whole, 0);
  EXPECT_LT(whole, 5);
  EXPECT_GT(tight, 30);
}

// Programs drawn at random, on devices and at shares drawn at random; with choices of devices one
// by one and together.
TEST(Parts, BoundsHoldAgainstRandomPrograms) {
  int together = 0;
  for (const char* name : kGraphs)
    for (const bool many : {false, true}) {
      const Graph graph = load(name);
      const Theory theory(graph);
      const Cluster cluster = many ? groups_of({{0, 4}, {0, 4}, {1, 4}, {1, 4}}, 1e9, 1e10)
                                   : groups_of({{0, 2}, {1, 2}}, 1e9, 1e10);
      together += choices_of_devices(cluster, 200).empty();
      SynthesisOptions options;
      Rng rng(5);
      // Bounds of a step that no program takes: as high as they get.
      std::vector<int> own(cluster.size());
      std::iota(own.begin(), own.end(), 0);
      const CostModel whole(cluster);
      SynthesisOptions overlapped = options;
      overlapped.overlap = true;
      overlapped.certify = false;
      const Seconds step = 3 * synthesize(theory, whole, overlapped).step();
      const Elsewhere others =
          bound_elsewhere(theory, cluster, own, nullptr, options, step, 300'000);
      const Elsewhere shares = bound_at_any_shares(theory, whole, options, step, 300'000);
      EXPECT_GT(others.bound, 0);
      EXPECT_GT(shares.searched, 1);
      for (int trial = 0; trial < 24; ++trial) {
        const std::vector<int> devices = trial % 4 == 0 ? own : some_devices(cluster, &rng);
        const Cluster part = part_of(cluster, devices);
        const CostModel model(part);
        const double x = part.types.size() == 1 ? 1 : rng.uniform();
        const std::vector<double> ratios = by_type(part, {x, 1 - x});
        Builder builder(theory, model, options.optimizer);
        const Shares at(ratios);
        builder.price(Fractions(part, at));
        // One drawn, and the cheapest at these shares.
        for (const Program& program :
             {random_program(builder, &rng),
              builder.program(solve_folded(
                  builder.problem(), make_order(builder.problem()),
                  {std::vector<double>(part.types.size(), 1.0 / part.types.size()), {}},
                  {.max_states = 500}))}) {
          const Seconds seconds = step_of(theory, model, ratios, program, options.optimizer);
          EXPECT_GE(seconds, (devices == own ? shares : others).bound * (1 - 1e-9))
              << name << " " << many << " on " << devices.size();
        }
      }
    }
  EXPECT_EQ(together, 3);
}

}  // namespace
}  // namespace motley::spmd
