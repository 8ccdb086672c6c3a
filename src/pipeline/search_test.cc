#include "pipeline/search.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <set>

#include "core/error.h"
#include "core/rng.h"

namespace motley::pipeline {
namespace {

// A small problem with random monotone costs: every layer has its own work and bytes, stages add
// them up plus a random part that grows with the stage, and meshes scale imperfectly. Some
// sub-clusters have devices of several kinds, each with a speed and a part of the memory.
struct Sample {
  SearchProblem problem;
  SearchOptions options;
};

Sample random_sample(uint64_t seed) {
  Rng rng(seed);
  Sample s;
  SearchProblem& p = s.problem;
  p.layers = static_cast<int>(rng.between(1, 7));
  int clusters = rng.chance(0.1) ? 4 : static_cast<int>(rng.between(1, 3));
  int total = 0;
  for (int c = 0; c < clusters; ++c) {
    SubCluster sub;
    sub.name = "c";
    sub.nodes = static_cast<int>(rng.between(1, 2));
    sub.devices = static_cast<int>(rng.between(1, clusters > 1 ? 2 : 4));
    if (total + sub.size() > 7) sub.nodes = sub.devices = 1;
    total += sub.size();
    sub.memory = rng.chance(0.6) ? static_cast<double>(rng.between(30, 140)) : 1e9;
    p.clusters.push_back(sub);
  }
  s.options.shapes = std::vector{Shapes::paper, Shapes::uneven, Shapes::both}[rng.below(3)];
  s.options.recompute = rng.chance(0.3);
  s.options.micro_batches = {1};
  s.options.pool = 0;
  if (rng.chance(0.2)) s.options.micro_batches = {1, 2, 3};
  if (rng.chance(0.25)) s.options.pipelines = {1, 2};
  s.options.any_order = rng.chance(0.8);
  s.options.joint_orders = static_cast<int>(rng.between(2, 5));
  p.batch = rng.between(1, 24);
  bool classes = rng.chance(0.3);
  std::vector<double> work, weight, hold;
  for (int l = 0; l < p.layers; ++l) {
    int kind = static_cast<int>(rng.below(2));
    if (classes) p.layer_class.push_back(kind);
    work.push_back(classes ? 3.0 + kind : static_cast<double>(rng.between(1, 12)));
    weight.push_back(classes ? 5.0 + 4 * kind : static_cast<double>(rng.between(1, 15)));
    hold.push_back(classes ? 9.0 + kind : static_cast<double>(rng.between(2, 30)));
  }
  std::vector<double> speed;
  for (int c = 0; c < clusters; ++c) speed.push_back(static_cast<double>(rng.between(1, 4)));
  Rng unequal(mix64(seed));
  for (SubCluster& sub : p.clusters) {
    if (sub.size() == 1 || !unequal.chance(0.3)) continue;
    for (int d = 0; d < sub.size(); ++d) sub.kinds.push_back(static_cast<int>(unequal.below(3)));
  }
  // Speed and memory of a slice, in devices.
  const auto devices_in = [clusters = p.clusters](const Mesh& mesh) {
    const std::vector<int>& kinds = clusters[mesh.cluster].kinds;
    if (kinds.empty()) return static_cast<double>(mesh.size());
    double sum = 0;
    for (int d = mesh.at; d < mesh.at + mesh.size(); ++d) sum += 1 + 0.7 * kinds[d];
    return sum;
  };
  double loss = rng.uniform() * 0.5, extra = rng.uniform();
  double slow = rng.chance(0.3) ? 20.0 : 2.0;
  p.stage_cost = [=](const StageQuery& q) {
    StageProfile r;
    double w = 0, bytes = 0, held = 0;
    for (int l = q.first; l <= q.last; ++l) {
      w += work[l];
      bytes += weight[l];
      held += hold[l];
    }
    double n = devices_in(q.mesh);
    double scale =
        static_cast<double>(q.micro_batch) / (speed[q.mesh.cluster] * n / (1 + loss * (n - 1)));
    w += extra * (q.last - q.first);
    r.forward = w / 3 * scale;
    r.backward = w * (q.mesh.recompute ? 1.0 : 2.0 / 3) * scale;
    r.state = bytes / n;
    r.activation = (q.mesh.recompute ? 0.25 : 1) * held * static_cast<double>(q.micro_batch) / n;
    r.reduce = bytes / n;
    return r;
  };
  uint64_t link_seed = rng.next();
  p.link_cost = [=](int layer, int from, int to, int64_t micro_batch, int pipelines) {
    uint64_t r = mix64(link_seed ^ static_cast<uint64_t>(layer * 100 + from * 10 + to));
    double c = static_cast<double>(r % 7) * 0.25 * (from == to ? 0.2 : slow);
    if (from != to) c *= pipelines;
    return LinkTime{c * static_cast<double>(micro_batch), (r >> 20) % 2 ? c : 0.5 * c};
  };
  if (rng.chance(0.2)) p.tied_cost = [](int a, int b, int d) { return d * (1.0 + 2 * a + 3 * b); };
  return s;
}

// Every plan of the space, one by one.
Seconds brute_force(const Sample& s, int64_t* plans) {
  Seconds best = std::numeric_limits<double>::infinity();
  std::vector<Shapes> families = {s.options.shapes};
  if (s.options.shapes == Shapes::both) families = {Shapes::paper, Shapes::uneven};
  for (int d : s.options.pipelines)
    for (int64_t m : s.options.micro_batches) {
      if (s.problem.batch % (d * m) != 0) continue;
      SearchProblem p = s.problem;
      bool divides = true;
      for (SubCluster& c : p.clusters) {
        if (c.nodes % d == 0)
          c.nodes /= d;
        else if (c.nodes == 1 && c.devices % d == 0)
          c.devices /= d;
        else
          divides = false;
        for (size_t i = 0; i < c.kinds.size() && divides; ++i)
          for (size_t j = i % c.size(); j < i; j += c.size())
            divides = divides && c.kinds[i] == c.kinds[j];
      }
      if (!divides) continue;
      int count = static_cast<int>(p.batch / (d * m));
      for (Shapes shapes : families) {
        std::vector<int> order(p.clusters.size());
        std::iota(order.begin(), order.end(), 0);
        do {
          std::vector<Stage> stages;
          std::function<void(int, size_t, int)> grow = [&](int layer, size_t at, int device) {
            if (at == order.size()) {
              if (layer < p.layers) return;
              ++*plans;
              best = std::min(best,
                              evaluate(p, stages, m, count, d, s.options.memory_limit).objective);
              return;
            }
            int c = order[at];
            for_each_mesh(p.clusters[c], c, shapes, device, [&](Mesh mesh, int behind) {
              for (int recompute = 0; recompute <= s.options.recompute; ++recompute)
                for (int last = layer; last < p.layers; ++last) {
                  mesh.recompute = recompute;
                  StageProfile profile = p.stage_cost({layer, last, mesh, m, d});
                  if (profile.state + profile.activation > p.clusters[c].memory * (1 + 1e-12))
                    continue;
                  stages.push_back({layer, last, mesh, profile});
                  bool full = behind == p.clusters[c].size();
                  grow(last + 1, full ? at + 1 : at, full ? 0 : behind);
                  stages.pop_back();
                }
            });
          };
          grow(0, 0, 0);
        } while (s.options.any_order && std::next_permutation(order.begin(), order.end()));
      }
    }
  return best;
}

TEST(Search, EqualsBruteForce) {
  int infeasible = 0, memory = 0, several = 0, unequal = 0, straddling = 0;
  int64_t plans = 0;
  for (uint64_t seed = 0; seed < 7000; ++seed) {
    Sample s = random_sample(seed);
    Seconds expected = brute_force(s, &plans);
    SearchResult r = search(s.problem, s.options);
    ASSERT_EQ(r.feasible, expected < 1e300) << "seed " << seed;
    if (!r.feasible) {
      ++infeasible;
      continue;
    }
    ASSERT_NEAR(r.objective, expected, 1e-9 * expected) << "seed " << seed;
    ASSERT_EQ(r.lower_bound, r.objective);
    ASSERT_EQ(r.best.objective, r.objective);
    // Nothing else is found where only plans that are worth it are looked for.
    s.options.worth = expected * 1.001;
    ASSERT_NEAR(search(s.problem, s.options).objective, expected, 1e-9 * expected);
    s.options.worth = expected * 0.999;
    ASSERT_FALSE(search(s.problem, s.options).feasible) << "seed " << seed;
    memory += r.best.period > least_period(r.best.pipeline) * (1 + 1e-9);
    several += r.best.stages.size() > 2;
    bool any = false, mixed = false;
    for (const SubCluster& c : s.problem.clusters) any = any || !c.kinds.empty();
    for (const Stage& stage : r.best.stages) {
      const std::vector<int>& kinds = s.problem.clusters[stage.mesh.cluster].kinds;
      for (int d = 1; d < stage.mesh.size() && !kinds.empty(); ++d)
        mixed = mixed || kinds[stage.mesh.at + d] != kinds[stage.mesh.at];
    }
    unequal += any;
    straddling += mixed;
  }
  EXPECT_GT(infeasible, 170);
  EXPECT_GT(memory, 170);  // optimal plans that wait for memory
  EXPECT_GT(several, 700);
  EXPECT_GT(unequal, 1700);
  EXPECT_GT(straddling, 170);  // optimal plans with stages of several kinds
  EXPECT_GT(plans, 300'000);
}

TEST(Search, ReturnsAWholePlan) {
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    Sample s = random_sample(seed);
    s.options.pool = 4;
    SearchResult r = search(s.problem, s.options);
    if (!r.feasible) continue;
    for (const PipelinePlan& plan : r.pool) {
      int layer = 0;
      std::map<int, int> used;
      for (const Stage& stage : plan.stages) {
        EXPECT_EQ(stage.first, layer);
        EXPECT_GE(stage.last, stage.first);
        layer = stage.last + 1;
        used[stage.mesh.cluster] += stage.mesh.size();
      }
      EXPECT_EQ(layer, s.problem.layers);
      for (size_t c = 0; c < s.problem.clusters.size(); ++c)
        EXPECT_EQ(used[static_cast<int>(c)] * plan.pipelines, s.problem.clusters[c].size());
      EXPECT_EQ(plan.micro_batch * plan.micro_batches * plan.pipelines, s.problem.batch);
      for (size_t i = 0; i < plan.counts.size(); ++i)
        EXPECT_LE(plan.counts[i], plan.pipeline.in_flight_limit[i]);
      EXPECT_GE(plan.objective, r.objective);
      EXPECT_GE(plan.makespan, r.best.makespan);
      EXPECT_GE(plan.makespan,
                makespan_lower_bound(plan.pipeline, plan.micro_batches) * (1 - 1e-12));
    }
  }
}

TEST(Search, PlansEachDistinctStageOnce) {
  for (uint64_t seed = 0; seed < 500; ++seed) {
    Sample s = random_sample(seed);
    s.options.pipelines = {1};
    s.options.micro_batches = {1};
    if (s.problem.layer_class.empty()) continue;
    std::set<std::tuple<std::vector<int>, int, int, int, int, bool>> seen;
    auto inner = s.problem.stage_cost;
    s.problem.stage_cost = [&](const StageQuery& q) {
      std::vector<int> content(s.problem.layer_class.begin() + q.first,
                               s.problem.layer_class.begin() + q.last + 1);
      EXPECT_TRUE(seen.insert({content, q.mesh.cluster, q.mesh.at, q.mesh.nodes, q.mesh.devices,
                               q.mesh.recompute})
                      .second);
      return inner(q);
    };
    SearchResult r = search(s.problem, s.options);
    EXPECT_EQ(r.planned, static_cast<int64_t>(seen.size()));
  }
}

TEST(Search, RefusesNonsense) {
  Sample s = random_sample(1);
  s.problem.layers = 0;
  EXPECT_THROW(search(s.problem, s.options), UserError);
}

TEST(ForEachMesh, PaperShapes) {
  std::set<std::pair<int, int>> shapes;
  for_each_mesh({"a", 3, 4, 0}, 0, Shapes::paper, 0, [&](const Mesh& m, int) {
    shapes.insert({m.nodes, m.devices});
  });
  EXPECT_EQ(shapes, (std::set<std::pair<int, int>>{{1, 1}, {1, 2}, {1, 4}, {2, 4}, {3, 4}}));
}

// A slice stands for all of the same kinds: it is named by the first.
TEST(ForEachMesh, UnequalDevices) {
  int elsewhere = 0;
  for (uint64_t seed = 0; seed < 200; ++seed) {
    Rng rng(seed);
    SubCluster c{"a", static_cast<int>(rng.between(1, 4)), static_cast<int>(rng.between(1, 4)), 0};
    std::vector<std::vector<int>> nodes(2);
    for (auto& node : nodes)
      for (int d = 0; d < c.devices; ++d) node.push_back(static_cast<int>(rng.below(2)));
    for (int n = 0; n < c.nodes; ++n)
      for (int kind : nodes[rng.below(2)]) c.kinds.push_back(kind);
    for (Shapes shapes : {Shapes::paper, Shapes::uneven}) {
      std::map<std::tuple<int, int, int>, std::vector<int>> kinds_of;  // a mesh
      for (int d = 0; d < c.size(); ++d)
        for_each_mesh(c, 0, shapes, d, [&](const Mesh& m, int behind) {
          const std::vector<int> kinds(c.kinds.begin() + d, c.kinds.begin() + behind);
          ASSERT_EQ(behind - d, m.size());
          ASSERT_LE(m.at, d);
          EXPECT_EQ(kinds,
                    std::vector<int>(c.kinds.begin() + m.at, c.kinds.begin() + m.at + m.size()));
          EXPECT_TRUE(m.nodes == 1 || m.at % c.devices == 0);
          EXPECT_LE(m.at % c.devices + m.devices, c.devices);
          EXPECT_EQ(kinds_of.try_emplace({m.at, m.nodes, m.devices}, kinds).first->second, kinds);
          elsewhere += m.at < d;
        });
    }
  }
  EXPECT_GT(elsewhere, 500);
}

}  // namespace
}  // namespace motley::pipeline
