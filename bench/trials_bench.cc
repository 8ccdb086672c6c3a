// Predicts public trials of distributed training with the grid's cost model: AMP on T4 and V100+T4,
// vTrain on A100, Sailor on GH200 (tests/data/{amp,vtrain,sailor}).
//
// Calibration: a few physical numbers per set (rates of a device class, launch overhead, shares of
// nominal bandwidths) are fitted by least squares on log(predicted / measured), with a weak prior
// at the catalogue's values. Of vTrain's trials no layer was profiled: how well a layer of a width
// runs, cut tp ways and with a micro-batch (Calibration::pace), is inferred from the trials.
// Every prediction printed is of a row that its calibration has not seen: the rows are shuffled
// once, cut in ten folds, and each fold is predicted from the other nine. "without paces" is by the
// fitted numbers alone, "other models only" by a calibration that saw no row of the same model.
// Beside it stand the errors that AMP makes on the same rows, and those that Calculon, vTrain
// and Sailor report for runs of their own (bench/data/reported.csv).
//
// Arguments: kUsage, below.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <ctime>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/rng.h"
#include "grid/estimate.h"
#include "grid/search.h"

namespace {

using namespace motley;
using namespace motley::grid;

const char* const kSets[] = {"amp-t4x16",    "amp-mixed", "vtrain single",
                             "vtrain multi", "sailor",    "search"};
constexpr char kUsage[] =
    "usage: trials_bench [amp-t4x16] [amp-mixed] [\"vtrain single\"] [\"vtrain multi\"] [sailor] "
    "[search] [--rows] [--bars]\n"
    "  the sets to predict, default all; search: times of searches\n"
    "  --rows prints every row\n"
    "  --bars fails where predictions are further off than they may be\n";

// ---- tables ----

using Record = std::map<std::string, std::string>;

std::vector<Record> read_csv(const std::string& name, const char* folder = "tests/data") {
  const std::string path = fmt::format("{}/{}/{}", MOTLEY_SOURCE_DIR, folder, name);
  std::ifstream in(path);
  if (!in) throw user_error("trials_bench", "{} cannot be read", path);
  auto split = [](const std::string& line) {
    std::vector<std::string> cells;
    size_t at = 0;
    while (true) {
      const bool quoted = line[at] == '"';
      size_t comma = line.find(',', quoted ? line.find('"', at + 1) : at);
      cells.push_back(line.substr(at, comma - at));
      if (quoted) cells.back() = cells.back().substr(1, cells.back().size() - 2);
      if (comma == std::string::npos) return cells;
      at = comma + 1;
    }
  };
  std::vector<Record> records;
  std::vector<std::string> head;
  for (std::string line; std::getline(in, line);) {
    if (line.empty() || line[0] == '#') continue;
    std::vector<std::string> cells = split(line);
    if (head.empty()) {
      head = cells;
      continue;
    }
    MOTLEY_CHECK(cells.size() == head.size(), "{}: {}", path, line);
    Record record;
    for (size_t i = 0; i < head.size(); ++i) record[head[i]] = cells[i];
    records.push_back(std::move(record));
  }
  return records;
}

int integer(const Record& r, const char* name) { return std::stoi(r.at(name)); }
double real(const Record& r, const char* name) { return std::stod(r.at(name)); }
std::vector<int> list(const std::string& text) {
  std::vector<int> values;
  std::stringstream in(text);
  for (std::string part; std::getline(in, part, '/');) values.push_back(std::stoi(part));
  return values;
}

// ---- statistics ----

std::vector<double> ranks(const std::vector<double>& x) {
  std::vector<size_t> order(x.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return x[a] < x[b]; });
  std::vector<double> rank(x.size());
  for (size_t i = 0; i < order.size();) {
    size_t j = i;
    while (j < order.size() && x[order[j]] == x[order[i]]) ++j;
    for (size_t k = i; k < j; ++k) rank[order[k]] = (i + j - 1) / 2.0;
    i = j;
  }
  return rank;
}

double spearman(const std::vector<double>& x, const std::vector<double>& y) {
  const std::vector<double> a = ranks(x), b = ranks(y);
  const double mean = (a.size() - 1) / 2.0;
  double ab = 0, aa = 0, bb = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    ab += (a[i] - mean) * (b[i] - mean);
    aa += (a[i] - mean) * (a[i] - mean);
    bb += (b[i] - mean) * (b[i] - mean);
  }
  return ab / std::sqrt(aa * bb);
}

double kendall(const std::vector<double>& x, const std::vector<double>& y) {  // tau-b
  double agree = 0, tied_x = 0, tied_y = 0, pairs = 0;
  for (size_t i = 0; i < x.size(); ++i)
    for (size_t j = 0; j < i; ++j) {
      const double a = x[i] - x[j], b = y[i] - y[j];
      ++pairs;
      if (a == 0) ++tied_x;
      if (b == 0) ++tied_y;
      if (a * b != 0) agree += a * b > 0 ? 1 : -1;
    }
  return agree / std::sqrt((pairs - tied_x) * (pairs - tied_y));
}

