// FlagScale: an experiment and a train file in YAML. Stages that are alike and of one type of device
// are a process mesh, [tensors, context, experts, replicas, stages]; ranks follow one another by mesh.
// Mesh i takes micro-batches of dp_0 * micro_batch_size / dp_i samples.

#include <algorithm>
#include <numeric>

#include "core/error.h"
#include "core/yaml.h"
#include "export/common.h"

namespace motley::exports {

using planner::ArrangedStage;
using planner::Arrangement;
using planner::Inside;

namespace {

constexpr const char* kTrain = "train.yaml";
constexpr const char* kExperiment = "experiment.yaml";

struct Mesh {
  int tp = 1, ep = 1, dp = 1, pp = 1;
  std::string type;
};

std::vector<Mesh> meshes_of(const ExportJob& job) {
  std::vector<Mesh> meshes;
  for (const ArrangedStage& s : job.arrangement.stages) {
    Mesh mesh{s.tp(), s.inside == Inside::experts ? s.width() : 1, s.dp(), 1,
              job.plan.cluster.type_of(s.devices[0][0]).name};
    if (!meshes.empty() && meshes.back().tp == mesh.tp && meshes.back().ep == mesh.ep &&
        meshes.back().dp == mesh.dp && meshes.back().type == mesh.type)
      ++meshes.back().pp;
    else
      meshes.push_back(mesh);
  }
  return meshes;
}

// Devices of a host that are ranks, by their numbers on it.
std::vector<int> slots_of(const planner::Host& host, const std::vector<int>& ranks) {
  std::vector<int> slots;
  for (size_t i = 0; i < host.devices.size(); ++i)
    if (std::count(ranks.begin(), ranks.end(), host.devices[i]))
      slots.push_back(static_cast<int>(i));
  return slots;
}

// Which stages compute activations again, of every micro-batch: [stages, micro-batches, flag, ...].
std::string recomputation(const Arrangement& a) {
  std::vector<std::string> rows;
  for (const ArrangedStage& s : a.stages)
    rows.push_back(fmt::format("[1, {}, {}]", a.micro_batches[0], s.recompute ? 1 : 0));
  return fmt::format("[{}]", fmt::join(rows, ", "));
}

}  // namespace

void write_flagscale(const ExportJob& job, Exported* out) {
  const Arrangement& a = job.arrangement;
  const Sizes& s = job.need_sizes("FlagScale");
  const std::vector<Mesh> meshes = meshes_of(job);
  std::vector<int> numbers, blocks;
  std::vector<std::string> types;
  bool tensors_differ = false, again = false, once = false;
  for (const Mesh& m : meshes) {
    numbers.insert(numbers.end(), {m.tp, 1, m.ep, m.dp, m.pp});
    types.push_back('"' + m.type + '"');
    tensors_differ |= m.tp != meshes[0].tp;
  }
  for (const ArrangedStage& stage : a.stages) {
    blocks.push_back(stage.blocks);
    (stage.recompute ? again : once) = true;
  }
  std::string text = fmt::format(
      "# Written by motley export: {}\nsystem:\n  tensor_model_parallel_size: {}\n"
      "  pipeline_model_parallel_size: {}\n  expert_model_parallel_size: {}\n"
      "  sequence_parallel: {}\n  use_distributed_optimizer: {}\n  ckpt_format: torch\n"
      "  precision:\n    bf16: {}\n    fp16: {}\n  hetero:\n"
      "    enable_hetero: true\n    hetero_use_cpu_communication: false\n"
      "    hetero_process_meshes: [{}]\n    hetero_device_types: [{}]\n"
      "    hetero_current_device_type: {}\n    hetero_pipeline_layer_split: [{}]\n"
      "    standalone_embedding_stage: false\n",
      planner::to_string(a), meshes[0].tp, a.stages.size(), meshes[0].ep,
      tensors_differ || (meshes[0].tp > 1 && s.experts > 0), a.zero == 1,
      job.plan.precision == DType::bf16, job.plan.precision == DType::f16, fmt::join(numbers, ", "),
      fmt::join(types, ", "), types[0], fmt::join(blocks, ", "));
  if (again) {
    text +=
        "  recompute:\n    recompute_granularity: full\n    recompute_method: uniform\n"
        "    recompute_num_layers: 1\n";
    if (once) text += "    recompute_granularity_per_stage_micro_batch: " + recomputation(a) + "\n";
  }
  text += fmt::format(
      "model:\n  num_layers: {}\n  hidden_size: {}\n  ffn_hidden_size: {}\n"
      "  num_attention_heads: {}\n  group_query_attention: {}\n  num_query_groups: {}\n"
      "  seq_length: {}\n  max_position_embeddings: {}\n  position_embedding_type: {}\n"
      "  normalization: {}\n  swiglu: {}\n  disable_bias_linear: {}\n"
      "  untie_embeddings_and_output_weights: {}\n  attention_dropout: {}\n  hidden_dropout: {}\n"
      "  micro_batch_size: {}\n  global_batch_size: {}\n  train_iters: 1000\n",
      s.layers, s.hidden, s.ffn, s.heads, s.kv_heads != s.heads, s.kv_heads, s.seq,
      std::max(s.seq, s.positions), s.positions > 0 ? "learned_absolute" : "rope",
      s.rms_norm ? "RMSNorm" : "LayerNorm", s.gated, !s.bias, !s.tied, s.dropout, s.dropout,
      job.samples(), a.batch());
  if (s.experts > 0)
    text += fmt::format(
        "  num_experts: {}\n  moe_router_topk: {}\n  moe_ffn_hidden_size: {}\n"
        "  moe_token_dispatcher_type: alltoall\n",
        s.experts, s.top, s.ffn);
  text += fmt::format(
      "  optimizer:\n    lr_scheduler:\n      lr: 1.0e-4\ndata:\n  mock_data: true\n"
      "  tokenizer:\n    tokenizer_type: NullTokenizer\n    vocab_size: {}\n",
      s.vocab);
  out->files.push_back({"train/" + std::string(kTrain), text});
  int most = 0;
  std::string visible;
  for (const planner::Host& host : job.hosts) {
    const std::vector<int> slots = slots_of(host, job.ranks);
    most = std::max(most, static_cast<int>(slots.size()));
    visible += fmt::format("      {}:\n        CUDA_VISIBLE_DEVICES: \"{}\"\n", host.name,
                           fmt::join(slots, ","));
  }
  out->files.push_back(
      {kExperiment,
       fmt::format(
           "# flagscale train with this file, or: python run.py --config-path . --config-name "
           "experiment\ndefaults:\n  - _self_\n  - train: train\nexperiment:\n  exp_name: motley\n"
           "  exp_dir: ./outputs\n  task:\n    type: train\n    backend: megatron\n"
           "    entrypoint: flagscale/train/train_gpt.py\n  runner:\n    backend: torchrun\n"
           "    nnodes: {}\n    nproc_per_node: {}\n    hostfile: hostfile\n"
           "    rdzv_backend: static\n  envs:\n    CUDA_DEVICE_MAX_CONNECTIONS: 1\n"
           "    node_specific:\n{}action: run\n",
           job.hosts.size(), most, visible)});
  out->files.push_back(
      {"launch.sh",
       "#!/usr/bin/env bash\n# From a checkout of FlagScale, or with FLAGSCALE set to "
       "it: its runner starts the hosts of hostfile.\nset -euo pipefail\n"
       "here=$(cd \"$(dirname \"$0\")\" && pwd)\ncd \"${FLAGSCALE:-.}\"\n"
       "exec python run.py --config-path \"$here\" --config-name experiment "
       "action=\"${1:-run}\"\n",
       true});
  if (meshes[0].type != meshes.back().type && s.tied && meshes[0].tp != meshes.back().tp)
    out->differences.push_back(
        "FlagScale needs as many tensor ranks in the first and the last mesh where the head shares "
        "the "
        "embedding's table; train.yaml says otherwise, as the plan does");
  if (!s.causal)
    out->differences.push_back("the model's attention is not causal, FlagScale's GPT is");
  if (s.experts > 0)
    out->differences.push_back(
        "the plan's experts have a fixed capacity, FlagScale's router drops none");
}

namespace {

// The train file, by its rules.
class TrainReader {
 public:
  explicit TrainReader(const ImportJob& job)
      : job_(job), name_("train/" + std::string(kTrain)), file_(job.directory.name(name_)) {
    root_ = Yaml::parse(job.directory.text(name_), "import", file_);
  }

