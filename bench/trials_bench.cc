// Predicts public trials of distributed training with the grid's cost model: AMP on T4 and V100+T4,
// vTrain on A100, Sailor on GH200 (tests/data/{amp,vtrain,sailor}).
//
// Calibration: a few physical numbers per set (rates of a device class, launch overhead, shares of
// nominal bandwidths) are fitted by least squares on log(predicted / measured), with a weak prior
// at the catalogue's values. Of vTrain's trials no layer was profiled: how well a layer of a width
// runs, cut tp ways and with a micro-batch (Calibration::time_scale), is inferred from the trials.
// Every prediction printed is of a row that its calibration has not seen: the rows are shuffled
// once, cut in ten folds, and each fold is predicted from the other nine. "without time scales" is
// by the fitted numbers alone, "other models only" by a calibration that saw no row of the same
// model. Beside it stand the errors that AMP makes on the same rows, and those that Calculon,
// vTrain and Sailor report for runs of their own (bench/data/reported.csv).
//
// Arguments: kUsage, below.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include "trials/judge.h"
#include "trials/report.h"
#include "trials/searches.h"
#include "trials/sets.h"

namespace {

using namespace motley::grid::trials;

const char* const kSets[] = {"amp-t4x16",    "amp-mixed", "vtrain single",
                             "vtrain multi", "sailor",    "search"};
constexpr char kUsage[] =
    "usage: trials_bench [amp-t4x16] [amp-mixed] [\"vtrain single\"] [\"vtrain multi\"] [sailor] "
    "[search] [--rows] [--bars]\n"
    "  the sets to predict, default all; search: times of searches\n"
    "  --rows prints every row\n"
    "  --bars fails where predictions are further off than they may be\n";

}  // namespace

int main(int argc, char** argv) {
  bool rows = false, held_to_bars = false;
  std::vector<std::string> names;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--help") == 0) {
      fmt::print("{}", kUsage);
      return 0;
    }
    if (std::strcmp(argv[i], "--rows") == 0) {
      rows = true;
    } else if (std::strcmp(argv[i], "--bars") == 0) {
      held_to_bars = true;
    } else if (std::find(std::begin(kSets), std::end(kSets), std::string(argv[i])) !=
               std::end(kSets)) {
      names.push_back(argv[i]);
    } else {
      fmt::print(stderr, "trials_bench: {} is no set; give {}\n", argv[i], fmt::join(kSets, ", "));
      return 2;
    }
  }
  auto wanted = [&](const char* name) {
    return names.empty() || std::find(names.begin(), names.end(), name) != names.end();
  };
  fmt::print("{:32} {:>5} {:>8} {:>9} {:>8} {:>8} {:>8}\n", "set", "rows", "MAPE %", "Spearman",
             "Kendall", "regret1", "regret5");
  auto all = [](const Trial&) { return true; };
  constexpr double kAny = std::numeric_limits<double>::infinity();
  Reported reported;
  Bars bars;
  for (const char* cluster : {"amp-t4x16", "amp-mixed"}) {
    if (!wanted(cluster)) continue;
    const Set set = amp(cluster);
    const Judged judged = judge(set);
    const bool mixed = set.name == "amp-mixed";
    bars.hold(set.name, report(set.name, set, judged.predicted, all),
              mixed ? Statistics{10, 0.80, 1.0} : Statistics{6, 0.98, 1.05});
    bars.hold(
        set.name + " without the odd",
        report("  without the odd", set, judged.predicted, [](const Trial& t) { return !t.odd; }),
        {kAny, 0.95, kAny});
    Vector others;
    for (const Trial& t : set.trials) others.push_back(t.other);
    report("  AMP's own model", set, others, all);
    bars.hold(set.name + ": failed among the ten", {0, 1, 1.0 * report_failures(set, judged)},
              {kAny, 0, 0});
    print_fit(set, judged);
    if (rows) print_rows(set, judged);
  }
  Vector pooled, pooled_measured;  // of both tables, each row judged within its own
  int tables = 0;
  for (const char* table : {"single", "multi"}) {
    const Set set = vtrain(table);
    if (!wanted(set.name.c_str())) continue;
    const Judged judged = judge(set);
    bars.hold(set.name, report(set.name, set, judged.predicted, all),
              {set.name == "vtrain single" ? 6.0 : 8.0, 0, kAny});
    report("  without time scales", set, judged.without_time_scales, all);
    report("  other models only", set, judged.other_models, all);
    reported.print(set);
    ++tables;
    for (size_t i = 0; i < set.trials.size(); ++i) {
      pooled.push_back(judged.predicted[i]);
      pooled_measured.push_back(set.trials[i].measured);
    }
    print_fit(set, judged);
    if (rows) print_rows(set, judged);
  }
  if (tables == 2)
    bars.hold("vtrain, both", print_statistics("vtrain, both", pooled, pooled_measured),
              {kAny, 0.99, kAny});
  if (wanted("sailor")) {
    const Set set = sailor();
    const Judged judged = judge(set);
    bars.hold(set.name, report(set.name, set, judged.predicted, all), {7, 0, kAny});
    const double memory = 100 * memory_error(set);
    fmt::print("{:32} {:5} {:8.2f}\n", "  memory", set.trials.size(), memory);
    bars.hold(set.name + ": memory", {memory}, {6, 0, kAny});
    reported.print(set);
    print_fit(set, judged);
    if (rows) print_rows(set, judged);
  }
  reported.print_notes();
  if (wanted("search")) search_all();
  return held_to_bars && !bars.held() ? 1 : 0;
}