double mape(const std::vector<double>& predicted, const std::vector<double>& measured) {
  double sum = 0;
  for (size_t i = 0; i < predicted.size(); ++i) sum += std::abs(predicted[i] / measured[i] - 1);
  return sum / static_cast<double>(predicted.size());
}

// ---- sets ----

struct Trial {
  std::string name;
  int model = 0, cluster = 0;
  Strategy strategy;
  double measured = 0;  // 0: the trial failed
  double memory = 0;    // measured bytes, 0: unknown
  double other = 0;     // the paper's own prediction, 0: unknown
  bool odd = false;     // counted apart
};

struct Parameter {
  std::string name;
  double start, freedom;  // prior: log-normal around start
  std::function<void(Calibration*, double)> set;
};

// A forward pass of one layer, timed alone on one node.
struct Profile {
  std::string type;
  int layer = 0, tp = 1;
  double measured = 0;
};

struct Set {
  std::string name;
  std::vector<Model> models;
  std::vector<Cluster> clusters;
  std::vector<Trial> trials;
  std::vector<Parameter> parameters;
  std::vector<Profile> profiles;  // calibrated with, never judged
  LayerTimes times;
  bool paces = false;  // whether paces of layers are inferred
};

using Vector = std::vector<double>;

using Paces = std::map<int, std::map<std::pair<int, int>, double>>;  // by width of the model

struct Fitted {
  Vector logs;  // [parameter]
  Paces paces;
};

int width(const Model& model) {
  for (const Layer& layer : model.layers)
    if (layer.block) return static_cast<int>(layer.output / static_cast<double>(model.tokens));
  return 0;
}

class Predictor {
 public:
  Predictor(const Set& set, Fitted fitted) : set_(set), fitted_(std::move(fitted)) {}
  Estimate operator()(const Trial& trial) {
    return estimator(trial.model, trial.cluster).estimate(trial.strategy);
  }
  double operator()(const Profile& profile) {
    const Estimator& e = estimator(0, 0);
    Strategy s;
    s.tp = profile.tp;
    int first = 0;
    while (e.cluster().type_of(first).name != profile.type) ++first;
    for (int t = 0; t < profile.tp; ++t) s.devices.push_back(first + t);
    const Mesh mesh = e.mesh(s);
    return e.layer_time(profile.layer, mesh.types_of(0)[0], s, mesh.tensor[0], mesh.context[0])
        .forward;
  }

 private:
  const Estimator& estimator(int model, int of_cluster) {
    auto& slot = estimators_[{model, of_cluster}];
    if (!slot) {
      const Cluster& cluster = set_.clusters[of_cluster];
      Calibration calibration = default_calibration(cluster, set_.models[model].precision);
      for (size_t i = 0; i < fitted_.logs.size(); ++i)
        set_.parameters[i].set(&calibration, std::exp(fitted_.logs[i]));
      if (auto paces = fitted_.paces.find(width(set_.models[model])); paces != fitted_.paces.end())
        calibration.pace = paces->second;
      slot = std::make_unique<Estimator>(set_.models[model], cluster, calibration, set_.times);
    }
    return *slot;
  }

  const Set& set_;
  Fitted fitted_;
  std::map<std::pair<int, int>, std::unique_ptr<Estimator>> estimators_;
};

// Solves (A + damping * diag(A)) x = b by Gaussian elimination.
Vector solve(std::vector<Vector> a, Vector b, double damping) {
  const size_t n = b.size();
  for (size_t i = 0; i < n; ++i) a[i][i] *= 1 + damping;
  for (size_t i = 0; i < n; ++i) {
    size_t pivot = i;
    for (size_t r = i; r < n; ++r)
      if (std::abs(a[r][i]) > std::abs(a[pivot][i])) pivot = r;
    std::swap(a[i], a[pivot]);
    std::swap(b[i], b[pivot]);
    for (size_t r = i + 1; r < n; ++r) {
      const double f = a[r][i] / a[i][i];
      for (size_t c = i; c < n; ++c) a[r][c] -= f * a[i][c];
      b[r] -= f * b[i];
    }
  }
  for (size_t i = n; i-- > 0;) {
    for (size_t c = i + 1; c < n; ++c) b[i] -= a[i][c] * b[c];
    b[i] /= a[i][i];
  }
  return b;
}

// Of a residual in sigmas: beyond 2 it loses weight, so that trials which something else slowed
// down do not bend the rest.
double cauchy_weight(double r) { return 1 / (1 + r * r / 4); }