  Arrangement read() {
    const Yaml system = child(root_, "system"), hetero = child(system, "hetero"),
               model = child(root_, "model");
    if (job_.sizes) check_sizes(model, *job_.sizes);
    check_precision(system);
    same(file_ + ": global_batch_size", number(model, "global_batch_size"), job_.batch,
         "the batch");
    meshes_ = list(hetero, "hetero_process_meshes");
    blocks_ = list(hetero, "hetero_pipeline_layer_split");
    types_ = child(hetero, "hetero_device_types");
    samples_ = number(model, "micro_batch_size");
    check_meshes(system);
    check_types(hetero);
    check_experiment();
    const Yaml zero = system["use_distributed_optimizer"], again = system["recompute"];
    const int64_t whole = meshes_[3] * samples_;
    const auto count = static_cast<int>(job_.batch / whole);
    // One pass of all devices is one program (common.cc).
    if (stages_ == 1 && meshes_[0] == 1 && meshes_[2] == 1 && !is_true(zero) && !again &&
        count == 1 && job_.ranks.size() == static_cast<size_t>(job_.cluster.size()))
      replicas_ = 1;
    Arrangement a;
    a.micro_batch = whole / replicas_;
    a.micro_batches.assign(replicas_, count);
    a.zero = replicas_ > 1 && is_true(zero) ? 1 : 0;
    for (size_t m = 0; m < meshes_.size(); m += 5)
      for (int p = 0; p < meshes_[m + 4]; ++p) add_stage(m, again, &a);
    return a;
  }

