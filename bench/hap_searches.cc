// Sections of hap_bench about searches: what they take, and what others find.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <string>
#include <utility>
#include <vector>

#include "capture/source.h"
#include "hap_plans.h"
#include "hap_sections.h"
#include "planner/program_plan.h"
#include "planner/segments.h"
#include "reduce/cluster.h"
#include "sim/simulate.h"
#include "solver/balance.h"
#include "solver/order.h"

namespace motley::hap {
namespace {

double processor_s() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

}  // namespace

void search_times(Bench* bench) {
  bench->figure("19", "Figure 19: search time on hap-64, least of 5, processor seconds");
  bench->paper("Fig 19");
  const Cluster cluster = load_cluster("hap-64");
  Panel panel{"ViT", {}, {{"search", {}}}};
  std::printf("%-40s %9s %12s %10s %9s\n", "model", "search s", "limited s", "times", "LP ms");
  for (const char* model :
       {"vit:layers=4", "vit:layers=8", "vit:layers=12", "vit:layers=16", "vit:layers=20",
        "vit:layers=24", "vit:layers=48", "vgg19", "bert:layers=24", "bert:layers=48",
        "bert-moe:layers=24,every=2,experts=128"}) {
    const Graph graph = load_graph(model, 256).graph;
    double seconds[2] = {kInf, kInf}, lp_s = kInf;
    Cluster tight = cluster;
    for (int limited = 0; limited < 2; ++limited) {
      const CostModel cost(limited == 1 ? tight : cluster);
      for (int r = 0; r < 5; ++r) {
        const double start = processor_s();
        const Theory theory(graph);
        planner::AlternationOptions options;
        options.memory_limit = limited == 1;
        const planner::Alternation s = planner::alternate(theory, cost, options);
        seconds[limited] = std::min(seconds[limited], processor_s() - start);
        bench->expect(s.feasible, fmt::format("{}: {}", model, s.reason));
        if (!s.feasible || limited == 1) continue;
        // Devices that hold four fifths of what this plan takes.
        for (size_t t = 0; t < tight.types.size(); ++t)
          tight.types[t].memory = 0.8 * s.cost.memory.peak[t];
        solver::BalanceProblem lp;
        lp.devices = cluster.count_by_type();
        for (const StageCost& stage : s.cost.stages)
          lp.stages.push_back({stage.comm_fixed, stage.comm_padded, stage.cut, stage.whole, 0});
        lp.sharded = {s.cost.memory.cut};
        lp.fixed = s.cost.memory.whole;
        lp.capacity.assign(lp.devices.size(), kInf);
        const double before = processor_s();
        for (int i = 0; i < 10; ++i) solver::balance(lp);
        lp_s = std::min(lp_s, (processor_s() - before) / 10);
      }
    }
    std::printf("%-40s %9.4f %12.4f %9.1fx %9.3f\n", model, seconds[0], seconds[1],
                seconds[1] / seconds[0], 1e3 * lp_s);
    bench->row(model, 64, "search", seconds[0]);
    bench->row(model, 64, "memory-limited search", seconds[1]);
    bench->row(model, 64, "load balancing", lp_s);
    if (std::string(model).rfind("vit", 0) == 0) {
      panel.at.push_back(std::string(model).substr(11));
      panel.systems[0].second.push_back(seconds[0]);
    }
  }
  bench->draw({panel}, "processor seconds, by layers");
}

// Alternation of program and ratios against a sweep (Q-B).
void sweep(Bench* bench) {
  bench->figure("sweep", "Alternation of program and ratios against a sweep over ratios by type");
  std::printf(
      "%-11s %-14s %5s %11s %11s %11s %8s %8s %7s   (nothing overlaps, no memory limit; missed: by "
      "alternation, by the planner)\n",
      "model", "cluster", "GPUs", "alternation", "planner", "sweep", "missed", "missed", "points");
  const Cluster hap = load_cluster("hap-64"), pair = load_cluster("hap-a100-p100");
  const DeviceType a100 = pair.types[0];
  // Two and three types on one switch.
  const Cluster three =
      flat_cluster({a100, hap.types[0], hap.types[1]}, {4, 4, 4}, hap.groups[0].link);
  struct Place {
    const char* name;
    Cluster cluster;
  };
  const std::vector<Place> places = {{"hap-64", some_of(hap, 1)},
                                     {"hap-64", some_of(hap, 4)},
                                     {"hap-64", hap},
                                     {"hap-a100-p100", pair},
                                     {"three types", three}};
  int cases = 0, missed[3] = {};
  double worst[3] = {};
  for (const Benchmark& b : kBenchmarks) {
    for (const Place& place : places) {
      const Cluster& cluster = place.cluster;
      const int types = static_cast<int>(cluster.types.size());
      const std::vector<int> count = cluster.count_by_type();
      const Graph graph = load_graph(spec_of(b, cluster.size()), b.batch * cluster.size()).graph;
      const Theory theory(graph);
      const CostModel cost(cluster);
      solver::OrderMemo orders;
      planner::AlternationOptions options;
      options.memory_limit = options.certify = false;
      options.orders = &orders;
      const planner::Alternation found = planner::alternate(theory, cost, options);
      options.polish = false;
      const planner::Alternation alone = planner::alternate(theory, cost, options);
      int points = 0;
      Seconds least = kInf;
      std::vector<double> where;  // [type] share of all devices of the type
      const auto visit = [&](const std::vector<double>& shares) {
        options.ratios.clear();
        for (int d = 0; d < cluster.size(); ++d)
          options.ratios.push_back(shares[cluster.devices[d].type] /
                                   count[cluster.devices[d].type]);
        const planner::Alternation s = planner::alternate(theory, cost, options);
        ++points;
        if (!s.feasible || s.cost.step >= least) return;
        least = s.cost.step;
        where = shares;
      };
      if (types == 2) {
        for (int i = 0; i <= 20; ++i) visit({i / 20., 1 - i / 20.});
        const double middle = where[0];
        for (int i = -8; i <= 8; ++i)
          if (const double x = middle + i / 200.; x >= 0 && x <= 1) visit({x, 1 - x});
      } else {
        for (int i = 0; i <= 8; ++i)
          for (int j = 0; i + j <= 8; ++j) visit({i / 8., j / 8., (8 - i - j) / 8.});
        const std::vector<double> middle = where;
        for (int i = -2; i <= 2; ++i)
          for (int j = -2; j <= 2; ++j) {
            const double x = middle[0] + i / 40., y = middle[1] + j / 40.;
            if (x >= 0 && y >= 0 && x + y <= 1) visit({x, y, 1 - x - y});
          }
      }
      // The best pair that anything found.
      const Seconds optimum = std::min({least, found.cost.step, alone.cost.step});
      const double misses[] = {alone.cost.step / optimum - 1, found.cost.step / optimum - 1,
                               least / optimum - 1};
      ++cases;
      for (int i = 0; i < 3; ++i) {
        missed[i] += misses[i] > 1e-3;
        worst[i] = std::max(worst[i], misses[i]);
      }
      std::printf(
          "%-11s %-14s %5d %11.4f %11.4f %11.4f %7.2f%% %7.2f%% %7d   %s\n", b.name, place.name,
          cluster.size(), alone.cost.step, found.cost.step, least, 100 * misses[0], 100 * misses[1],
          points,
          misses[1] > 1e-3 ? fmt::format("best at {:.3f}", fmt::join(where, " ")).c_str() : "");
      bench->row(b.name, cluster.size(), fmt::format("planner on {}", place.name), found.cost.step);
      bench->row(b.name, cluster.size(), fmt::format("alternation on {}", place.name),
                 alone.cost.step);
      bench->row(b.name, cluster.size(), fmt::format("sweep on {}", place.name), least);
    }
  }
  const char* names[] = {"alternation alone", "the planner", "the sweep"};
  for (int i = 0; i < 3; ++i)
    std::printf("%s missed by more than 0.1%% in %d of %d cases, by %.2f%% at most\n", names[i],
                missed[i], cases, 100 * worst[i]);
}

// Where ratios of their own pay (section 5.2).
void segments(Bench* bench) {
  bench->figure("segments",
                "Segments: seconds a step with one vector of ratios and with one for each");
  std::printf("%-11s %-14s %5s %11s %11s %7s %9s   %s\n", "model", "cluster", "GPUs", "one", "best",
              "gain", "segments", "tried");
  const Cluster hap = load_cluster("hap-64");
  const std::vector<std::pair<const char*, Cluster>> places = {
      {"hap-64", some_of(hap, 1)},
      {"hap-64", hap},
      {"hap-a100-p100", load_cluster("hap-a100-p100")},
      {"local-mixed-4", load_cluster("local-mixed-4")}};
  for (const Benchmark& b : kBenchmarks)
    for (const auto& [name, cluster] : places) {
      const std::string model = spec_of(b, cluster.size());
      const int64_t batch = b.batch * cluster.size();
      const Graph graph = load_graph(model, batch).graph;
      planner::ProgramRequest request = request_of(model, batch);
      request.reductions = reduce::reductions_of_all;
      request.alternation.memory_limit = std::string(name) != "local-mixed-4";
      planner::ProgramResult one = planner::plan_program(graph, cluster, request);
      if (!one.feasible) {
        std::printf("%-11s %-14s %5d %s\n", b.name, name, cluster.size(), one.reason.c_str());
        continue;
      }
      const Seconds before = simulate(one.plan).step;
      std::vector<planner::Segmented> tried;
      const planner::ProgramResult best = planner::plan_segments(
          std::move(one), graph, cluster, request, planner::parse_segments("auto"), &tried);
      const Seconds after = simulate(best.plan).step;
      bench->expect(after <= before, fmt::format("{} on {}: segments are slower", b.name, name));
      bench->expect(check(best.plan, request.alternation.memory_limit).empty(),
                    fmt::format("{} on {}: the plan is not sound", b.name, name));
      std::string list;
      for (const planner::Segmented& s : tried)
        list += fmt::format(
            " {}: {}", s.what,
            s.feasible ? fmt::format("{:+.2f}%", 100 * (s.simulated_s / before - 1)) : "none");
      std::printf("%-11s %-14s %5d %11.5f %11.5f %6.2f%% %9d  %s\n", b.name, name, cluster.size(),
                  before, after, 100 * (1 - after / before), best.plan.theory->segments(),
                  list.c_str());
      bench->row(b.name, cluster.size(), fmt::format("one on {}", name), before);
      bench->row(b.name, cluster.size(), fmt::format("segments on {}", name), after);
    }
}

}  // namespace motley::hap