// Levenberg-Marquardt with numeric derivatives, from `start` and with its paces.
Vector fit_parameters(const Set& set, const std::vector<int>& rows, const Fitted& start) {
  constexpr double kSigma = 0.05, kProfileSigma = 0.15;
  const size_t n = set.parameters.size();
  Vector logs = start.logs;
  auto residuals = [&](const Vector& at) {
    Predictor predict(set, {at, start.paces});
    Vector r;
    for (int row : rows)
      r.push_back(std::log(predict(set.trials[row]).step / set.trials[row].measured) / kSigma);
    for (const Profile& profile : set.profiles)
      r.push_back(std::log(predict(profile) / profile.measured) / kProfileSigma);
    for (size_t i = 0; i < n; ++i)
      r.push_back((at[i] - std::log(set.parameters[i].start)) / set.parameters[i].freedom);
    return r;
  };
  auto loss = [](const Vector& r) {
    double sum = 0;
    for (double x : r) sum += 4 * std::log1p(x * x / 4);
    return sum;
  };
  Vector now = residuals(logs);
  double damping = 1e-2;
  for (int iteration = 0; iteration < 25; ++iteration) {
    std::vector<Vector> jacobian;
    for (size_t i = 0; i < n; ++i) {
      Vector moved = logs;
      moved[i] += 1e-3;
      Vector r = residuals(moved);
      for (size_t k = 0; k < r.size(); ++k) r[k] = (r[k] - now[k]) / 1e-3;
      jacobian.push_back(std::move(r));
    }
    std::vector<Vector> normal(n, Vector(n, 0.0));
    Vector gradient(n, 0.0);
    for (size_t k = 0; k < now.size(); ++k) {
      const double w = cauchy_weight(now[k]);
      for (size_t i = 0; i < n; ++i) {
        gradient[i] -= w * jacobian[i][k] * now[k];
        for (size_t j = 0; j < n; ++j) normal[i][j] += w * jacobian[i][k] * jacobian[j][k];
      }
    }
    const double before = loss(now);
    bool better = false;
    for (int attempt = 0; attempt < 6 && !better; ++attempt) {
      Vector moved = logs, step = solve(normal, gradient, damping);
      for (size_t i = 0; i < n; ++i) moved[i] += std::clamp(step[i], -0.7, 0.7);
      Vector r = residuals(moved);
      if (loss(r) < before) {
        better = true;
        logs = moved;
        now = std::move(r);
        damping = std::max(damping / 5, 1e-6);
      } else {
        damping *= 5;
      }
    }
    if (!better || before - loss(now) < 1e-4 * before) break;
  }
  return logs;
}

// Paces of layers from what is left of the rows' logarithms: an effect of width and degree and one
// of the micro-batch besides, both normal around none, in noise (best linear unbiased prediction,
// by backfitting), with the weights of the fit.
Paces infer_paces(const Set& set, const std::vector<int>& rows, const Vector& logs) {
  constexpr double kNoise = 0.05, kDegree = 0.1, kMicroBatch = 0.03;
  struct Effect {
    double value = 0, sum = 0, weights = 0;
    void add(double left, double weight) { sum += weight * left, weights += weight; }
    void update(double prior) {
      value = sum / (weights + kNoise * kNoise / (prior * prior));
      sum = weights = 0;
    }
  };
  std::map<std::pair<int, int>, Effect> degree;             // width, tp
  std::map<std::tuple<int, int, int>, Effect> micro_batch;  // and micro-batch
  Predictor predict(set, {logs, {}});
  struct Left {
    double left;
    Effect *degree, *micro_batch;
    double weight() const {
      return cauchy_weight((left - degree->value - micro_batch->value) / kNoise);
    }
  };
  std::vector<Left> left;
  for (int row : rows) {
    const Trial& t = set.trials[row];
    const int w = width(set.models[t.model]), tp = t.strategy.tp;
    left.push_back({std::log(t.measured / predict(t).step), &degree[{w, tp}],
                    &micro_batch[{w, tp, t.strategy.micro_batch}]});
  }
  for (int iteration = 0; iteration < 50; ++iteration) {
    for (const Left& l : left) l.degree->add(l.left - l.micro_batch->value, l.weight());
    for (auto& [key, effect] : degree) effect.update(kDegree);
    for (const Left& l : left) l.micro_batch->add(l.left - l.degree->value, l.weight());
    for (auto& [key, effect] : micro_batch) effect.update(kMicroBatch);
  }
  Paces paces;
  for (const auto& [key, effect] : degree)
    paces[key.first][{key.second, 0}] = std::exp(effect.value);
  for (const auto& [key, effect] : micro_batch) {
    const auto& [w, tp, mbs] = key;
    paces[w][{tp, mbs}] = std::exp(degree[{w, tp}].value + effect.value);
  }
  return paces;
}

Fitted fit(const Set& set, const std::vector<int>& rows) {
  Fitted fitted;
  for (const Parameter& p : set.parameters) fitted.logs.push_back(std::log(p.start));
  fitted.logs = fit_parameters(set, rows, fitted);
  if (!set.paces) return fitted;
  fitted.paces = infer_paces(set, rows, fitted.logs);
  fitted.logs = fit_parameters(set, rows, fitted);
  fitted.paces = infer_paces(set, rows, fitted.logs);
  return fitted;
}

