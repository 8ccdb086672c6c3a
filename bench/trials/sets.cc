#include "trials/sets.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "core/error.h"
#include "reference/grid.h"
#include "trials/table.h"

namespace motley::grid::trials {

namespace {

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

}  // namespace

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
  set.time_scales = true;
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

}  // namespace motley::grid::trials
