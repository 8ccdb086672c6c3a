#include "trials/sets.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

#include "core/error.h"
#include "reference/grid.h"
#include "trials/table.h"

namespace motley::grid::trials {

namespace {

void add(Set* set, const std::string& name, double start, double freedom,
         std::function<void(System*, double)> setter) {
  set->parameters.push_back({name, start, freedom, std::move(setter)});
}

// The catalogue's numbers, from which fits start.
Calibration start_of(const Set& set) {
  return default_calibration(set.clusters[0], set.models[0].precision, Runtime::deepspeed);
}

// What a device type is fitted in.
void add_device(Set* set, const std::string& type) {
  const Rates start = start_of(*set).types.at(type);
  const auto rate = [&](const char* name, double freedom, double Rates::*field) {
    add(set, type + " " + name, start.*field, freedom,
        [type, field](System* s, double x) { s->calibration.types[type].*field = x; });
  };
  rate("flops", 0.1, &Rates::flops);
  rate("memory", 0.1, &Rates::memory);
  rate("launch", 0.1, &Rates::launch);
  rate("collective", 0.7, &Rates::collective);
  rate("step", 0.5, &Rates::step);
}

// What a link type is fitted in.
void add_link(Set* set, const std::string& name) {
  const LinkType& type = *find_link_type(name);
  add(set, name + " share", type.share, 0.1, [name, share = type.share](System* s, double x) {
    for (Group& group : s->cluster.groups) {
      if (group.link.type != name) continue;
      group.link.bandwidth *= x / share;
      for (GroupId child : group.children) s->cluster.groups[child.index].uplink *= x / share;
    }
  });
  add(set, name + " message", type.message, 0.3,
      [name](System* s, double x) { s->calibration.links[name].message = x; });
  const bool known =
      name.starts_with("NV");  // from tables of all-reduces; nothing says it of others
  add(set, name + " start", type.start, known ? 0.2 : 2.0,
      [name](System* s, double x) { s->calibration.links[name].start = x; });
}

// What belongs to DeepSpeed and PyTorch, whatever they run on.
void add_framework(Set* set) {
  const Calibration start = start_of(*set);
  const auto field = [&](const char* name, double freedom, double Calibration::*at) {
    add(set, fmt::format("DeepSpeed {}", name), start.*at, freedom,
        [at](System* s, double x) { s->calibration.*at = x; });
  };
  field("message_launch", 0.25, &Calibration::message_launch);
  field("optimizer_passes", 0.3, &Calibration::optimizer_passes);
  field("overlap_power", 0.02, &Calibration::overlap_power);
}

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
    l.kernels = 20;
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

// The profiles of single layers on the set's devices; equal layers have the mean of theirs.
void add_profiles(Set* set) {
  const Model& model = set->models[0];
  struct Sum {
    double seconds = 0;
    int layers = 0;
  };
  std::map<std::tuple<std::string, int, int>, Sum> sums;  // type, first of the layers alike, tp
  const auto first_like = [&](size_t l) {
    for (size_t first = 0; first < l; ++first) {
      Layer other = model.layers[first];
      other.name = model.layers[l].name;
      if (other == model.layers[l]) return first;
    }
    return l;
  };
  std::map<std::string, size_t> rows;  // of a device so far
  for (const Record& r : read_csv("amp/layer_times.csv")) {
    const std::string type = r.at("gpu") == "T4" ? "T4" : "V100-16GB";
    if (r.at("model") != model.name) continue;
    const size_t layer = first_like(rows[type]++);
    for (int tp : {1, 2, 4}) {
      Sum& sum = sums[{type, static_cast<int>(layer), tp}];
      sum.seconds += real(r, fmt::format("tp{}_s", tp).c_str());
      ++sum.layers;
    }
  }
  for (const auto& [type, count] : rows)
    MOTLEY_CHECK(count == model.layers.size(), "{} layers of {} on {}", count, model.name, type);
  for (const auto& [key, sum] : sums) {
    const auto& [type, layer, tp] = key;
    const bool present = std::any_of(set->clusters[0].types.begin(), set->clusters[0].types.end(),
                                     [&, of = type](const DeviceType& t) { return t.name == of; });
    if (!model.layers[layer].block || !present) continue;
    // On one device the time is taken as it is; cut, it says what collectives cost.
    const double mean = sum.seconds / sum.layers;
    if (tp == 1)
      set->times.add(type, layer, LayerProfile{1, mean});
    else
      set->profiles.push_back({type, 0, layer, tp, mean});
  }
}

}  // namespace

Set amp(const std::string& cluster) {
  Set set;
  set.name = cluster;
  const bool transgan = cluster == "amp-v100x16";
  set.models = {transgan ? amp_transgan() : amp_gpt2()};
  set.clusters = {load_cluster(cluster)};
  for (const Record& r : read_csv("amp/trials.csv")) {
    if (r.at("cluster") != cluster) continue;
    Trial t;
    t.strategy = plain_strategy(integer(r, "pp"), integer(r, "dp"), integer(r, "tp"),
                                integer(r, "mbs"), transgan ? 64 : 32, Runtime::deepspeed);
    t.strategy.stages = list(r.at("stages"));
    t.name = to_string(t.strategy);
    t.measured = r.at("status") == "ok" ? real(r, "measured_s") : 0;
    t.other = real(r, "amp_s");
    t.odd = cluster == "amp-mixed" && t.strategy.tp > 1 && t.strategy.pp > 1 &&
            t.strategy.micro_batch <= 2;
    set.trials.push_back(std::move(t));
  }
  add_profiles(&set);
  for (const DeviceType& type : set.clusters[0].types) add_device(&set, type.name);
  add_link(&set, "PCIe3");
  add_link(&set, set.clusters[0].groups[0].link.type);
  add_framework(&set);
  return set;
}

Set vtrain(const std::string& table) {
  Set set;
  set.name = "vtrain " + table;
  Precision precision = fp16_adam();
  precision.gradient = 2;
  precision.reduce_buffer = 0;
  std::map<std::vector<int>, int> models;
  std::map<int, int> clusters;
  for (const Record& r : read_csv("vtrain/" + table + "_node.csv")) {
    TransformerShape shape;
    shape.layers = integer(r, "layers");
    shape.hidden = integer(r, "hidden");
    shape.heads = integer(r, "heads");
    shape.seq = integer(r, "seq");
    // Megatron's fused kernels: 14, as scale, mask and softmax are one, bias and GeLU, and bias,
    // dropout and addition; without the first, conversions to 32 bits and back, scale and mask too.
    // Over the scores go the products that write and read them, which are so shallow that memory
    // bounds them (2), scale, mask and softmax (2), dropout with its mask (2.5); over the hidden
    // states two normalisations and two bias-dropout-additions (11), the bias and GeLU of four times
    // the width (8), two transpositions (4).
    shape.kernels = 14;
    shape.unfused = 4;
    shape.score_passes = 6.5;
    shape.hidden_passes = 24;
    auto [model, new_model] =
        models.try_emplace({shape.layers, shape.hidden}, static_cast<int>(set.models.size()));
    if (new_model) set.models.push_back(transformer_model("gpt", shape, precision));
    const int gpus = integer(r, "num_gpus");
    auto [cluster, new_cluster] = clusters.try_emplace(gpus, static_cast<int>(set.clusters.size()));
    if (new_cluster)
      set.clusters.push_back(parse_cluster(
          fmt::format("name: a100\nlink: {{type: InfiniBand-200, nominal: 800 Gbps}}\ngroups:\n  - "
                      "{{name: node, count: {}, link: {{type: NVSwitch-A100}}, "
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
  add_device(&set, "A100-80GB");
  add_link(&set, "NVSwitch-A100");
  if (table == "multi") add_link(&set, "InfiniBand-200");
  add_framework(&set);
  return set;
}

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
      layer.kernels = layer.block ? 20 : 5;
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
  add_device(&set, "GH200");
  set.parameters.erase(set.parameters.begin());  // layers are measured
  add_framework(&set);
  return set;
}

}  // namespace motley::grid::trials