void add_rates(Set* set, const std::string& type, double flops, double memory, double launch) {
  set->parameters.push_back({type + " flops", flops, 0.5,
                             [type](Calibration* c, double x) { c->types[type].flops = x; }});
  set->parameters.push_back({type + " memory", memory, 0.5,
                             [type](Calibration* c, double x) { c->types[type].memory = x; }});
  set->parameters.push_back({type + " launch", launch, 1.0,
                             [type](Calibration* c, double x) { c->types[type].launch = x; }});
}

#define MOTLEY_FIT(field, start, freedom) \
  set.parameters.push_back({#field, start, freedom, [](Calibration* c, double x) { c->field = x; }})

Strategy plain_strategy(int pp, int dp, int tp, int mbs, int gbs, Runtime runtime) {
  Strategy s;
  s.pp = pp, s.dp = dp, s.tp = tp, s.micro_batch = mbs, s.runtime = runtime;
  MOTLEY_CHECK(gbs % (dp * mbs) == 0);
  s.micro_batches.assign(dp, gbs / (dp * mbs));
  s.devices.resize(s.ranks());
  std::iota(s.devices.begin(), s.devices.end(), 0);
  return s;
}

// GPT-2 as DeepSpeed counts its layers: embedding, transpose, 24 blocks, transpose, normalisation,
// projection, conversion.
Model amp_gpt2() {
  TransformerShape shape;
  shape.vocab = 52256;
  Model model = transformer_model("gpt2", shape, fp16_adam());
  Layer pass;
  pass.output = model.layers[0].output;
  pass.kernels = 1;
  Layer head = model.layers.back(), convert = pass, norm = pass;
  model.layers.pop_back();
  pass.name = "transpose";
  model.layers.insert(model.layers.begin() + 1, pass);
  norm.name = "normalisation", norm.parameters_whole = head.parameters_whole;
  head.parameters_whole = 0;
  convert.name = "convert", convert.output = 1;
  model.layers.insert(model.layers.end(), {pass, norm, head, convert});
  model.message_extra = 2.0 * 1024 * 1024;  // the attention mask, in fp16
  return model;
}

Set amp(const std::string& cluster) {
  Set set;
  set.name = cluster;
  set.models = {amp_gpt2()};
  set.clusters = {load_cluster(cluster)};
  for (const Record& r : read_csv("amp/trials.csv")) {
    if (r.at("cluster") != cluster) continue;
    Trial t;
    t.strategy = plain_strategy(integer(r, "pp"), integer(r, "dp"), integer(r, "tp"),
                                integer(r, "mbs"), 32, Runtime::deepspeed);
    t.strategy.stages = list(r.at("stages"));
    t.name = to_string(t.strategy);
    t.measured = r.at("status") == "ok" ? real(r, "measured_s") : 0;
    t.other = real(r, "amp_s");
    t.odd = cluster == "amp-mixed" && t.strategy.tp > 1 && t.strategy.pp > 1 &&
            t.strategy.micro_batch <= 2;
    set.trials.push_back(std::move(t));
  }
  for (const Record& r : read_csv("amp/layer_times.csv")) {
    const std::string gpu = r.at("gpu") == "T4" ? "T4" : "V100-16GB";
    const bool present = gpu == "T4" || cluster == "amp-mixed";
    if (r.at("model") != "gpt2" || r.at("layer") != "transformer_12" || !present) continue;
    for (int tp : {1, 2, 4})
      set.profiles.push_back({gpu, 12, tp, real(r, fmt::format("tp{}_s", tp).c_str())});
  }
  add_rates(&set, "T4", 25e12, 220e9, 20e-6);
  if (cluster == "amp-mixed") add_rates(&set, "V100-16GB", 60e12, 700e9, 30e-6);
  MOTLEY_FIT(ring_inside, 0.7, 0.5);
  MOTLEY_FIT(ring_across, 0.7, 0.2);
  MOTLEY_FIT(message_across, 0.6, 0.2);
  MOTLEY_FIT(collective_launch, 50e-6, 1.0);
  MOTLEY_FIT(hop_time, 10e-6, 1.0);
  MOTLEY_FIT(collective_time, 100e-6, 1.0);
  MOTLEY_FIT(message_launch, 500e-6, 1.0);
  MOTLEY_FIT(optimizer_passes, 3, 0.7);
  MOTLEY_FIT(step, 0.02, 1.0);
  return set;
}

// Nodes of 8 A100, 800 Gbit/s between them; Megatron-DeepSpeed, activation checkpointing.
Set vtrain(const std::string& table) {
  Set set;
  set.name = "vtrain " + table;
  Precision precision = fp16_adam();
  precision.gradient = precision.reduced = 2;
  precision.reduce_buffer = 0;
  std::map<std::vector<int>, int> models;
  std::map<int, int> clusters;
  for (const Record& r : read_csv("vtrain/" + table + "_node.csv")) {
    TransformerShape shape;
    shape.layers = integer(r, "layers");
    shape.hidden = integer(r, "hidden");
    shape.heads = integer(r, "heads");
    shape.seq = integer(r, "seq");
    // Megatron's kernels: fused scale, mask and softmax (2), dropout with its mask (2.5); two
    // normalisations and two bias-dropout-additions (11), the bias and GeLU of four times the width
    // (8), two transpositions (4).
    shape.score_passes = 4.5;
    shape.hidden_passes = 24;
    shape.kernels = 40;
    auto [model, new_model] =
        models.try_emplace({shape.layers, shape.hidden}, static_cast<int>(set.models.size()));
    if (new_model) set.models.push_back(transformer_model("gpt", shape, precision));
    const int gpus = integer(r, "num_gpus");
    auto [cluster, new_cluster] = clusters.try_emplace(gpus, static_cast<int>(set.clusters.size()));
    if (new_cluster)
      set.clusters.push_back(parse_cluster(
          fmt::format("name: a100\nlink: {{bandwidth: 800 Gbps, latency: 5 us}}\ngroups:\n  - "
                      "{{name: node, count: {}, link: {{bandwidth: 300 GB/s, latency: 2 us}}, "
                      "devices: [{{type: A100-80GB, count: {}}}]}}\n",
                      std::max(1, gpus / 8), std::min(gpus, 8)),
          "a100"));
    Trial t;
    t.model = model->second, t.cluster = cluster->second;
    const int pp = integer(r, "pp");
    t.strategy = plain_strategy(pp, integer(r, "dp"), integer(r, "tp"), integer(r, "micro_batch"),
                                integer(r, "global_batch"), Runtime::deepspeed);
    t.strategy.recompute = Recompute::full;
    t.strategy.stages.assign(pp, shape.layers / pp);
    t.strategy.stages.front() += 1;
    t.strategy.stages.back() += 1;
    t.measured = real(r, "iter_ms") / 1000;
    t.name = fmt::format("h={} l={} {}", shape.hidden, shape.layers, to_string(t.strategy));
    set.trials.push_back(std::move(t));
  }
  set.paces = true;
  add_rates(&set, "A100-80GB", 200e12, 1500e9, 20e-6);
  MOTLEY_FIT(ring_inside, 0.76, 0.1);  // the all-reduce tables of the same source: 229 GB/s
  if (table == "multi") MOTLEY_FIT(ring_across, 0.7, 0.5);
  MOTLEY_FIT(message_inside, 0.5, 0.3);
  if (table == "multi") MOTLEY_FIT(message_across, 0.5, 0.7);
  MOTLEY_FIT(collective_launch, 50e-6, 1.0);
  MOTLEY_FIT(hop_time, 3e-6, 0.3);  // the same tables: 80 us of the smallest for 8 devices
  MOTLEY_FIT(collective_time, 20e-6, 0.5);
  MOTLEY_FIT(message_launch, 500e-6, 1.0);
  MOTLEY_FIT(optimizer_passes, 3, 0.7);
  MOTLEY_FIT(step, 0.005, 1.0);
  MOTLEY_FIT(narrow, 30, 1.0);
  MOTLEY_FIT(overlap_power, 2.5, 0.2);
  return set;
}

// OPT-350 on nodes of 4 GH200 with tensor parallelism 4; layer times are measured, so that only the
// network, the optimizer and what a step costs the host are fitted.
Set sailor() {
  Set set;
  set.name = "sailor GH200";
  Model model;
  model.name = "opt-350";
  model.precision = fp32_adam();
  model.heads = 16;
  model.tokens = 2048;
  model.layers.resize(26);
  for (const Record& r : read_csv("sailor/layers.csv")) {
    if (integer(r, "tp") != 4) continue;
    for (int l = integer(r, "first"); l <= integer(r, "last"); ++l) {
      Layer& layer = model.layers[l];
      layer.block = l > 0 && l < 25;
      layer.parameters = 4 * real(r, "parameters");
      layer.output = real(r, "output_elements");
      layer.saved_whole = real(r, "saved_bytes");
      layer.kernels = layer.block ? 60 : 10;
    }
  }
  set.models = {model};
  // From micro-batch 8 on the measured times grow in proportion: device time. Below, the profile's
  // own host (one layer, timers around it) is in them.
  for (const Record& r : read_csv("sailor/layer_times.csv"))
    for (int l = integer(r, "first"); integer(r, "mbs") >= 8 && l <= integer(r, "last"); ++l)
      set.times.add("GH200", integer(r, "tp"), integer(r, "mbs"), l,
                    {real(r, "forward_s"), real(r, "backward_s")});
  std::map<int, int> clusters;
  for (const Record& r : read_csv("sailor/runs.csv")) {
    const int nodes = integer(r, "nodes");
    auto [cluster, fresh] = clusters.try_emplace(nodes, static_cast<int>(set.clusters.size()));
    if (fresh)
      set.clusters.push_back(parse_cluster(
          fmt::format("name: gh200\nlink: {{bandwidth: 92 GB/s, latency: 10 us}}\ngroups:\n  - "
                      "{{name: node, count: {}, link: {{bandwidth: 125 GB/s, latency: 5 us}}, "
                      "devices: [{{type: GH200, count: 4}}]}}\n",
                      nodes),
          "gh200"));
    Trial t;
    t.cluster = cluster->second;
    t.strategy = plain_strategy(integer(r, "pp"), integer(r, "dp"), 4, integer(r, "mbs"),
                                integer(r, "gbs"), Runtime::deepspeed);
    t.strategy.stages = list(r.at("stages"));
    t.name = r.at("run") + " " + to_string(t.strategy);
    t.measured = real(r, "measured_s");
    t.memory = real(r, "memory_bytes");
    set.trials.push_back(std::move(t));
  }
  add_rates(&set, "GH200", 300e12, 3200e9, 5e-6);
  set.parameters.erase(set.parameters.begin(), set.parameters.begin() + 2);  // layers are measured
  MOTLEY_FIT(ring_across, 0.7, 0.3);
  MOTLEY_FIT(message_across, 0.5, 0.5);
  MOTLEY_FIT(message_launch, 500e-6, 1.0);
  MOTLEY_FIT(step, 0.005, 1.0);
  MOTLEY_FIT(overlap_power, 4, 0.7);
  return set;
}

struct Judged {
  // [trial], by a calibration that has not seen it.
  Vector predicted, without_paces;
  Vector other_models;  // that has seen no trial of its model; empty: there are no others
  Fitted fitted;        // to all rows
};

Judged judge(const Set& set) {
  constexpr int kFolds = 10;
  std::vector<int> rows;
  for (size_t i = 0; i < set.trials.size(); ++i)
    if (set.trials[i].measured > 0) rows.push_back(static_cast<int>(i));
  Rng rng(1);
  std::vector<int> order = rows;
  for (size_t i = order.size(); i > 1; --i)
    std::swap(order[i - 1], order[rng.below(static_cast<int64_t>(i))]);
  Judged judged;
  judged.predicted.assign(set.trials.size(), 0.0);
  judged.without_paces = judged.predicted;
  for (int fold = 0; fold < kFolds; ++fold) {
    std::vector<int> seen;
    for (size_t i = 0; i < order.size(); ++i)
      if (static_cast<int>(i) % kFolds != fold) seen.push_back(order[i]);
    const Fitted fitted = fit(set, seen);
    Predictor predict(set, fitted), without(set, {fitted.logs, {}});
    for (size_t i = 0; i < order.size(); ++i) {
      if (static_cast<int>(i) % kFolds != fold) continue;
      judged.predicted[order[i]] = predict(set.trials[order[i]]).step;
      judged.without_paces[order[i]] = without(set.trials[order[i]]).step;
    }
  }
  if (set.models.size() > 1) judged.other_models.assign(set.trials.size(), 0.0);
  for (size_t model = 0; set.models.size() > 1 && model < set.models.size(); ++model) {
    auto of_model = [&](int row) { return set.trials[row].model == static_cast<int>(model); };
    std::vector<int> seen;
    std::copy_if(rows.begin(), rows.end(), std::back_inserter(seen), std::not_fn(of_model));
    Predictor predict(set, fit(set, seen));
    for (int row : rows)
      if (of_model(row)) judged.other_models[row] = predict(set.trials[row]).step;
  }
  judged.fitted = fit(set, rows);
  Predictor predict(set, judged.fitted);
  for (size_t i = 0; i < set.trials.size(); ++i)  // failed trials were in no fold
    if (set.trials[i].measured <= 0) judged.predicted[i] = predict(set.trials[i]).step;
  return judged;
}

struct Statistics {
  double mape = 0, spearman = 1, regret = 1;  // percent; of the one predicted fastest
};

Statistics print_statistics(const std::string& name, const Vector& predicted,
                            const Vector& measured) {
  std::vector<size_t> order(predicted.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return predicted[a] < predicted[b]; });
  const double best = *std::min_element(measured.begin(), measured.end());
  double top5 = measured[order[0]];
  for (size_t i = 0; i < std::min<size_t>(5, order.size()); ++i)
    top5 = std::min(top5, measured[order[i]]);
  const Statistics s = {100 * mape(predicted, measured), spearman(predicted, measured),
                        measured[order[0]] / best};
  fmt::print("{:32} {:5} {:8.2f} {:9.3f} {:8.3f} {:8.3f} {:8.3f}\n", name, predicted.size(), s.mape,
             s.spearman, kendall(predicted, measured), s.regret, top5 / best);
  return s;
}

// What predictions are held to.
class Bars {
 public:
  // At most this error and regret, at least this correlation.
  void hold(const std::string& name, const Statistics& is, const Statistics& bar) {
    auto note = [&](const char* what, double value, double limit) {
      missed_.push_back(fmt::format("{}: {} {:.3f}, bar {:.3f}", name, what, value, limit));
    };
    if (!(is.mape <= bar.mape)) note("MAPE", is.mape, bar.mape);
    if (!(is.spearman >= bar.spearman)) note("Spearman", is.spearman, bar.spearman);
    if (!(is.regret <= bar.regret)) note("regret", is.regret, bar.regret);
  }
  // Prints what was missed; whether all was held.
  bool held() const {
    for (const std::string& line : missed_) fmt::print("MISSED {}\n", line);
    return missed_.empty();
  }

 private:
  std::vector<std::string> missed_;
};

// `predictions`: [trial], 0: none.
Statistics report(const std::string& name, const Set& set, const Vector& predictions,
                  const std::function<bool(const Trial&)>& use) {
  Vector predicted, measured;
  for (size_t i = 0; i < predictions.size(); ++i) {
    const Trial& t = set.trials[i];
    if (t.measured <= 0 || !use(t) || predictions[i] <= 0) continue;
    predicted.push_back(predictions[i]);
    measured.push_back(t.measured);
  }
  return predicted.empty() ? Statistics{} : print_statistics(name, predicted, measured);
}

// The errors that others report for predictions of theirs.
class Reported {
 public:
  void print(const Set& set) {
    for (const Record& r : records_) {
      if (r.at("set") != set.name) continue;
      fmt::print("{:32} {:>5} {:>8}  reported ({}): {}\n", "  " + r.at("system"), "",
                 r.at("error_percent"), r.at("source"), r.at("quantity"));
      notes_.insert(r.at("note"));
    }
  }
  void print_notes() const {
    for (const std::string& note : notes_) fmt::print("reported: {}\n", note);
  }

 private:
  std::vector<Record> records_ = read_csv("reported.csv", "bench/data");
  std::set<std::string> notes_;  // of what was printed
};

// Memory: the bytes the model does not state are a constant per device and a share of the
// activations, two numbers fitted on all trials but the one predicted. Returns the mean error.
double memory_error(const Set& set) {
  Vector base, activations, measured;
  for (const Trial& t : set.trials) {
    if (t.memory <= 0) continue;
    auto most = [&](double fragmentation) {
      Calibration c = default_calibration(set.clusters[t.cluster], set.models[t.model].precision);
      c.context = 0;
      c.fragmentation = fragmentation;
      const Estimate e =
          Estimator(set.models[t.model], set.clusters[t.cluster], c).estimate(t.strategy);
      return *std::max_element(e.memory.begin(), e.memory.end());
    };
    base.push_back(most(0));
    activations.push_back(most(1) - base.back());
    measured.push_back(t.memory);
  }
  double error = 0;
  for (size_t out = 0; out < base.size(); ++out) {
    std::vector<Vector> normal(2, Vector(2, 0.0));
    Vector right(2, 0.0);
    for (size_t i = 0; i < base.size(); ++i) {
      if (i == out) continue;
      const double x[2] = {1 / measured[i], activations[i] / measured[i]};
      const double y = 1 - base[i] / measured[i];
      for (int a = 0; a < 2; ++a) {
        right[a] += x[a] * y;
        for (int b = 0; b < 2; ++b) normal[a][b] += x[a] * x[b];
      }
    }
    const Vector fitted = solve(normal, right, 0);
    const double predicted = base[out] + fitted[0] + fitted[1] * activations[out];
    error += std::abs(predicted / measured[out] - 1) / static_cast<double>(base.size());
  }
  return error;
}

// Failures: which trials failed, against those said not to fit or to have a stage without a block;
// and the failed among the ten predicted fastest, which it returns.
int report_failures(const Set& set, const Judged& judged) {
  Predictor predict(set, judged.fitted);
  int failed = 0, said = 0, both = 0, slow = 0;
  std::vector<std::pair<double, bool>> usable;
  for (size_t i = 0; i < set.trials.size(); ++i) {
    const Trial& t = set.trials[i];
    bool bad = !predict(t).fits;
    int at = 0;
    for (int n : t.strategy.stages) {
      const auto& layers = set.models[t.model].layers;
      bad |= std::none_of(layers.begin() + at, layers.begin() + at + n,
                          [](const Layer& l) { return l.block; });
      at += n;
    }
    const bool fails = t.measured <= 0;
    failed += fails, said += bad, both += fails && bad;
    slow += fails && !bad && judged.predicted[i] > 4.6;  // longer than the launcher waited
    if (!bad) usable.push_back({judged.predicted[i], fails});
  }
  std::sort(usable.begin(), usable.end());
  int top = 0;
  for (size_t i = 0; i < std::min<size_t>(10, usable.size()); ++i) top += usable[i].second;
  fmt::print(
      "  failures: {} of {} foreseen, {} more predicted too slow for the launcher; {} of {} "
      "said to fail did; {} failed among the ten predicted fastest\n",
      both, failed, slow, both, said, top);
  return top;
}

void print_fit(const Set& set, const Judged& judged) {
  for (size_t i = 0; i < set.parameters.size(); ++i)
    fmt::print("    {} = {:.3g}", set.parameters[i].name, std::exp(judged.fitted.logs[i]));
  fmt::print("\n");
}

void print_rows(const Set& set, const Judged& judged) {
  for (size_t i = 0; i < set.trials.size(); ++i) {
    const Trial& t = set.trials[i];
    Predictor predict(set, judged.fitted);
    const Estimate e = predict(t);
    fmt::print(
        "    {:70} measured {:8.4f} predicted {:8.4f} {:+6.1f}%  pipe {:.3f} tied {:.3f} "
        "grad {:.3f} opt {:.3f} mem {:.2f} ({:.2f}){}\n",
        t.name, t.measured, judged.predicted[i],
        t.measured > 0 ? 100 * (judged.predicted[i] / t.measured - 1) : 0.0, e.pipeline, e.tied,
        e.gradients, e.optimizer, *std::max_element(e.memory.begin(), e.memory.end()) / 1e9,
        t.memory / 1e9, e.fits ? "" : " OOM");
  }
}

// ---- search ----

struct Searched {
  std::string name;
  Cluster cluster;
  Model model;
  int global_batch = 0;
  Calibration calibration;
  std::string fixed;
  std::vector<int> cp = {1};  // context-parallel degrees tried
};

void search_times(const std::vector<Searched>& cases) {
  fmt::print("\n{:24} {:>7} {:>10} {:>10} {:>8} {:>8} {:>9}  {}\n", "search", "devices", "step s",
             "bound s", "CPU s", "found", "costed", "best, stop, baselines");
  for (const Searched& c : cases) {
    const Estimator estimator(c.model, c.cluster, c.calibration);
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

// TransGAN as AMP's planner sees it: a projection, 12 blocks of 1024 channels on 81 tokens, 12 of
// 16 channels on 82,944 tokens in windows of 324.
Model amp_transgan() {
  Model model;
  model.name = "transgan";
  model.precision = fp16_adam();
  model.heads = 4;
  model.tokens = 81;
  auto block = [](double h, double tokens, double window) {
    Layer l;
    const double scores = 4 * tokens * window, hidden = tokens * h;
    l.flops = 2 * tokens * 12 * h * h + 4 * tokens * window * h;
    l.traffic_whole = (20 * scores + 60 * hidden) * 2;  // heads are not divided
    l.kernels = 60;
    l.parameters = 12 * h * h;
    l.parameters_whole = 13 * h;
    l.output = hidden;
    l.saved_whole = 34 * hidden + 5 * scores;
    l.all_reduces = 2;
    l.block = true;
    return l;
  };
  Layer project;
  project.name = "projection";
  project.parameters = 512.0 * 81 * 1024;
  project.flops = 2 * project.parameters;
  project.output = 81 * 1024;
  project.kernels = 3;
  model.layers.push_back(project);
  for (int i = 0; i < 12; ++i) model.layers.push_back(block(1024, 81, 81));
  for (int i = 0; i < 12; ++i) model.layers.push_back(block(16, 82944, 324));
  return model;
}

Calibration calibrated(const Set& set, const Vector& logs) {
  Calibration c = default_calibration(set.clusters[0], set.models[0].precision);
  for (size_t i = 0; i < logs.size(); ++i) set.parameters[i].set(&c, std::exp(logs[i]));
  return c;
}

// AMP's experiments with the calibrations fitted here, and larger clusters with the catalogue's.
void search_all() {
  std::vector<Searched> cases;
  Calibration mixed;
  for (const char* name : {"amp-t4x16", "amp-mixed"}) {
    const Set set = amp(name);
    std::vector<int> rows;
    for (size_t i = 0; i < set.trials.size(); ++i)
      if (set.trials[i].measured > 0) rows.push_back(static_cast<int>(i));
    mixed = calibrated(set, fit(set, rows).logs);
    cases.push_back({name, set.clusters[0], set.models[0], 32, mixed, ""});
    if (std::string(name) != "amp-mixed") continue;
    // With every device: AMP's best degrees (1.28 s measured) with other layers, and one pipeline.
    for (const char* fixed : {"pp=8,dp=2,tp=1,mbs=1,zero=0,recompute=none", "pp=16,dp=1,tp=1"})
      cases.push_back(
          {fmt::format("  {:.14}", fixed), set.clusters[0], set.models[0], 32, mixed, fixed});
  }
  cases.push_back({"amp-v100x16", load_cluster("amp-v100x16"), amp_transgan(), 64, mixed, ""});
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
                     nodes == 32 ? 1024 : 4096, default_calibration(cluster, model.precision), ""});
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
    report("  without paces", set, judged.without_paces, all);
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