 private:
  Yaml child(const Yaml& node, const char* key) const {
    if (!node.is_map() || !node[key]) throw user_error("import", "{}: {} is missing", file_, key);
    return node[key];
  }
  std::string scalar(const Yaml& node, const char* key) const {
    if (!node.is_scalar()) throw user_error("import", "{}: {} is no scalar", file_, key);
    return node.scalar();
  }
  static bool is_true(const Yaml& node) {
    return node && node.is_scalar() && node.scalar() == "true";
  }
  int64_t number(const Yaml& node, const char* key) const {
    return number_in(scalar(child(node, key), key), file_ + ": " + key, 1, int64_t{1} << 31);
  }
  std::vector<int> list(const Yaml& node, const char* key) const {
    std::vector<int> values;
    const Yaml sequence = child(node, key);
    if (!sequence.is_list()) throw user_error("import", "{}: {} is no list", file_, key);
    for (const Yaml& item : sequence.items())
      values.push_back(
          static_cast<int>(number_in(scalar(item, key), file_ + ": " + key, 0, 1 << 20)));
    return values;
  }

  void check_sizes(const Yaml& model, const Sizes& s) const {
    std::vector<std::pair<const char*, int64_t>> sizes = {
        {"num_layers", s.layers},
        {"hidden_size", s.hidden},
        {"ffn_hidden_size", s.ffn},
        {"num_attention_heads", s.heads},
        {"num_query_groups", s.kv_heads},
        {"seq_length", s.seq},
        {"max_position_embeddings", std::max(s.seq, s.positions)}};
    if (s.experts > 0)
      sizes.insert(
          sizes.end(),
          {{"num_experts", s.experts}, {"moe_router_topk", s.top}, {"moe_ffn_hidden_size", s.ffn}});
    for (const auto& [key, wanted] : sizes)
      same(file_ + ": " + key, number(model, key), wanted, "the model's");
    for (const char* key : {"attention_dropout", "hidden_dropout"})
      same_rate(file_ + ": " + key, scalar(child(model, key), key), s.dropout, "the model's");
    const Yaml tokenizer = child(child(root_, "data"), "tokenizer");
    same(file_ + ": vocab_size", number(tokenizer, "vocab_size"), s.vocab, "the model's");
  }

  void check_precision(const Yaml& system) const {
    const Yaml precision = child(system, "precision");
    const std::pair<const char*, DType> kinds[] = {{"bf16", DType::bf16}, {"fp16", DType::f16}};
    for (const auto& [name, kind] : kinds)
      same_word(file_ + ": " + name, scalar(child(precision, name), name),
                job_.precision == kind ? "true" : "false", "the plan's precision");
    if (precision.size() > 2)
      throw user_error("import", "{}: precision has {} names; give bf16 and fp16", file_,
                       precision.size());
  }

  // Meshes are of devices of the types that they name. Of stages ranks follow one another.
  void check_types(const Yaml& hetero) const {
    const char* const key = "hetero_device_types";
    size_t rank = 0;
    for (size_t m = 0; m < meshes_.size(); m += 5) {
      const std::string type = scalar(types_[m / 5], key);
      for (int n = meshes_[m] * meshes_[m + 3] * meshes_[m + 4]; n > 0; --n)
        same_word(fmt::format("{}: {}[{}]", file_, key, m / 5), type,
                  job_.cluster.type_of(job_.ranks[rank++]).name, "that of its ranks");
    }
    const char* const current = "hetero_current_device_type";
    const std::string own = scalar(child(hetero, current), current);
    if (std::none_of(types_.items().begin(), types_.items().end(),
                     [&](const Yaml& type) { return type.scalar() == own; }))
      throw user_error("import", "{}: {} is '{}'; give one of {}", file_, current,
                       own.substr(0, 40), key);
  }

