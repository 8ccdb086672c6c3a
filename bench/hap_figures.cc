// Sections of hap_bench that are tables and figures of the paper, but for that of search times.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "capture/source.h"
#include "hap_plans.h"
#include "hap_sections.h"
#include "planner/program_plan.h"
#include "reduce/cluster.h"
#include "sim/simulate.h"

namespace motley::hap {
namespace {

double parameters(const Graph& graph) {
  double count = 0;
  for (const Parameter& p : graph.parameters)
    if (p.gradient.valid()) count += static_cast<double>(graph.spec(p.value).numel());
  return count;
}

struct Systems {
  Outcome hap, motley;
  std::map<std::string, Outcome> baselines;
};

const char* const kBaselines[] = {"dp-ev", "dp-cp", "zero", "expert-parallel"};

// All systems on one cluster. The search is to be no slower than any baseline, and certified.
Systems compare(Bench* bench, const Benchmark& b, const Cluster& cluster, bool same) {
  const std::string model = spec_of(b, cluster.size());
  const int64_t batch = b.batch * cluster.size();
  const Graph graph = load_graph(model, batch).graph;
  planner::ProgramRequest request = request_of(model, batch);
  Systems systems;
  request.baselines = request.alternation.certify = true;
  systems.hap = run(graph, cluster, request);
  request.parts = true;
  request.reductions = reduce::reductions_of_all;
  systems.motley = run(graph, cluster, request);
  request = request_of(model, batch);
  for (const char* name : kBaselines) {
    if (same && std::string(name) == "dp-cp") continue;
    if (b.experts == 0 && std::string(name) == "expert-parallel") continue;
    request.strategy = name;
    systems.baselines[name] = run(graph, cluster, request);
  }
  const Outcome& hap = systems.hap;
  const std::string where = fmt::format("{} on {} devices", b.name, cluster.size());
  bench->expect(hap.feasible, where + ": no plan, " + hap.reason);
  for (const planner::StrategyTime& baseline : hap.baselines)
    if (baseline.feasible)
      bench->expect(hap.predicted <= baseline.predicted_step_s * (1 + 1e-9),
                    fmt::format("{}: {:.4f} s, {} takes {:.4f} s", where, hap.predicted,
                                baseline.name, baseline.predicted_step_s));
  // The simulator counts every device's own pieces, the search the largest of a type.
  for (const auto& [name, baseline] : systems.baselines)
    if (baseline.feasible)
      bench->expect(
          hap.step <= baseline.step * 1.01,
          fmt::format("{}: simulated {:.4f} s, {} {:.4f} s", where, hap.step, name, baseline.step));
  bench->expect(certified(hap), fmt::format("{}: gap {:.2f}%", where, 100 * hap.gap));
  const Outcome& motley = systems.motley;
  bench->expect(motley.feasible && certified(motley),
                fmt::format("{}, motley: gap {:.2f}%", where, 100 * motley.gap));
  return systems;
}

void iteration_times(Bench* bench, const Cluster& all, const std::vector<int>& each,
                     const std::string& type, int machines, bool same) {
  std::printf("%-11s %5s %9s %9s %9s %9s %9s %9s  %7s %7s  %8s %9s  %s\n", "model", "GPUs", "HAP s",
              "motley s", "DP-EV s", "DP-CP s", "ZeRO s", "experts s", "x DP", "x best", "gap",
              "(apart)", "motley's");
  std::vector<Panel> panels;
  for (const Benchmark& b : kBenchmarks) {
    Panel panel{b.name, {}, {{"HAP", {}}, {"motley", {}}}};
    for (const char* name : kBaselines)
      if ((b.experts > 0 || std::string(name) != "expert-parallel") &&
          !(same && std::string(name) == "dp-cp"))
        panel.systems.push_back({name, {}});
    for (int k : each) {
      const Cluster cluster = some_of(all, k, type, machines);
      const Systems systems = compare(bench, b, cluster, same);
      panel.at.push_back(std::to_string(cluster.size()));
      double dp = kInf, best = kInf;
      const auto time = [&](const std::string& name) {
        const auto it = systems.baselines.find(name);
        return it == systems.baselines.end() || !it->second.feasible ? 0 : it->second.step;
      };
      for (const auto& [name, o] : systems.baselines) {
        if (!o.feasible) continue;
        if (name == "dp-ev" || name == "dp-cp") dp = std::min(dp, o.step);
        best = std::min(best, o.step);
      }
      panel.systems[0].second.push_back(systems.hap.step);
      panel.systems[1].second.push_back(systems.motley.step);
      for (size_t s = 2; s < panel.systems.size(); ++s)
        panel.systems[s].second.push_back(time(panel.systems[s].first));
      for (const auto& [name, values] : panel.systems)
        bench->row(b.name, cluster.size(), name, values.back());
      bench->row(b.name, cluster.size(), "gap", systems.hap.gap, "1");
      bench->row(b.name, cluster.size(), "motley gap", systems.motley.gap, "1");
      if (systems.motley.gap > kGap)
        bench->row(b.name, cluster.size(), "motley gap apart", systems.motley.apart, "1");
      const auto cell = [&](const std::string& name) {
        if (!systems.baselines.count(name)) return std::string("-");
        return time(name) > 0 ? fmt::format("{:.4f}", time(name)) : "no memory";
      };
      const auto ratio = [&](double t) {
        return t < kInf ? fmt::format("{:.2f}", t / systems.hap.step) : "-";
      };
      std::printf(
          "%-11s %5d %9.4f %9.4f %9s %9s %9s %9s  %7s %7s %8.2f%% %9s %8.2f%%%s\n", b.name,
          cluster.size(), systems.hap.step, systems.motley.step, cell("dp-ev").c_str(),
          cell("dp-cp").c_str(), cell("zero").c_str(), cell("expert-parallel").c_str(),
          ratio(dp).c_str(), ratio(best).c_str(), 100 * systems.hap.gap,
          systems.hap.apart > 0 ? fmt::format("({:.2f}%)", 100 * systems.hap.apart).c_str() : "",
          100 * systems.motley.gap,
          systems.motley.devices < cluster.size()
              ? fmt::format("{}  motley uses {}{}",
                            systems.motley.gap > kGap && systems.motley.apart > 0
                                ? fmt::format(" ({:.2f}%)", 100 * systems.motley.apart)
                                : "",
                            systems.motley.devices,
                            systems.motley.recomputes ? ", computes again for want of memory" : "")
                    .c_str()
              : "");
      // Why a speed-up is what it is: communication cannot cost less than nothing.
      if (k == each.back() && dp < kInf) {
        const Simulation sim = simulate(systems.hap.result.plan);
        double busy = 0;
        for (const DeviceTime& t : sim.devices) busy = std::max(busy, t.busy);
        std::printf(
            "%-11s       computation alone takes %.4f s of it: no plan with this balance is "
            "more than %.2fx DP\n",
            "", busy, dp / busy);
      }
    }
    panels.push_back(std::move(panel));
  }
  bench->draw(panels, "seconds a step, by GPUs");
}

// Seconds of a step for which types of devices wait for one another in turn: what no bound that
// weighs types sees (planner/alternation.h).
Seconds waiting(const Plan& plan) {
  const Shares shares(plan.ratios);
  const CostModel model(plan.cluster);
  const ProgramCost cost = cost_of(*plan.theory, plan.program, model,
                                   Fractions(plan.cluster, shares), plan.optimizer, 1, false);
  Seconds stages = 0;
  for (const StageCost& s : cost.stages)
    stages += *std::max_element(s.compute.begin(), s.compute.end());
  return stages - *std::max_element(cost.compute.begin(), cost.compute.end());
}

}  // namespace

void heterogeneous(Bench* bench) {
  bench->figure("13", "Figure 13: seconds a step on 2 V100 and 6 P100 machines");
  bench->paper("Fig 13");
  iteration_times(bench, load_cluster("hap-64"), {1, 2, 3, 4, 8}, "", 8, false);
}

void homogeneous(Bench* bench) {
  bench->figure("14", "Figure 14: seconds a step on 4 P100 machines");
  bench->paper("Fig 14");
  iteration_times(bench, load_cluster("hap-64"), {2, 4, 6, 8}, "P100-16GB", 4, true);
}

void models(Bench* bench) {
  bench->figure("table1", "Table 1: parameters in units of 2^20");
  bench->paper("Table 1");
  for (const Benchmark& b : kBenchmarks) {
    for (int devices : {4, 8, 64}) {
      if (b.experts == 0 && devices != 4) continue;
      const double count = parameters(load_graph(spec_of(b, devices), devices).graph) / (1 << 20);
      const double whole = count - b.per_device * devices;
      std::printf("  %-11s %9.1f  %s\n", b.name, count,
                  b.experts > 0 ? fmt::format("{:.1f} + {:.1f} for each of {} devices", whole,
                                              b.per_device, devices)
                                      .c_str()
                                : "");
      bench->row(b.name, devices, "parameters", count, "2^20");
      // The paper's numbers are cut off, not rounded; routers grow by 0.006 a device.
      bench->expect(std::floor(whole - (b.experts > 0 ? 0.006 * devices : 0)) == b.constant,
                    fmt::format("{}: {} Mi parameters, Table 1 has {}", b.name, whole, b.constant));
    }
  }
}

void ablation(Bench* bench) {
  bench->figure("15", "Figure 15: ablation on hap-64, samples a second");
  bench->paper("Fig 15");
  std::printf("%-11s %9s %9s %9s %9s   %s\n", "model", "DP-EV", "+Q", "+B", "+C",
              "Q: programs at even ratios; B: ratios; C: grouped pieces where faster");
  std::vector<Panel> panels;
  const Cluster cluster = load_cluster("hap-64");
  for (const Benchmark& b : kBenchmarks) {
    const std::string model = spec_of(b, cluster.size());
    const int64_t batch = b.batch * cluster.size();
    const Graph graph = load_graph(model, batch).graph;
    planner::ProgramRequest request = request_of(model, batch);
    const auto padded = [](Plan plan) {
      plan.program.steps.change([](std::vector<Step>& steps) {
        for (Step& s : steps) s.form = PieceForm::padded;
      });
      return simulate(plan).step;
    };
    request.strategy = "dp-ev";
    Outcome dp = run(graph, cluster, request);
    request.strategy.clear();
    request.alternation.ratios = planner::even_ratios(cluster);
    Outcome q = run(graph, cluster, request);
    request.alternation.ratios.clear();
    Outcome all = run(graph, cluster, request);
    const Seconds steps[] = {dp.feasible ? dp.step : 0,
                             q.feasible ? padded(std::move(q.result.plan)) : 0, 0,
                             all.feasible ? all.step : 0};
    double rates[4];
    for (int i = 0; i < 4; ++i) rates[i] = steps[i] > 0 ? static_cast<double>(batch) / steps[i] : 0;
    if (all.feasible) rates[2] = static_cast<double>(batch) / padded(std::move(all.result.plan));
    std::printf("%-11s %9s %9.0f %9.0f %9.0f\n", b.name,
                rates[0] > 0 ? fmt::format("{:.0f}", rates[0]).c_str() : "no memory", rates[1],
                rates[2], rates[3]);
    const char* names[] = {"DP-EV", "+Q", "+B", "+C"};
    Panel panel{b.name, {"64"}, {}};
    for (int i = 0; i < 4; ++i) {
      panel.systems.push_back({names[i], {rates[i]}});
      bench->row(b.name, 64, names[i], rates[i], "samples/s");
    }
    panels.push_back(std::move(panel));
  }
  bench->draw(panels, "samples a second");
}

void concurrent(Bench* bench) {
  bench->figure("16",
                "Figure 16: one job on all machines against one job per type, samples a second");
  bench->paper("Fig 16");
  std::printf("%-11s %5s %9s %11s %11s %7s\n", "model", "GPUs", "HAP", "2 V100", "6 P100", "share");
  const Cluster all = load_cluster("hap-64");
  std::vector<Panel> panels;
  for (const Benchmark& b : kBenchmarks) {
    Panel panel{b.name, {}, {{"HAP / concurrent", {}}}};
    for (int k : {1, 2, 3, 4, 8}) {
      double rates[3];
      const char* types[] = {"", "V100-16GB", "P100-16GB"};
      int devices = 0;
      for (int i = 0; i < 3; ++i) {
        const Cluster cluster = some_of(all, k, types[i]);
        if (i == 0) devices = cluster.size();
        const int64_t batch = b.batch * cluster.size();
        const std::string model = spec_of(b, cluster.size());
        const Outcome o = run(load_graph(model, batch).graph, cluster, request_of(model, batch));
        rates[i] = o.feasible ? static_cast<double>(batch) / o.step : 0;
      }
      const double share = rates[0] / (rates[1] + rates[2]);
      std::printf("%-11s %5d %9.0f %11.0f %11.0f %6.0f%%\n", b.name, devices, rates[0], rates[1],
                  rates[2], 100 * share);
      panel.at.push_back(std::to_string(devices));
      panel.systems[0].second.push_back(share);
      bench->row(b.name, devices, "HAP/concurrent", share, "1");
    }
    panels.push_back(std::move(panel));
  }
  bench->draw(panels, "share of the throughput");
}

void experts(Bench* bench) {
  bench->figure("17",
                "Figure 17: BERT-MoE with any number of experts on hap-a100-p100, 8 sequences "
                "an expert, seconds a step");
  bench->paper("Fig 17");
  std::printf("%7s %8s %8s %8s | %-31s | %s\n", "experts", "HAP s", "motley s", "all four",
              "experts padded to 4: least, most",
              "x HAP, x all four; gap of HAP; motley's devices and gap; "
              "of all four: gap (apart), types wait in turn, from the last");
  const Cluster cluster = load_cluster("hap-a100-p100");
  Panel panel{"BERT-MoE", {}, {{"HAP", {}}, {"all four", {}}, {"padded", {}}}};
  double before = 0;
  for (int64_t n = 4; n <= 16; ++n) {
    const int64_t batch = 8 * n, whole = (n + 3) / 4 * 4;
    std::string model = fmt::format("bert-moe:experts={}", n);
    const Graph graph = load_graph(model, batch).graph;
    planner::ProgramRequest request = request_of(model, batch);
    request.baselines = request.alternation.certify = true;
    const Outcome all = run(graph, cluster, request);
    request.parts = true;
    const Outcome hap = run(graph, cluster, request);
    request.reductions = reduce::reductions_of_all;
    const Outcome motley = run(graph, cluster, request);
    // DeepSpeed pads tensors of experts to the next multiple of the devices. The experts that are
    // not there cost at least their parameters and at most what experts with tokens do.
    model = fmt::format("bert-moe:experts={}", whole);
    Outcome padded[2];
    for (int most = 0; most < 2; ++most) {
      const int64_t samples = most == 1 ? 8 * whole : batch;
      request = request_of(model, samples);
      request.strategy = "expert-parallel";
      padded[most] = run(load_graph(model, samples).graph, cluster, request);
    }
    bench->expect(all.feasible && hap.feasible && motley.feasible,
                  fmt::format("{} experts: no plan", n));
    bench->expect(hap.predicted <= all.predicted * (1 + 1e-9),
                  fmt::format("{} experts: all four are faster", n));
    bench->expect(certified(hap), fmt::format("{} experts: gap {:.2f}%", n, 100 * hap.gap));
    bench->expect(motley.gap <= kGap,
                  fmt::format("{} experts, motley: gap {:.2f}%", n, 100 * motley.gap));
    for (const Outcome* plan : {&all, &hap})
      for (const planner::StrategyTime& baseline : plan->baselines)
        if (baseline.feasible)
          bench->expect(plan->predicted <= baseline.predicted_step_s * (1 + 1e-9),
                        fmt::format("{} experts: {} is faster", n, baseline.name));
    std::printf(
        "%7ld %8.4f %8.4f %8.4f | %14.4f  %15.4f | %.2f, %.2f; %.2f%%; %d, %.2f%%; %.2f%% "
        "(%.2f%%), %.4f s, %+.4f\n",
        static_cast<long>(n), hap.step, motley.step, all.step, padded[0].step, padded[1].step,
        padded[0].step / hap.step, padded[0].step / all.step, 100 * hap.gap, motley.devices,
        100 * motley.gap, 100 * all.gap, 100 * all.apart, waiting(all.result.plan),
        before > 0 ? all.step - before : 0);
    before = all.step;
    panel.at.push_back(std::to_string(n));
    panel.systems[0].second.push_back(hap.step);
    panel.systems[1].second.push_back(all.step);
    panel.systems[2].second.push_back(padded[1].step);
    bench->row("BERT-MoE", static_cast<int>(n), "HAP", hap.step);
    bench->row("BERT-MoE", static_cast<int>(n), "all four", all.step);
    bench->row("BERT-MoE", static_cast<int>(n), "all four gap", all.gap, "1");
    bench->row("BERT-MoE", static_cast<int>(n), "motley", motley.step);
    bench->row("BERT-MoE", static_cast<int>(n), "gap", hap.gap, "1");
    bench->row("BERT-MoE", static_cast<int>(n), "motley gap", motley.gap, "1");
    bench->row("BERT-MoE", static_cast<int>(n), "padded, least", padded[0].step);
    bench->row("BERT-MoE", static_cast<int>(n), "padded, most", padded[1].step);
  }
  std::printf(
      "HAP and motley leave the P100s out. Over all four devices bounds are loose:\nshares of the "
      "P100s go to zero, so that what\nis cut waits for the A100s and what is not "
      "for the P100s, and programs with all gradients hidden behind either\nkeep the bound low.\n");
  bench->draw({panel}, "seconds a step, by experts");
}

}  // namespace motley::hap
