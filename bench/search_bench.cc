// How long a plan takes: captured joint graphs, the whole loop of program and ratios.
//
//   search_bench [OUT.csv]
//
// Plan seconds are theory + synthesis, in processor time of the one thread that plans, the least of
// seven runs; capture is not counted. Search seconds are one solve of the folded dynamic program.
// The ratios at the end are within this run.
// The table goes to standard output, the same rows as CSV to OUT.csv.

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <limits>
#include <map>
#include <string>

#include "capture/source.h"
#include "planner/alternation.h"
#include "solver/folded.h"
#include "solver/order.h"
#include "spmd/build.h"

namespace motley {
namespace {

constexpr int kRuns = 7;
constexpr int64_t kBatch = 256;
const char* const kGpt24 = "gpt:layers=24,hidden=1024,heads=16";
const char* const kGpt48 = "gpt:layers=48,hidden=1024,heads=16";

// Half of the devices like those of hap-64's one type, half like the other's, on one switch.
Cluster halves(int devices) {
  const Cluster two = load_cluster("hap-64");
  Link link = two.groups[0].link;
  return flat_cluster({two.types[0], two.types[1]}, {devices / 2, devices - devices / 2}, link);
}

struct Row {
  double plan_s = std::numeric_limits<double>::infinity();
  double search_s = 0;
  planner::Alternation result;
};

double processor_s() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

// The least of a few solves at ratios proportional to speed, all types weighing the same.
double search_seconds(const Theory& theory, const CostModel& cost) {
  spmd::ProblemBuilder builder(theory, cost, Optimizer::adamw);
  const Shares shares(planner::proportional_ratios(cost.cluster()));
  builder.price(Fractions(cost.cluster(), shares));
  solver::Weights weights;
  weights.compute.assign(cost.types(), 1.0 / cost.types());
  const solver::Order order = solver::make_order(builder.problem());
  double least = std::numeric_limits<double>::infinity();
  for (int run = 0; run < kRuns; ++run) {
    const double start = processor_s();
    solver::solve_folded(builder.problem(), order, weights);
    least = std::min(least, processor_s() - start);
  }
  return least;
}

class Table {
 public:
  explicit Table(const char* path) {
    if (path != nullptr) csv_.open(path);
    csv_ << "model,cluster,nodes,plan_s,search_s,solves,states,step_s,lower_bound_s,gap\n";
    std::printf("%-42s %-10s %6s %8s %9s %7s %9s %9s %8s\n", "model", "cluster", "nodes", "plan s",
                "search s", "solves", "states", "step s", "gap");
  }

  void add(const std::string& model, const std::string& cluster_name, const Cluster& cluster) {
    const GraphSource source = load_graph(model, kBatch);
    const CostModel cost(cluster);
    Row row;
    for (int run = 0; run < kRuns; ++run) {
      const double start = processor_s();
      const Theory theory(source.graph);
      planner::AlternationOptions options;
      options.memory_limit = false;
      planner::Alternation result = planner::alternate(theory, cost, options);
      const double seconds = processor_s() - start;
      if (seconds >= row.plan_s) continue;
      row = {seconds, search_seconds(theory, cost), std::move(result)};
    }
    const planner::Alternation& r = row.result;
    const double gap = r.feasible ? 1 - r.lower_bound / r.cost.step : 0;
    std::printf("%-42s %-10s %6zu %8.3f %9.4f %7d %9ld %9.4f %7.3f%%%s\n", model.c_str(),
                cluster_name.c_str(), source.graph.nodes.size(), row.plan_s, row.search_s, r.solves,
                static_cast<long>(r.states), r.cost.step, 100 * gap,
                r.feasible ? "" : r.reason.c_str());
    std::fflush(stdout);
    csv_ << fmt::format("\"{}\",{},{},{:.4f},{:.5f},{},{},{:.6f},{:.6f},{:.6f}\n", model,
                        cluster_name, source.graph.nodes.size(), row.plan_s, row.search_s, r.solves,
                        r.states, r.cost.step, r.lower_bound, gap);
    seconds_[model + " on " + cluster_name] = row.plan_s;
  }

  void ratio(const std::string& a, const std::string& b) {
    std::printf("%s / %s: %.2f\n", a.c_str(), b.c_str(), seconds_.at(a) / seconds_.at(b));
  }

 private:
  std::ofstream csv_;
  std::map<std::string, double> seconds_;
};

int run(int argc, char** argv) {
  Table table(argc > 1 ? argv[1] : nullptr);
  const Cluster hap = load_cluster("hap-64");
  for (const char* model : {kGpt24, kGpt48, "vgg19", "vit:layers=24", "bert:layers=24",
                            "bert:layers=48", "bert-moe:layers=24,every=2,experts=128", "resnet50",
                            "llama:layers=8", "llama:layers=32"}) {
    table.add(model, "hap-64", hap);
  }
  for (const int devices : {8, 64, 256, 1024}) {
    table.add(kGpt24, fmt::format("flat-{}", devices), halves(devices));
  }
  const std::string gpt = kGpt24;
  table.ratio(std::string(kGpt48) + " on hap-64", gpt + " on hap-64");
  table.ratio("bert:layers=48 on hap-64", "bert:layers=24 on hap-64");
  table.ratio(gpt + " on flat-1024", gpt + " on flat-8");
  return 0;
}

}  // namespace
}  // namespace motley

int main(int argc, char** argv) {
  constexpr char kUsage[] = "usage: search_bench [OUT.csv]\n";
  if (argc > 1 && std::string(argv[1]) == "--help") {
    std::fputs(kUsage, stdout);
    return 0;
  }
  if (argc > 2 || (argc > 1 && argv[1][0] == '-')) {
    std::fprintf(stderr, "search_bench: %s is no file to write; give one path or none\n",
                 argv[argc - 1]);
    return 2;
  }
  return motley::run(argc, argv);
}
