// Strategies: what they cost, where their ranks are placed, and the search over them.
#include "reference/grid.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <set>

#include "core/error.h"
#include "core/rng.h"
#include "grid/placement.h"
#include "grid/search.h"
#include "net/traffic.h"

namespace motley::grid {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// ---- cost model ----

Model small_gpt(int layers = 6) {
  TransformerShape shape;
  shape.layers = layers;
  shape.hidden = 1024;
  shape.heads = 16;
  return transformer_model("gpt", shape, fp16_adam());
}

Cluster two_kinds(int fast, int slow, int per_node) {
  return parse_cluster(
      fmt::format("name: two\nlink: {{bandwidth: 10 Gbps, latency: 30 us}}\ngroups:\n"
                  "  - {{name: v, count: {}, link: {{bandwidth: 170 Gbps, latency: 5 us}}, "
                  "devices: [{{type: V100-16GB, count: {}}}]}}\n"
                  "  - {{name: t, count: {}, link: {{bandwidth: 50 Gbps, latency: 5 us}}, "
                  "devices: [{{type: T4, count: {}}}]}}\n",
                  fast, per_node, slow, per_node),
      "two");
}

Estimator estimator_of(const Model& model, const Cluster& cluster) {
  return {model, cluster, default_calibration(cluster, model.precision)};
}

SearchOptions options_of(int batch, const std::string& fixed = "") {
  SearchOptions o;
  o.global_batch = batch;
  o.fixed = parse_fixed(fixed);
  return o;
}

TEST(Model, GptCountsItsParameters) {
  TransformerShape shape;  // GPT-2 medium
  const Model model = transformer_model("gpt", shape, fp16_adam());
  EXPECT_NEAR(model.parameters(), 354.8e6, 0.5e6);
  shape.tied = false;
  EXPECT_NEAR(transformer_model("gpt", shape, fp16_adam()).parameters(), 354.8e6 + 51.5e6, 0.5e6);
}

TEST(Estimate, RingsOfOneNodeShareItsNic) {
  const Cluster cluster = two_kinds(2, 0 + 1, 4);
  const Estimator e = estimator_of(small_gpt(), cluster);
  Strategy one = complete(e, options_of(32, "dp=2,devices=0/4"));
  Strategy four = complete(e, options_of(32, "dp=2,tp=4"));
  const double alone = e.mesh(one).data[0].seconds_per_byte;
  EXPECT_NEAR(e.mesh(four).data[0].seconds_per_byte, 4 * alone, 1e-12);
  // 2 (n-1)/n of the buffer over 0.8 of 10 Gbit/s.
  EXPECT_NEAR(alone, 1 / (10e9 / 8), 1e-12);
}

TEST(Estimate, RingsAgreeWithTheFluidSimulator) {
  const Cluster cluster = two_kinds(3, 1, 4);
  const Calibration ideal = default_calibration(cluster, fp16_adam());
  const Estimator e(small_gpt(), cluster, ideal);
  const net::Topology topology(cluster);
  for (const char* fixed : {"dp=16", "dp=8,tp=2", "dp=4,tp=4"}) {
    const Strategy s = complete(e, options_of(32, fixed));
    std::vector<std::vector<int>> groups;
    for (int t = 0; t < s.tp; ++t) {
      groups.emplace_back();
      for (int r = 0; r < s.dp; ++r) groups.back().push_back(s.device(0, r, 0, t));
    }
    const Bytes bytes = 1e9;
    const Seconds fluid =
        net::collective_time(topology, Collective::all_reduce, net::Algorithm::ring, groups, bytes);
    EXPECT_NEAR(e.mesh(s).data[0].seconds_per_byte * bytes, fluid, 0.01 * fluid) << fixed;
  }
}

TEST(Estimate, FixedChoicesAreCosted) {
  const Cluster cluster = load_cluster("amp-t4x16");
  const Estimator e = estimator_of(small_gpt(24), cluster);
  const Strategy s = complete(e, options_of(32, "pp=4,dp=4,tp=1,mbs=1,layers=6/6/6/6"));
  EXPECT_THAT(s.stages, ElementsAre(7, 6, 6, 7));
  EXPECT_EQ(to_string(s), "pp=4,dp=4,tp=1,mbs=1,layers=7/6/6/7");
  const Estimate x = e.estimate(s);
  EXPECT_GT(x.step, 0.1);
  EXPECT_NEAR(x.step, x.pipeline + x.tied + x.gradients + x.optimizer, 1e-12);
  EXPECT_TRUE(x.fits);
  const SearchResult found = search(e, options_of(32,
                                                  "pp=4,dp=4,tp=1,mbs=1,layers=6/6/6/6,zero=0,"
                                                  "recompute=none"));
  ASSERT_EQ(found.ranked.size(), 1u);
  EXPECT_LE(found.ranked[0].estimate.step, x.step + 1e-12);
}

TEST(Estimate, MemoryCountsWhatZeroAndRecomputationSave) {
  const Cluster cluster = load_cluster("amp-t4x16");
  const Estimator e = estimator_of(small_gpt(24), cluster);
  auto memory = [&](const std::string& more, Runtime runtime = Runtime::deepspeed) {
    SearchOptions options = options_of(128, "dp=16,mbs=8" + more);
    options.runtime = runtime;
    return e.estimate(complete(e, options)).memory[0];
  };
  const double parameters = small_gpt(24).parameters();
  // A layer's parameters are there whole while it runs.
  EXPECT_LT(memory(",zero=3", Runtime::motley), memory(",zero=2", Runtime::motley));
  EXPECT_GT(memory(",zero=3", Runtime::motley), memory(",zero=3"));
  EXPECT_NEAR(memory("") - memory(",zero=1"), parameters * 12 * 15 / 16, 1);
  EXPECT_NEAR(memory(",zero=1") - memory(",zero=2"), parameters * 8 * 15 / 16, 1);
  EXPECT_NEAR(memory(",zero=2") - memory(",zero=3"), parameters * 2 * 15 / 16, 1);
  EXPECT_LT(memory(",recompute=selective"), memory(""));
  EXPECT_LT(memory(",recompute=full"), memory(",recompute=selective"));
  const Estimate big = e.estimate(complete(e, options_of(512, "dp=16,mbs=32")));
  EXPECT_FALSE(big.fits);
  EXPECT_THAT(big.reason, HasSubstr("more than its device has"));
}

// Of the ZeRO stages only the least that fits is ranked.
TEST(Search, LeastZeroIsTheFirstThatFits) {
  const Cluster cluster = load_cluster("amp-t4x16");
  const Estimator e = estimator_of(small_gpt(24), cluster);
  SearchOptions options = options_of(128, "recompute=none");
  options.zero = {0, 1, 2};
  options.least_zero = true;
  options.keep = 1000;
  int divided = 0;
  std::set<std::string> seen;
  for (const Candidate& c : search(e, options).ranked) {
    Strategy s = c.strategy;
    s.zero = 0;
    s.stages.clear();
    EXPECT_TRUE(seen.insert(to_string(s)).second) << to_string(c.strategy);
    if (c.strategy.zero == 0) continue;
    s.zero = c.strategy.zero - 1;
    s.stages = c.strategy.stages;
    const Mesh mesh = e.mesh(s);
    EXPECT_FALSE(assign(e, mesh, true, &s, nullptr) && e.estimate(s, mesh).fits)
        << to_string(c.strategy);
    ++divided;
  }
  EXPECT_GT(divided, 0);
}

TEST(Strategy, MistakesAreNamed) {
  auto message = [](auto&& run) {
    try {
      run();
    } catch (const UserError& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  };
  EXPECT_THAT(message([] { parse_fixed("pp=x"); }), HasSubstr("pp=x: give a whole number"));
  EXPECT_THAT(message([] { parse_fixed("pq=2"); }), HasSubstr("pq is unknown"));
  EXPECT_THAT(message([] { parse_fixed("pp"); }), HasSubstr("has no \"=\""));
  EXPECT_THAT(message([] { parse_fixed("pp=1,pp=2"); }), HasSubstr("twice"));
  EXPECT_THAT(message([] { parse_fixed("zero=4"); }), HasSubstr("0 to 3"));
  const Cluster cluster = load_cluster("amp-t4x16");
  const Estimator e = estimator_of(small_gpt(24), cluster);
  auto fixed = [&](const std::string& text) {
    return message([&] { complete(e, options_of(32, text)); });
  };
  EXPECT_THAT(fixed("tp=3"), HasSubstr("tp=3 does not divide the 16 heads"));
  EXPECT_THAT(fixed("pp=2,layers=20/20"), HasSubstr("layers sum to 40"));
  EXPECT_THAT(fixed("dp=3,devices=0/1"), HasSubstr("pp*dp*cp*tp is 3"));
  EXPECT_THAT(fixed("dp=2,devices=0/0"), HasSubstr("placed twice"));
  EXPECT_THAT(fixed("ep=2"), HasSubstr("ep=2 must divide"));
}

// ---- placement ----

TEST(Placement, EnumerationFindsWhatPermutationsFind) {
  const Cluster cluster = two_kinds(2, 1, 2);
  const Model model = small_gpt();
  const Estimator e = estimator_of(model, cluster);
  for (const char* fixed : {"pp=3,dp=2", "pp=2,dp=2", "pp=3,tp=2", "pp=2,dp=1,tp=2"}) {
    const Strategy start = complete(e, options_of(24, fixed));
    double all = std::numeric_limits<double>::infinity(), found = all;
    std::vector<int> devices(cluster.size());
    std::iota(devices.begin(), devices.end(), 0);
    const net::Topology topology(cluster);
    do {
      Strategy s = start;
      s.devices.assign(devices.begin(), devices.begin() + s.ranks());
      bool inside = true;
      for (size_t i = 0; i < s.devices.size(); ++i)
        inside &=
            topology.leaf_group(s.devices[i]) == topology.leaf_group(s.devices[i / s.tp * s.tp]);
      if (inside) all = std::min(all, e.estimate(s).step);
    } while (std::next_permutation(devices.begin(), devices.end()));
    int visited = 0;
    EXPECT_TRUE(enumerate_placements(cluster, start.pp, start.dp, start.tp, 1000000,
                                     [&](const std::vector<int>& placement) {
                                       Strategy s = start;
                                       s.devices = placement;
                                       found = std::min(found, e.estimate(s).step);
                                       ++visited;
                                     }));
    EXPECT_DOUBLE_EQ(found, all) << fixed;
    EXPECT_LT(visited, 100) << fixed;
  }
  EXPECT_FALSE(enumerate_placements(cluster, 3, 2, 1, 3, [](const std::vector<int>&) {}));
}

TEST(Placement, HeuristicsKeepTensorParallelismInsideNodes) {
  const Cluster cluster = two_kinds(3, 1, 4);
  const auto placements = heuristic_placements(cluster, 2, 2, 4);
  EXPECT_GE(placements.size(), 3u);
  for (const auto& devices : placements)
    for (size_t i = 0; i < devices.size(); ++i) EXPECT_EQ(devices[i] / 4, devices[i / 4 * 4] / 4);
}

// ---- search ----

TEST(Search, PruningLosesNothing) {
  for (uint64_t seed = 0; seed < 6; ++seed) {
    Rng rng(seed);
    const Cluster cluster =
        two_kinds(static_cast<int>(rng.between(1, 2)), static_cast<int>(rng.between(1, 2)), 2);
    const Estimator e = estimator_of(small_gpt(static_cast<int>(rng.between(3, 8))), cluster);
    SearchOptions o = options_of(static_cast<int>(4 * rng.between(1, 4)));
    o.runtime = seed % 2 ? Runtime::motley : Runtime::deepspeed;
    o.heuristic_only = true;
    o.keep = 1;
    const SearchResult pruned = search(e, o);
    o.keep = 1000000;
    const SearchResult all = search(e, o);
    ASSERT_FALSE(pruned.ranked.empty());
    EXPECT_EQ(all.stop_reason, "exhausted");
    EXPECT_DOUBLE_EQ(pruned.ranked[0].estimate.step, all.ranked[0].estimate.step);
    EXPECT_LT(pruned.counters.estimated, all.counters.estimated);
    for (const Candidate& c : all.ranked) {
      EXPECT_GE(c.estimate.step, all.lower_bound);
      EXPECT_DOUBLE_EQ(e.estimate(c.strategy).step, c.estimate.step);
      EXPECT_LE(e.lower_bound(c.strategy, e.mesh(c.strategy)), c.estimate.step * (1 + 1e-12));
    }
  }
}

// One to three kinds of nodes behind links of any speed.
Cluster random_cluster(Rng* rng) {
  const char* const types[] = {"V100-16GB", "T4", "A100-40GB"};
  std::string groups;
  const auto kinds = static_cast<int>(rng->between(1, 3)), per_node = 1 << rng->between(0, 2);
  for (int k = 0; k < kinds; ++k)
    groups += fmt::format(
        "  - {{name: k{}, count: {}, link: {{bandwidth: {} Gbps, latency: 5 us}}, devices: "
        "[{{type: "
        "{}, count: {}}}]}}\n",
        k, rng->between(1, 2), rng->between(20, 400), types[k],
        rng->chance(0.8) ? per_node : static_cast<int>(rng->between(1, 3)));
  return parse_cluster(fmt::format("name: random\nlink: {{bandwidth: {} Gbps, latency: {} us}}\n"
                                   "groups:\n{}",
                                   rng->between(1, 60), rng->between(5, 50), groups),
                       "random");
}

TEST(Search, ThreadsFindTheSame) {
  int placed = 0, stopped = 0;
  for (uint64_t seed = 0; seed < 30; ++seed) {
    Rng rng(seed);
    const Cluster cluster = random_cluster(&rng);
    const Estimator e = estimator_of(small_gpt(static_cast<int>(rng.between(3, 8))), cluster);
    SearchOptions o = options_of(static_cast<int>(4 * rng.between(1, 4)));
    o.interleave = {1, 2};
    if (o.least_zero = seed % 3 > 0; o.least_zero) o.zero = {0, 1, 2, 3};
    const auto limited = [&] {  // by work, in every second case
      if (seed % 2 > 0)
        o.deadline = Deadline(Deadline::Limits{.work = 20 + static_cast<int64_t>(seed)});
      return search(e, o);
    };
    const SearchResult one = limited();
    o.threads = 5;
    const SearchResult several = limited();
    EXPECT_EQ(one.lower_bound, several.lower_bound) << seed;
    EXPECT_EQ(one.stop_reason, several.stop_reason) << seed;
    stopped += one.stop_reason == "time limit";
    o.heuristic_only = true;
    o.deadline = {};
    const SearchResult heuristic = search(e, o);
    ASSERT_EQ(one.ranked.size(), several.ranked.size()) << seed;
    for (size_t i = 0; i < one.ranked.size(); ++i) {
      EXPECT_EQ(to_string(one.ranked[i].strategy), to_string(several.ranked[i].strategy)) << seed;
      EXPECT_EQ(one.ranked[i].strategy.devices, several.ranked[i].strategy.devices) << seed;
      EXPECT_EQ(one.ranked[i].estimate.step, several.ranked[i].estimate.step) << seed;
    }
    if (!one.ranked.empty() && !heuristic.ranked.empty())
      placed += one.ranked[0].estimate.step < heuristic.ranked[0].estimate.step;
  }
  EXPECT_GT(placed, 3);
  EXPECT_GT(stopped, 3);
}

// Nodes of two types of devices each.
Cluster mixed_nodes(Rng* rng) {
  return parse_cluster(
      fmt::format("name: mixed\nlink: {{bandwidth: {} Gbps, latency: 10 us}}\ngroups:\n"
                  "  - {{name: n, count: {}, link: {{bandwidth: {} Gbps, latency: 5 us}}, devices: "
                  "[{{type: V100-16GB, count: {}}}, {{type: T4, count: {}}}]}}\n",
                  rng->between(10, 200), rng->between(1, 3), rng->between(100, 2000),
                  rng->between(1, 2), rng->between(1, 2)),
      "mixed");
}

// What is worked out once for equal layers and replicas is what each of them has; what is said
// before devices are placed is never more than after. On placements of whole groups and on any.
TEST(Search, ShortcutsAgreeWithTheLongWay) {
  int alike = 0, narrowed = 0;
  for (uint64_t seed = 0; seed < 400; ++seed) {
    Rng rng(seed);
    const Cluster cluster = random_cluster(&rng);
    const Estimator e = estimator_of(small_gpt(static_cast<int>(rng.between(3, 8))), cluster);
    Strategy s;
    s.runtime = seed % 2 ? Runtime::motley : Runtime::deepspeed;
    s.tp = 1 << rng.between(0, 2), s.cp = 1 << rng.between(0, 1);
    s.pp = static_cast<int>(rng.between(1, 3)), s.dp = static_cast<int>(rng.between(1, 4));
    if (s.ranks() > cluster.size()) continue;
    for (const auto& placement : heuristic_placements(cluster, s.pp, s.dp, s.tp * s.cp)) {
      s.devices = placement;
      const Mesh mesh = e.mesh(s);
      for (const Mesh::Ring& ring : mesh.data)
        EXPECT_LE(e.best_data_seconds_per_byte(s), ring.seconds_per_byte * (1 + 1e-12)) << seed;
      narrowed +=
          e.best_data_seconds_per_byte(s) > 1.01 * e.best_ring(s.dp * s.cp).seconds_per_byte;
    }
    std::vector<int> devices(cluster.size());
    std::iota(devices.begin(), devices.end(), 0);
    for (size_t i = devices.size(); i > 1; --i)
      std::swap(devices[i - 1], devices[rng.below(static_cast<int64_t>(i))]);
    if (rng.chance(0.5)) devices.assign(s.devices.begin(), s.devices.end());
    s.devices.assign(devices.begin(), devices.begin() + s.ranks());
    for (int r = 0; r < s.dp; ++r) s.micro_batches.push_back(static_cast<int>(rng.between(1, 3)));
    const Mesh mesh = e.mesh(s);
    Mesh apart = mesh;
    std::iota(apart.like.begin(), apart.like.end(), 0);
    alike += mesh.like != apart.like;
    Strategy other = s;
    ASSERT_EQ(assign(e, mesh, false, &s, nullptr), assign(e, apart, false, &other, nullptr));
    EXPECT_EQ(s.stages, other.stages);
    EXPECT_EQ(e.estimate(s, mesh).step, e.estimate(s, apart).step);
    const auto times = e.layer_times(mesh.types_of(0), s, mesh.tensor[0], mesh.context[0]);
    for (int l = 0; l < e.model().size(); ++l) {
      LayerTimes::Time slowest;
      for (int k = 0; k < s.cp * s.tp; ++k) {
        const int type = cluster.devices[s.devices[k]].type;
        const auto time = e.layer_time(l, type, s, mesh.tensor[0], mesh.context[0]);
        slowest.forward = std::max(slowest.forward, time.forward);
        slowest.backward = std::max(slowest.backward, time.backward);
      }
      EXPECT_EQ(times[l].forward, slowest.forward);
      EXPECT_EQ(times[l].backward, slowest.backward);
    }
  }
  EXPECT_GT(alike, 30);
  EXPECT_GT(narrowed, 30);
}

// The search that stops at its bounds finds what the one that costs everything finds, on random
// clusters, with everything that may be tried, where memory is short and where it is not, and where
// groups mix a type that is the faster one at products with one that is faster at memory or
// launches.
TEST(Search, BoundsLoseNothingOnRandomClusters) {
  int64_t costed = 0, all_costed = 0;
  int none = 0, divided = 0, contradictory = 0;
  for (uint64_t seed = 0; seed < 100; ++seed) {
    Rng rng(1000 + seed);
    const bool contradicts = seed >= 60;
    Cluster cluster = contradicts ? mixed_nodes(&rng) : random_cluster(&rng);
    TransformerShape shape;
    shape.layers = static_cast<int>(rng.between(3, 10));
    shape.hidden = 1024 << rng.between(0, 2);
    shape.heads = 8;
    if (rng.chance(0.2)) shape.experts = 4;
    const Model model = transformer_model("gpt", shape, fp16_adam());
    Calibration calibration = default_calibration(cluster, model.precision);
    cluster.groups[0].link.bandwidth *= 0.05 + rng.uniform();
    calibration.optimizer_passes = 1 + 5 * rng.uniform();
    const Seconds host = 0.01 * rng.uniform();
    if (contradicts) {
      for (auto& [name, rates] : calibration.types)
        rates = {1e13 * (1 + 20 * rng.uniform()), 1e11 * (1 + 20 * rng.uniform()),
                 1e-5 * (1 + 20 * rng.uniform())};
    }
    Rng constants(seed);
    for (auto& [name, rates] : calibration.types) {
      rates.step = host * constants.uniform();
      rates.collective = 1e-4 * constants.uniform();
    }
    const Estimator e(model, cluster, calibration);
    SearchOptions o = options_of(static_cast<int>(4 * rng.between(1, 6)));
    o.runtime = seed % 2 ? Runtime::motley : Runtime::deepspeed;
    o.heuristic_only = true;
    o.memory = rng.chance(0.7);
    o.cp = {1, 2};
    if (model.experts > 0) o.ep = {1, 2, 4};
    o.interleave = {1, 2};
    o.zero = {0, 1, 2, 3};
    o.least_zero = rng.chance(0.3);
    o.keep = 1;
    const SearchResult pruned = search(e, o);
    o.keep = 1000000;
    const SearchResult all = search(e, o);
    ASSERT_EQ(pruned.ranked.empty(), all.ranked.empty()) << seed;
    if (all.ranked.empty()) {
      ++none;
      continue;
    }
    EXPECT_EQ(pruned.ranked[0].estimate.step, all.ranked[0].estimate.step)
        << seed << " " << o.least_zero << " " << to_string(pruned.ranked[0].strategy) << " / "
        << to_string(all.ranked[0].strategy);
    EXPECT_LE(all.lower_bound, all.ranked[0].estimate.step * (1 + 1e-12)) << seed;
    costed += pruned.counters.estimated;
    all_costed += all.counters.estimated;
    divided += std::any_of(all.ranked.begin(), all.ranked.end(),
                           [](const Candidate& c) { return c.strategy.zero > 1; });
    contradictory +=
        contradicts && std::any_of(all.ranked.begin(), all.ranked.end(), [&](const Candidate& c) {
          return e.mesh(c.strategy).mixes.back().size() > 1;
        });
  }
  EXPECT_LT(none, 50);
  EXPECT_GT(divided, 10);
  EXPECT_GT(contradictory, 25);
  EXPECT_LT(costed, all_costed / 10);
}

TEST(Search, IsDeterministicAndBeatsTheBaselines) {
  const Cluster cluster = load_cluster("amp-mixed");
  const Estimator e = estimator_of(small_gpt(24), cluster);
  SearchOptions o = options_of(32);
  o.runtime = Runtime::deepspeed;
  const SearchResult a = search(e, o), b = search(e, o);
  ASSERT_FALSE(a.ranked.empty());
  EXPECT_EQ(a.ranked[0].strategy, b.ranked[0].strategy);
  EXPECT_LE(a.lower_bound, a.ranked[0].estimate.step);
  const auto known = baselines(e, o, a.ranked[0]);
  EXPECT_EQ(known.size(), 4u);
  for (const Baseline& baseline : known)
    EXPECT_TRUE(!baseline.feasible ||
                baseline.candidate.estimate.step >= a.ranked[0].estimate.step);
}

TEST(Search, DevicesThatDoNotFactorAreLeftOutOrShareUnequally) {
  const Cluster cluster = two_kinds(1, 1, 3);
  const Estimator e = estimator_of(small_gpt(4), cluster);
  const SearchResult r = search(e, options_of(10, "tp=1,pp=1"));
  ASSERT_FALSE(r.ranked.empty());
  bool unequal = false;
  for (const Candidate& c : r.ranked) {
    const auto& m = c.strategy.micro_batches;
    EXPECT_EQ(std::accumulate(m.begin(), m.end(), 0) * c.strategy.micro_batch, 10);
    unequal |= *std::max_element(m.begin(), m.end()) > *std::min_element(m.begin(), m.end());
  }
  EXPECT_TRUE(unequal);
}

TEST(Search, NothingFitsIsAValueWithItsReason) {
  const Cluster cluster = two_kinds(1, 1, 1);
  TransformerShape shape;
  shape.layers = 48;
  shape.hidden = 8192;
  shape.heads = 64;
  const Estimator e = estimator_of(transformer_model("big", shape, fp16_adam()), cluster);
  const SearchResult r = search(e, options_of(8));
  EXPECT_TRUE(r.ranked.empty());
  EXPECT_THAT(r.reason, HasSubstr("fits in memory"));
}

TEST(Search, InterleavingContextAndExpertParallelismAreCosted) {
  const Cluster cluster = load_cluster("amp-v100x16");
  TransformerShape shape;
  shape.layers = 16;
  shape.experts = 8;
  const Estimator e = estimator_of(transformer_model("moe", shape, fp16_adam()), cluster);
  const Estimate plain = e.estimate(complete(e, options_of(64, "pp=4,dp=4")));
  const Estimate experts = e.estimate(complete(e, options_of(64, "pp=4,dp=4,ep=4")));
  EXPECT_LT(experts.memory[0], plain.memory[0]);
  const Estimate context = e.estimate(complete(e, options_of(64, "pp=4,dp=2,cp=2")));
  EXPECT_LT(context.memory[0], plain.memory[0]);
  const Estimator dense = estimator_of(small_gpt(16), cluster);
  // Few micro-batches inside one node: interleaving halves the bubble.
  const Estimator wide = estimator_of(small_gpt(32), cluster);
  const Estimate once = wide.estimate(complete(wide, options_of(8, "pp=4"))),
                 twice = wide.estimate(complete(wide, options_of(8, "pp=4,interleave=2")));
  EXPECT_LT(twice.pipeline, once.pipeline);
  EXPECT_GT(twice.memory[0], once.memory[0]);
}

TEST(LayerTimes, AreInterpolated) {
  LayerTimes times;
  times.add("T4", 1, 2, 0, {1, 2});
  times.add("T4", 1, 4, 0, {2, 4});
  LayerTimes::Time t;
  ASSERT_TRUE(times.find("T4", 1, 3, 0, &t));
  EXPECT_DOUBLE_EQ(t.forward, 1.5);
  ASSERT_TRUE(times.find("T4", 1, 8, 0, &t));
  EXPECT_DOUBLE_EQ(t.backward, 8);
  ASSERT_TRUE(times.find("T4", 1, 1, 0, &t));
  EXPECT_DOUBLE_EQ(t.forward, 0.5);
  EXPECT_FALSE(times.find("T4", 2, 1, 0, &t));
}

}  // namespace
}  // namespace motley::grid
