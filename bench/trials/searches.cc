#include "trials/searches.h"

#include <fmt/format.h>

#include <ctime>
#include <string>
#include <vector>

#include "reference/grid.h"
#include "trials/judge.h"
#include "trials/sets.h"

namespace motley::grid::trials {

namespace {

struct Searched {
  std::string name;
  Cluster cluster;
  Model model;
  int global_batch = 0;
  Calibration calibration;
  std::string fixed;
  LayerTimes times;
  std::vector<int> cp = {1};  // context-parallel degrees tried
};

void search_times(const std::vector<Searched>& cases) {
  fmt::print("\n{:24} {:>7} {:>10} {:>10} {:>8} {:>8} {:>9}  {}\n", "search", "devices", "step s",
             "bound s", "CPU s", "found", "costed", "best, stop, baselines");
  for (const Searched& c : cases) {
    const Estimator estimator(c.model, c.cluster, c.calibration, c.times);
    SearchOptions options;
    options.global_batch = c.global_batch;
    options.runtime = Runtime::deepspeed;
    options.fixed = parse_fixed(c.fixed);
    options.cp = c.cp;
    const std::clock_t before = std::clock();
    const SearchResult r = search(estimator, options);
    const double cpu = static_cast<double>(std::clock() - before) / CLOCKS_PER_SEC;
    if (r.ranked.empty()) {
      fmt::print("{:24} {}\n", c.name, r.reason);
      continue;
    }
    const Candidate& best = r.ranked[0];
    fmt::print("{:24} {:7} {:10.4f} {:10.4f} {:8.3f} {:8} {:9}  {} ({})\n", c.name,
               c.cluster.size(), best.estimate.step, r.lower_bound, cpu, r.counters.enumerated,
               r.counters.estimated, to_string(best.strategy), r.stop_reason);
    for (const Baseline& b : baselines(estimator, options, best))
      fmt::print("    {:20} {}\n", b.name,
                 b.feasible
                     ? fmt::format("{:.4f} s, {:.2f} times as long: {}", b.candidate.estimate.step,
                                   b.candidate.estimate.step / best.estimate.step,
                                   to_string(b.candidate.strategy))
                     : b.reason);
  }
}

}  // namespace

void search_all() {
  std::vector<Searched> cases;
  Calibration mixed;
  for (const char* name : {"amp-t4x16", "amp-mixed"}) {
    const Set set = amp(name);
    Predictor predict(set, fit({{&set, rows_of(set)}}, {&set}));
    const Estimator& fitted = predict.estimator(0, 0);
    mixed = fitted.calibration();
    cases.push_back({name, fitted.cluster(), set.models[0], 32, mixed, "", set.times});
    if (std::string(name) != "amp-mixed") continue;
    // With every device: AMP's best degrees (1.28 s measured) with other layers, and one pipeline.
    for (const char* fixed : {"pp=8,dp=2,tp=1,mbs=1,zero=0,recompute=none", "pp=16,dp=1,tp=1"})
      cases.push_back({fmt::format("  {:.14}", fixed), fitted.cluster(), set.models[0], 32, mixed,
                       fixed, set.times});
  }
  const Set transgan = amp("amp-v100x16");
  cases.push_back(
      {transgan.name, transgan.clusters[0], transgan.models[0], 64, mixed, "", transgan.times});
  for (int nodes : {32, 512}) {
    const Cluster cluster = parse_cluster(
        fmt::format("name: mixed-{0}\nlink: {{bandwidth: 200 Gbps, latency: 5 us}}\ngroups:\n"
                    "  - {{name: a, count: {1}, link: {{bandwidth: 300 GB/s, latency: 2 us}}, "
                    "devices: [{{type: A100-80GB, count: 8}}]}}\n"
                    "  - {{name: v, count: {1}, link: {{bandwidth: 130 GB/s, latency: 2 us}}, "
                    "devices: [{{type: V100-32GB, count: 8}}]}}\n",
                    nodes * 8, nodes / 2),
        "mixed");
    TransformerShape shape;
    shape.layers = nodes == 32 ? 48 : 96;
    shape.hidden = nodes == 32 ? 6144 : 12288;
    shape.heads = nodes == 32 ? 48 : 96;
    shape.seq = 2048;
    shape.score_passes = 8;
    const Model model = transformer_model("gpt", shape, fp16_adam());
    cases.push_back({fmt::format("gpt {:.0f} B", model.parameters() / 1e9), cluster, model,
                     nodes == 32 ? 1024 : 4096,
                     default_calibration(cluster, model.precision, Runtime::deepspeed), ""});
  }
  const size_t plain = cases.size();
  for (size_t i = 0; i < plain; ++i) {
    if (!cases[i].fixed.empty()) continue;
    cases.push_back(cases[i]);
    cases.back().name += ", cp";
    cases.back().cp = {1, 2, 4, 8};
  }
  search_times(cases);
}

}  // namespace motley::grid::trials