  // What is started where: as ranks.txt says.
  void check_experiment() const {
    if (!job_.directory.has(kExperiment)) return;
    const std::string file = job_.directory.name(kExperiment);
    const Yaml root = Yaml::parse(job_.directory.text(kExperiment), "import", file);
    const auto find = [&](const Yaml& node, const std::string& key) {
      if (!node.is_map() || !node[key]) throw user_error("import", "{}: {} is missing", file, key);
      return node[key];
    };
    const auto word = [&](const Yaml& node, const std::string& key) {
      const Yaml value = find(node, key);
      if (!value.is_scalar()) throw user_error("import", "{}: {} is no scalar", file, key);
      return value.scalar();
    };
    const Yaml experiment = find(root, "experiment"), runner = find(experiment, "runner"),
               envs = find(experiment, "envs"), nodes = find(envs, "node_specific");
    size_t most = 0;
    for (const planner::Host& host : job_.hosts) {
      const std::vector<int> own = slots_of(host, job_.ranks);
      most = std::max(most, own.size());
      same_word(file + ": CUDA_VISIBLE_DEVICES of " + host.name,
                word(find(nodes, host.name), "CUDA_VISIBLE_DEVICES"),
                fmt::format("{}", fmt::join(own, ",")), "the devices of ranks.txt");
    }
    same(file + ": nnodes", number_in(word(runner, "nnodes"), file + ": nnodes", 1),
         static_cast<int64_t>(job_.hosts.size()), "the hosts of ranks.txt");
    same(file + ": nproc_per_node",
         number_in(word(runner, "nproc_per_node"), file + ": nproc_per_node", 1),
         static_cast<int64_t>(most), "the most ranks of a host");
    same_word(file + ": rdzv_backend", word(runner, "rdzv_backend"), "static", "which meshes need");
    const char* const connections = "CUDA_DEVICE_MAX_CONNECTIONS";
    if (divides_matrices())
      same_word(file + ": " + connections, word(envs, connections), "1",
                "which dividing matrices needs");
  }
  bool divides_matrices() const {
    for (size_t m = 0; m < meshes_.size(); m += 5)
      if (meshes_[m] > 1) return true;
    return false;
  }

  void check_meshes(const Yaml& system) {
    if (meshes_.empty() || meshes_.size() % 5 != 0 || meshes_.size() > 5 * 4096)
      throw user_error("import", "{}: hetero_process_meshes has {} numbers; give five of each mesh",
                       file_, meshes_.size());
    if (!types_.is_list() || types_.size() * 5 != meshes_.size())
      throw user_error("import", "{}: hetero_device_types has not one name for each of {} meshes",
                       file_, meshes_.size() / 5);
    int64_t ranks = 0;
    for (size_t m = 0; m < meshes_.size(); m += 5) ranks += check_mesh(m);
    same(file_ + ": pipeline_model_parallel_size", number(system, "pipeline_model_parallel_size"),
         stages_, "the sum over meshes");
    same(file_ + ": tensor_model_parallel_size", number(system, "tensor_model_parallel_size"),
         meshes_[0], "that of the first mesh");
    if (system["expert_model_parallel_size"] || meshes_[2] > 1)
      same(file_ + ": expert_model_parallel_size", number(system, "expert_model_parallel_size"),
           meshes_[2], "that of the first mesh");
    same(file_ + ": hetero_process_meshes: ranks", ranks, static_cast<int64_t>(job_.ranks.size()),
         "the ranks of ranks.txt");
    same(file_ + ": hetero_pipeline_layer_split: numbers", static_cast<int64_t>(blocks_.size()),
         stages_, "the stages");
    same(file_ + ": hetero_pipeline_layer_split: sum",
         std::accumulate(blocks_.begin(), blocks_.end(), int64_t{0}),
         planner::count_blocks(job_.graph), "the model's layers");
    if (job_.batch % (meshes_[3] * samples_) != 0)
      throw user_error("import", "{}: {} replicas x micro_batch_size {} does not divide {}", file_,
                       meshes_[3], samples_, job_.batch);
  }

