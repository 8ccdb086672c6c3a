// Padded all-gather against grouped broadcasts as the largest share grows (Figure 4 of HAP): four
// machines, a tensor of 4 MB, the largest shard on the first device and the rest even. Measured
// between emulated machines and predicted for the links as they measured.
//
//   crossover_bench [OUT.csv [OUT.svg]]
//
// Bandwidth is the size of the whole tensor by the time, padding not counted, as in the paper. The
// median of nine runs counts.

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "comm/gloo.h"
#include "comm/launch.h"
#include "core/error.h"
#include "cost/cost.h"
#include "runtime/emulate.h"

namespace motley {
namespace {

constexpr int64_t kNumel = 1 << 20;
constexpr int kRuns = 9;

Cluster machines() {
  return parse_cluster(R"(
name: machines
link: {bandwidth: 400 Mbps, latency: 100 us}
devices: [{type: cpu-core, count: 4}]
)",
                       "machines");
}

struct Row {
  double share;
  Seconds measured[2], predicted[2];  // padded, grouped
};

void work() {
  const auto group = join_group(*rendezvous_from_environment());
  const Cluster nominal = machines();
  emulate_links(*group, nominal);
  const Cluster cluster = calibrated(*group, nominal, measure(*group, 1));
  const CostModel model(cluster);
  const int p = group->size();
  std::string text;
  for (double share = 0.25; share < 0.96; share += 0.05) {
    std::vector<double> shares(p, (1 - share) / (p - 1));
    shares[0] = share;
    const std::vector<int64_t> sizes = divide(kNumel, shares);
    std::vector<at::Tensor> pieces;
    for (int64_t size : sizes) pieces.push_back(at::ones({size}, at::kFloat));
    Row row{share, {}, {}};
    for (int form = 0; form < 2; ++form) {
      std::vector<double> times;
      for (int run = 0; run < kRuns; ++run) {
        group->barrier();
        const auto start = std::chrono::steady_clock::now();
        if (form == 1)
          group->all_gather_grouped(pieces);
        else
          group->all_gather(pieces);
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
        at::Tensor slowest = at::full({1}, took.count(), at::kDouble);
        group->all_reduce(slowest, Reduction::max);
        times.push_back(slowest.item<double>());
      }
      std::nth_element(times.begin(), times.begin() + kRuns / 2, times.end());
      row.measured[form] = times[kRuns / 2];
      row.predicted[form] =
          model.collective(Collective::all_gather, 4. * kNumel, model.net().profile(shares),
                           form == 1 ? PieceForm::grouped : PieceForm::padded);
    }
    text += fmt::format("{} {} {} {} {}\n", share, row.measured[0], row.measured[1],
                        row.predicted[0], row.predicted[1]);
  }
  if (group->rank() == 0) std::fputs(text.c_str(), stdout);
}

// Bandwidth by share: circles and lines measured and predicted, padded dark and grouped light.
std::string plot(const std::vector<Row>& rows) {
  double most = 0;
  auto rate = [](Seconds s) { return 4. * kNumel / s; };
  for (const Row& r : rows)
    for (int f = 0; f < 2; ++f) most = std::max({most, rate(r.measured[f]), rate(r.predicted[f])});
  auto x = [](double share) { return 60 + 480 * (share - 0.25) / 0.7; };
  auto y = [&](Seconds s) { return 300 - 270 * rate(s) / most; };
  std::string out =
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"600\" height=\"350\" "
      "font-family=\"sans-serif\" font-size=\"12\">\n";
  const char* colours[] = {"#1f4e79", "#e08214"};
  const char* names[] = {"padded all-gather", "grouped broadcast"};
  for (int f = 0; f < 2; ++f) {
    std::string line;
    for (const Row& r : rows) {
      line += fmt::format("{:.1f},{:.1f} ", x(r.share), y(r.predicted[f]));
      out += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3\" fill=\"{}\"/>\n", x(r.share),
                         y(r.measured[f]), colours[f]);
    }
    out += fmt::format("<polyline points=\"{}\" fill=\"none\" stroke=\"{}\"/>\n", line, colours[f]);
    out += fmt::format("<text x=\"400\" y=\"{}\" fill=\"{}\">{}</text>\n", 30 + 16 * f, colours[f],
                       names[f]);
  }
  out +=
      "<text x=\"200\" y=\"335\">share of the largest shard (dots measured, lines "
      "predicted)</text>\n";
  for (double share : {0.25, 0.5, 0.75, 0.95})
    out += fmt::format("<text x=\"{:.1f}\" y=\"316\">{}</text>\n", x(share) - 10, share);
  out += fmt::format("<text x=\"4\" y=\"40\">{:.1f} MB/s</text>\n</svg>\n", most / 1e6);
  return out;
}

// The share from which grouped is faster, between rows; 1 if never.
double crossing(const std::vector<Row>& rows, bool measured) {
  for (const Row& r : rows) {
    const Seconds* s = measured ? r.measured : r.predicted;
    if (s[1] < s[0]) return r.share;
  }
  return 1;
}

int run(int argc, char** argv) {
  if (is_launched_worker()) {
    run_worker(work);
    return 0;
  }
  const auto network = network_for(machines());
  LaunchOptions options;
  options.workers = 4;
  options.capture = true;
  options.network = network.get();
  const std::string text = launch_workers(options);
  std::vector<Row> rows;
  for (size_t at = 0; at < text.size();) {
    Row r{};
    int used = 0;
    if (std::sscanf(text.c_str() + at, "%lf %lf %lf %lf %lf\n%n", &r.share, &r.measured[0],
                    &r.measured[1], &r.predicted[0], &r.predicted[1], &used) != 5)
      break;
    rows.push_back(r);
    at += static_cast<size_t>(used);
  }
  std::ofstream csv(argc > 1 ? argv[1] : "/dev/null");
  csv << "share,padded_s,grouped_s,padded_predicted_s,grouped_predicted_s\n";
  std::printf("4 MB on 4 workers (%s)\n%7s %12s %12s %12s %12s\n",
              network ? "namespaces" : "paced sockets", "share", "padded s", "predicted",
              "grouped s", "predicted");
  for (const Row& r : rows) {
    std::printf("%6.0f%% %12.4f %12.4f %12.4f %12.4f  %s\n", 100 * r.share, r.measured[0],
                r.predicted[0], r.measured[1], r.predicted[1],
                (r.measured[1] < r.measured[0]) == (r.predicted[1] < r.predicted[0])
                    ? ""
                    : "<- the forms rank otherwise than predicted");
    csv << fmt::format("{:.2f},{:.5f},{:.5f},{:.5f},{:.5f}\n", r.share, r.measured[0],
                       r.measured[1], r.predicted[0], r.predicted[1]);
  }
  std::printf("grouped is faster from a share of %.0f%% on; predicted: %.0f%%\n",
              100 * crossing(rows, true), 100 * crossing(rows, false));
  if (argc > 2) std::ofstream(argv[2]) << plot(rows);
  return rows.empty() ? 1 : 0;
}

}  // namespace
}  // namespace motley

int main(int argc, char** argv) { return motley::run(argc, argv); }
