// Appendix A of P2, row by row: program counts, placements, and predicted against measured seconds
// (tests/data/p2). bench/reduce_bench.cc prints the same in full and fits the calibrated numbers.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <set>

#include "cluster/cluster.h"
#include "p2_rows.h"
#include "reduce/best.h"

namespace motley::reduce {
namespace {

std::vector<AppendixRow> read(const std::string& file) {
  return read_appendix(MOTLEY_SOURCE_DIR "/tests/data/p2/" + file);
}

std::map<std::string, std::vector<AppendixRow>> row_groups() {
  std::map<std::string, std::vector<AppendixRow>> groups;
  for (const char* file : {"appendix_a_a100.csv", "v100_structure.csv"})
    for (AppendixRow& row : read(file)) groups[row.group].push_back(std::move(row));
  return groups;
}

TEST(AppendixA, CountsAndPlacementsOfAll42RowGroupsAreExact) {
  auto groups = row_groups();
  EXPECT_EQ(groups.size(), 42u);
  size_t matrices = 0, programs = 0;
  for (const auto& [name, rows] : groups) {
    std::set<std::string> found, printed;
    for (const AppendixRow& row : rows) printed.insert(row.matrix_text);
    int64_t total = 0;
    for (const Matrix& m : placements(rows[0].hierarchy, rows[0].axes)) {
      found.insert(to_string(m));
      SynthesisHierarchy s = synthesis_hierarchy(rows[0].hierarchy, m, rows[0].reduce);
      auto all = programs_of(program_space(static_cast<int>(s.levels.size()) - 1, 5));
      total += static_cast<int64_t>(all.size());
      for (const Program& p : all) EXPECT_TRUE(verify(p, s.levels)) << name << " " << to_string(m);
    }
    EXPECT_EQ(total, rows[0].programs) << name;
    EXPECT_EQ(found, printed) << name;
    matrices += found.size();
    programs += static_cast<size_t>(total);
  }
  EXPECT_EQ(matrices, 104u);
  EXPECT_EQ(programs, 3128u);
}

// ---- predicted against measured ----

struct Machine {
  double nic, nvswitch, launch, tree_share;
};

struct Accuracy {
  double all_reduce = 0, best = 0, speed_up = 0;  // geometric means of max(a/b, b/a)
  double worst = 1, rank_all_reduce = 0, rank_best = 0;
};

std::vector<double> ranks(const std::vector<double>& v) {
  std::vector<double> rank(v.size());
  for (size_t i = 0; i < v.size(); ++i)
    for (double other : v) rank[i] += other < v[i] ? 1 : other == v[i] ? 0.5 : 0;
  return rank;
}
double spearman(const std::vector<double>& a, const std::vector<double>& b) {
  std::vector<double> x = ranks(a), y = ranks(b);
  double n = static_cast<double>(x.size()), mean = n / 2, xy = 0, xx = 0, yy = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    xy += (x[i] - mean) * (y[i] - mean);
    xx += (x[i] - mean) * (x[i] - mean);
    yy += (y[i] - mean) * (y[i] - mean);
  }
  return xy / std::sqrt(xx * yy);
}

Accuracy judge(const std::vector<AppendixRow>& rows, const Machine& machine) {
  // Ten runs of 2 GiB a GPU; the runs over two axes number the devices of a group axis by axis.
  constexpr double kRuns = 10, kBytes = 2.0 * (1 << 30);
  ProgramSpaces spaces(5);
  Accuracy sum;
  std::vector<double> predicted[2], measured[2];
  for (const AppendixRow& row : rows) {
    Cluster cluster = parse_cluster(
        fmt::format(
            "link: {{bandwidth: {}, latency: 30 us}}\ngroups:\n  - {{count: {}, link: {{bandwidth: "
            "{}, latency: 5 us}}, devices: [{{type: A100-40GB, count: {}}}]}}\n",
            machine.nic, row.hierarchy[0].size, machine.nvswitch, row.hierarchy[1].size),
        row.group);
    net::Topology network(cluster);
    CostModel model{&network,
                    row.tree ? net::Algorithm::tree : net::Algorithm::ring,
                    {machine.launch, machine.tree_share}};
    PlacementCost cost(model, kBytes, row.hierarchy, row.matrix, row.reduce,
                       row.reduce.size() > 1 ? Numbering::axis_major : Numbering::level_major);
    double all_reduce = kRuns * cost.all_reduce();
    double best = kRuns * best_program(spaces.of(cost.levels()), &cost).seconds;
    double listed = std::numeric_limits<double>::infinity();
    for (const Program& p : programs_of(spaces.of(cost.levels())))
      listed = std::min(listed, kRuns * cost.program(p));
    EXPECT_EQ(best, listed) << row.group << " " << row.matrix_text;
    auto error = [](double a, double b) { return std::max(a / b, b / a); };
    sum.all_reduce += std::log(error(all_reduce, row.all_reduce));
    sum.best += std::log(error(best, row.optimal));
    sum.speed_up += std::log(error(all_reduce / best, row.all_reduce / row.optimal));
    sum.worst = std::max({sum.worst, error(all_reduce, row.all_reduce), error(best, row.optimal)});
    predicted[0].push_back(all_reduce), measured[0].push_back(row.all_reduce);
    predicted[1].push_back(best), measured[1].push_back(row.optimal);
  }
  double n = static_cast<double>(rows.size());
  sum.all_reduce = std::exp(sum.all_reduce / n);
  sum.best = std::exp(sum.best / n);
  sum.speed_up = std::exp(sum.speed_up / n);
  sum.rank_all_reduce = spearman(predicted[0], measured[0]);
  sum.rank_best = spearman(predicted[1], measured[1]);
  return sum;
}

TEST(AppendixA, A100SecondsWithThePapersBandwidths) {
  Accuracy a = judge(read("appendix_a_a100.csv"), {8e9, 270e9, 0, 1});
  EXPECT_LE(a.all_reduce, 1.20);
  EXPECT_LE(a.speed_up, 1.12);
  EXPECT_GE(a.rank_all_reduce, 0.985);
  EXPECT_GE(a.rank_best, 0.985);
}

TEST(AppendixA, A100SecondsCalibratedOnAThirdAndJudgedOnTheRest) {
  std::vector<AppendixRow> rows = read("appendix_a_a100.csv"), judged;
  EXPECT_EQ(rows.size(), 124u);
  for (size_t i = 0; i < rows.size(); ++i)
    if (i % 3 != 0) judged.push_back(rows[i]);
  // What bench/reduce_bench.cc fits on rows 0, 3, 6, ...
  Accuracy a = judge(judged, {8.95e9, 257e9, 2.98e-3, 0.61});
  EXPECT_LE(a.all_reduce, 1.10);
  EXPECT_LE(a.best, 1.10);
  EXPECT_LE(a.worst, 1.6);
  EXPECT_LE(a.speed_up, 1.12);
  EXPECT_GE(a.rank_all_reduce, 0.985);
  EXPECT_GE(a.rank_best, 0.985);
}

}  // namespace
}  // namespace motley::reduce