  // Its ranks. Matrices and rows of one stage are not both divided: replicas are as many as all
  // meshes have in common.
  int64_t check_mesh(size_t m) {
    const int tp = meshes_[m], cp = meshes_[m + 1], ep = meshes_[m + 2], dp = meshes_[m + 3],
              pp = meshes_[m + 4];
    if (tp < 1 || cp != 1 || ep < 1 || dp < 1 || pp < 1 || dp % ep != 0)
      throw user_error(
          "import",
          "{}: mesh {} is [{}, {}, {}, {}, {}]; give numbers from 1 on, 1 for context, "
          "and a divisor of the replicas for experts",
          file_, m / 5, tp, cp, ep, dp, pp);
    if (meshes_[3] * samples_ % dp != 0)
      throw user_error("import",
                       "{}: {} x {} samples of the first mesh do not divide among {} replicas of "
                       "mesh {}",
                       file_, meshes_[3], samples_, dp, m / 5);
    if (tp > 1 && ep > 1)
      throw user_error("import",
                       "{}: mesh {} divides experts and matrices, which no plan of motley does; "
                       "give 1 of either",
                       file_, m / 5);
    if (job_.sizes)
      if (const std::string why = planner::cannot_divide(job_.target, tp, ep, *job_.sizes);
          !why.empty())
        throw user_error("import", "{}: mesh {}: {}; give a divisor", file_, m / 5, why);
    const int own = ep > 1 ? dp / ep : dp;
    replicas_ = replicas_ == 0 ? own : std::gcd(replicas_, own);
    stages_ += pp;
    return int64_t{tp} * dp * pp;
  }

  bool recomputes(const Yaml& again, int stage, int micro_batches) const {
    const char* const key = "recompute_granularity_per_stage_micro_batch";
    if (!again || !again.is_map()) return false;
    const std::pair<const char*, const char*> alone[] = {{"recompute_granularity", "full"},
                                                         {"recompute_method", "uniform"},
                                                         {"recompute_num_layers", "1"}};
    for (const auto& [name, wanted] : alone)
      same_word(file_ + ": " + name, scalar(child(again, name), name), wanted,
                "which alone plans of motley have");
    if (!again[key]) return true;
    const Yaml rows = again[key];
    if (!rows.is_list() || rows.size() != static_cast<size_t>(stages_) || !rows[stage].is_list() ||
        rows[stage].size() != 3)
      throw user_error("import", "{}: {} has no [1, micro-batches, flag] for stage {}", file_, key,
                       stage);
    same(file_ + ": " + key + ": kinds", number_in(scalar(rows[stage][0], key), file_, 0), 1,
         "one for all micro-batches");
    same(file_ + ": " + key + ": micro-batches", number_in(scalar(rows[stage][1], key), file_, 0),
         micro_batches, "the step's");
    return number_in(scalar(rows[stage][2], key), file_ + ": " + key + ": flag", 0, 1) == 1;
  }

  void add_stage(size_t m, const Yaml& again, Arrangement* a) {
    const int tp = meshes_[m], ep = meshes_[m + 2], dp = meshes_[m + 3];
    const auto number = static_cast<int>(a->stages.size());
    if (tp > 1 && dp > replicas_)
      throw user_error("import",
                       "{}: mesh {} divides matrices and has more replicas than others, which no "
                       "plan of motley does",
                       file_, m / 5);
    ArrangedStage stage;
    stage.inside = tp > 1 ? Inside::tensors : ep > 1 ? Inside::experts : Inside::batch;
    stage.blocks = blocks_[number];
    stage.recompute = recomputes(again, number, a->micro_batches[0]);
    stage.warm_up = std::min(stages_ - number, a->micro_batches[0]);
    const std::string type = scalar(types_[m / 5], "hetero_device_types");
    const int width = tp * dp / replicas_;
    for (int r = 0; r < replicas_; ++r, rank_ += width) {
      const auto from = job_.ranks.begin() + rank_;
      stage.devices.emplace_back(from, from + width);
      std::sort(stage.devices.back().begin(), stage.devices.back().end());
      for (int d : stage.devices.back())
        if (job_.cluster.type_of(d).name != type)
          throw user_error("import", "{}: hetero_device_types[{}] is {}; its ranks are on {}",
                           file_, m / 5, type.substr(0, 40), job_.cluster.type_of(d).name);
    }
    a->stages.push_back(std::move(stage));
  }

  const ImportJob& job_;
  const std::string name_, file_;
  Yaml root_, types_;
  std::vector<int> meshes_, blocks_;
  int64_t samples_ = 1, rank_ = 0;
  int replicas_ = 0, stages_ = 0;
};

}  // namespace

Arrangement read_flagscale(const ImportJob& job) { return TrainReader(job).read(); }

}  // namespace motley::exports
