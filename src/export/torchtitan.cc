// torchtitan: a TOML file for 0.2, a Python recipe of the same numbers for 0.3, and the schedule as
// the CSV that torch.distributed.pipelining loads.
//
// A row of the CSV is a stage's rank, a cell what it does at that time: "0F2" is the forward pass of
// micro-batch 2 in stage 0, "0B2" the backward pass, an empty cell nothing. So warm-up passes of any
// number can be said.
#include <algorithm>
#include <numeric>

#include "core/error.h"
#include "export/common.h"

namespace motley::exports {

using planner::Arrangement;
using planner::Inside;

namespace {

constexpr const char* kFile = "train.toml";
constexpr const char* kSchedule = "schedule.csv";

// Modules of every stage; the head is `output` in 0.2 and `lm_head` in 0.3.
Json modules_of(const Arrangement& a, const char* head) {
  Json parts = Json::array();
  int layer = 0;
  for (size_t s = 0; s < a.stages.size(); ++s) {
    Json part = Json::array();
    if (s == 0) part.push_back("tok_embeddings");
    for (int k = 0; k < a.stages[s].blocks; ++k) part.push_back(fmt::format("layers.{}", layer++));
    if (s + 1 == a.stages.size()) {
      part.push_back("norm");
      part.push_back(head);
    }
    parts.push_back(std::move(part));
  }
  return parts;
}

std::string csv_of(const ExportJob& job) {
  const ReplicaPlan& replica = job.plan.pipeline->replicas[0];
  const Ticks ticks = ticks_of(replica);
  const auto groups = stage_groups(replica);
  int end = 0;
  for (const auto& stage : ticks)
    for (const int backward : {0, 1})
      for (const int t : stage[backward]) end = std::max(end, t + 1);
  std::string text;
  for (const std::vector<int>& group : groups) {
    std::vector<std::string> row(end);
    for (const int s : group)
      for (const int backward : {0, 1})
        for (size_t m = 0; m < ticks[s][backward].size(); ++m)
          row[ticks[s][backward][m]] = fmt::format("{}{}{}", s, backward ? 'B' : 'F', m);
    text += fmt::format("{}\n", fmt::join(row, ","));
  }
  return text;
}

const char* kModel =
    R"py("""The model of the plan as a flavor of torchtitan 0.2's Llama 3 (train.toml imports this)."""
from torchtitan.models.llama3 import TransformerModelArgs, llama3_args

llama3_args["motley"] = TransformerModelArgs(
    dim={hidden}, n_layers={layers}, n_heads={heads}, n_kv_heads={kv_heads}, vocab_size={vocab}, multiple_of=1,
    ffn_dim_multiplier=({ffn} + 0.5) / int(8 * {hidden} / 3), max_seq_len={seq}, rope_theta=10000)
)py";

const char* kRecipe =
    R"py("""The plan for torchtitan 0.3 and later: `--module recipe --config motley`. For 0.2 there is train.toml."""
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.trainer import Trainer

MODEL = dict(dim={hidden}, n_layers={layers}, n_heads={heads}, n_kv_heads={kv_heads}, vocab_size={vocab}, ffn={ffn})
PARALLELISM = dict(
{parallelism})
TRAINING = dict(
    num_tokens_per_microbatch_per_dp_rank={tokens}, num_tokens_per_train_step={step_tokens}, max_context_length={seq},
    steps=1000)


def motley(base=None):
    """`base`: a Trainer.Config of the model, whose parallelism and batch become those of the plan."""
    config = base or Trainer.Config()
    config.parallelism = ParallelismConfig(**PARALLELISM)
    config.training = TrainingConfig(**TRAINING)
    config.activation_checkpoint = {checkpoint}
    return config
)py";

std::string toml(const Json& value) { return value.dump(); }

// The same fields in both files, in the names of each.
struct Field {
  std::string name;
  Json value;
};

std::vector<Field> parallelism_of(const ExportJob& job, bool old) {
  const Arrangement& a = job.arrangement;
  const bool pieces = a.stages[0].inside == Inside::pieces && job.dp() > 1;
  const bool alone = !a.pipelined() && job.tp() == 1 && a.stages[0].inside != Inside::experts;
  const bool copies = alone && !pieces && a.zero == 0;  // plain DDP is not beside other axes
  std::vector<Field> fields = {
      {"data_parallel_replicate_degree", copies ? job.dp() : 1},
      {"data_parallel_shard_degree", copies ? 1 : job.dp()},
      {"fsdp_reshard_after_forward", pieces ? "always" : "never"},
      {"tensor_parallel_degree", job.tp()},
      {"pipeline_parallel_degree", a.pp()},
      {"expert_parallel_degree", a.stages[0].inside == Inside::experts ? a.stages[0].width() : 1}};
  if (!a.pipelined()) return fields;
  fields.push_back({"module_fqns_per_model_part", modules_of(a, old ? "output" : "lm_head")});
  fields.push_back({"pipeline_parallel_schedule", a.interleave > 1 ? "Interleaved1F1B" : "1F1B"});
  fields.push_back({"pipeline_parallel_schedule_csv", kSchedule});
  if (old)
    fields.push_back({"pipeline_parallel_microbatch_size", job.samples()});
  else
    fields.push_back({"num_pp_microbatches", job.micro_batches()});
  return fields;
}

}  // namespace

void write_torchtitan(const ExportJob& job, Exported* out) {
  const Arrangement& a = job.arrangement;
  const Sizes& s = job.need_sizes("torchtitan");
  const std::map<std::string, std::string> sizes = {
      {"hidden", std::to_string(s.hidden)}, {"layers", std::to_string(s.layers)},
      {"heads", std::to_string(s.heads)},   {"kv_heads", std::to_string(s.kv_heads)},
      {"vocab", std::to_string(s.vocab)},   {"ffn", std::to_string(s.ffn)},
      {"seq", std::to_string(s.seq)}};
  const int64_t local = job.samples() * (a.pipelined() ? job.micro_batches() : 1);
  const char* type = job.plan.precision == DType::f32 ? "float32" : "bfloat16";
  std::string text = fmt::format(
      "# Written by motley export: {}. torchtitan 0.2: bash launch.sh\n"
      "[job]\ndump_folder = \"./outputs\"\ndescription = {}\n\n[experimental]\ncustom_import = "
      "\"motley_model\"\n\n[model]\nname = \"llama3\"\nflavor = \"motley\"\n\n[training]\n"
      "local_batch_size = {}\nglobal_batch_size = {}\nseq_len = {}\nsteps = 1000\n"
      "mixed_precision_param = \"{}\"\nmixed_precision_reduce = \"float32\"\n\n"
      "[activation_checkpoint]\nmode = \"{}\"\n\n[parallelism]\n",
      planner::to_string(a), toml(job.plan.model), local, a.batch(), s.seq, type,
      a.stages[0].recompute ? "full" : "none");
  for (const Field& field : parallelism_of(job, true))
    text += fmt::format("{} = {}\n", field.name, toml(field.value));
  out->files.push_back({kFile, text});
  out->files.push_back({"motley_model.py", filled(kModel, sizes)});
  std::map<std::string, std::string> values = sizes;
  for (const Field& field : parallelism_of(job, false))
    values["parallelism"] += fmt::format("    {}={},\n", field.name, field.value.dump());
  values["tokens"] = std::to_string(job.samples() * s.seq);
  values["step_tokens"] = std::to_string(a.batch() * s.seq);
  values["checkpoint"] = a.stages[0].recompute ? "FullAC.Config()" : "None";
  out->files.push_back({"recipe.py", filled(kRecipe, values)});
  if (a.pipelined()) out->files.push_back({kSchedule, csv_of(job)});
  out->files.push_back(launch_script(job, "-m torchtitan.train --job.config_file train.toml", "",
                                     "export PYTHONPATH=\"$PWD:${PYTHONPATH:-}\"\n"));
  if (s.positions > 0 || !s.gated || !s.rms_norm || s.tied || s.bias || s.experts > 0)
    out->differences.push_back(
        "torchtitan has Llama of these sizes, not the model itself: take its module with the same "
        "layers in the place of motley_model.py");
  if (a.zero == 0 && a.replicas() > 1 && (a.pipelined() || job.tp() > 1))
    out->differences.push_back(
        "beside stages or tensors torchtitan's replicas divide optimizer state and gradients "
        "(FSDP2), "
        "which the plan's hold whole");
  if (job.plan.precision == DType::f16)
    out->differences.push_back("torchtitan has no fp16; the file says bfloat16");
}

namespace {

// Keys of a TOML file of one value a line, "section.key"; values as JSON, which those written are.
std::map<std::string, Json> read_toml(const ExportDirectory& directory) {
  std::map<std::string, Json> values;
  std::string text = directory.text(kFile), section;
  int number = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    std::string line = text.substr(at, end - at);
    at = end + 1;
    ++number;
    while (!line.empty() && std::isspace(static_cast<unsigned char>(line.back()))) line.pop_back();
    if (line.empty() || line[0] == '#') continue;
    if (line[0] == '[' && line.back() == ']' && line.find('=') == std::string::npos) {
      section = line.substr(1, line.size() - 2);
      continue;
    }
    const size_t equals = line.find('=');
    const std::string where = fmt::format("{} line {}", directory.name(kFile), number);
    if (equals == std::string::npos)
      throw user_error("import", "{}: '{}' is no `key = value`", where, line.substr(0, 40));
    std::string key = line.substr(0, equals);
    while (!key.empty() && key.back() == ' ') key.pop_back();
    if (!values.emplace(section + "." + key, parse_json(line.substr(equals + 1), where)).second)
      throw user_error("import", "{}: {} is given twice", where, key);
  }
  return values;
}

// Warm-up passes of every stage; throws where rows are not what a stage can do.
std::vector<int> read_csv(const ImportJob& job, int pp, int interleave, int micro_batches) {
  const std::string where = job.directory.name(kSchedule), text = job.directory.text(kSchedule);
  const int stages = pp * interleave;
  std::vector<int> warm_up(stages, 0);
  std::vector<std::vector<int>> done(2, std::vector<int>(stages, 0));
  int rows = 0;
  for (size_t at = 0; at < text.size(); ++rows) {
    const size_t end = std::min(text.find('\n', at), text.size());
    const std::string line = text.substr(at, end - at);
    at = end + 1;
    if (line.empty()) {
      --rows;
      continue;
    }
    bool turned = false;
    int passes = 0;
    for (size_t from = 0; from <= line.size();) {
      const size_t comma = std::min(line.find(',', from), line.size());
      const std::string cell = line.substr(from, comma - from);
      from = comma + 1;
      if (cell.empty()) continue;
      const size_t letter = cell.find_first_of("FB");
      if (letter == std::string::npos)
        throw user_error("import", "{}: row {}: '{}' is no pass; give e.g. 0F2 or 0B2", where, rows,
                         cell.substr(0, 20));
      const auto stage = number_in(cell.substr(0, letter), where, 0, stages - 1);
      const auto batch = number_in(cell.substr(letter + 1), where, 0, micro_batches - 1);
      const bool backward = cell[letter] == 'B';
      if (stage % pp != rows)
        throw user_error("import", "{}: row {} has a pass of stage {}", where, rows, stage);
      if (int& next = done[backward][stage]; batch != next++)
        throw user_error("import", "{}: row {}: {} is out of order", where, rows, cell);
      if (backward && done[1][stage] > done[0][stage])
        throw user_error("import", "{}: row {}: {} comes before its forward pass", where, rows,
                         cell);
      turned = turned || backward;
      if (!turned) ++passes;
    }
    for (int s = rows; s < stages && rows < pp; s += pp) warm_up[s] = passes;
  }
  if (rows != pp)
    throw user_error("import", "{} has {} rows; there are {} stages", where, rows, pp);
  for (int s = 0; s < stages; ++s)
    if (done[0][s] != micro_batches || done[1][s] != micro_batches)
      throw user_error("import", "{}: stage {} takes {} forward and {} backward passes of {}",
                       where, s, done[0][s], done[1][s], micro_batches);
  return warm_up;
}

}  // namespace

Arrangement read_torchtitan(const ImportJob& job) {
  const std::string file = job.directory.name(kFile);
  const std::map<std::string, Json> values = read_toml(job.directory);
  const auto number = [&](const std::string& key, int64_t otherwise) -> int64_t {
    const auto it = values.find(key);
    if (it == values.end()) return otherwise;
    return number_in(it->second.dump(), file + ": " + key, 1);
  };
  const auto word = [&](const std::string& key, const char* otherwise) -> std::string {
    const auto it = values.find(key);
    return it != values.end() && it->second.is_string() ? it->second.get<std::string>() : otherwise;
  };
  Degrees d;
  d.tp = static_cast<int>(number("parallelism.tensor_parallel_degree", 1));
  d.pp = static_cast<int>(number("parallelism.pipeline_parallel_degree", 1));
  d.ep = static_cast<int>(number("parallelism.expert_parallel_degree", 1));
  const int64_t copies = number("parallelism.data_parallel_replicate_degree", 1),
                shards = number("parallelism.data_parallel_shard_degree", 1);
  if (copies > 1 && shards > 1)
    throw user_error("import",
                     "{}: data_parallel_replicate_degree {} and _shard_degree {}; motley "
                     "has one of both",
                     file, copies, shards);
  d.dp = static_cast<int>(std::max(copies, shards));
  const bool whole = word("parallelism.fsdp_reshard_after_forward", "default") == "always";
  d.pieces = shards > 1 && whole && d.pp == 1 && d.tp == 1;
  d.zero = shards > 1 && !d.pieces ? 1 : 0;
  d.recompute = word("activation_checkpoint.mode", "none") == "full";
  const int64_t local = number("training.local_batch_size", 8),
                global = number("training.global_batch_size", local * d.dp);
  same(file + ": training.global_batch_size", global, job.batch, "the batch");
  if (job.sizes)
    same(file + ": training.seq_len", number("training.seq_len", job.sizes->seq), job.sizes->seq,
         "the model's");
  d.micro_batch = d.pp > 1 ? number("parallelism.pipeline_parallel_microbatch_size", 1) : local;
  if (d.pp > 1 && (local % d.micro_batch != 0 || local * d.dp != global))
    throw user_error("import",
                     "{}: local_batch_size {} x {} replicas in micro-batches of {} is not "
                     "the batch of {}",
                     file, local, d.dp, d.micro_batch, global);
  if (global % (d.micro_batch * d.dp) != 0)
    throw user_error("import", "{}: local_batch_size {} x {} replicas does not divide {}", file,
                     d.micro_batch, d.dp, global);
  d.micro_batches = static_cast<int>(global / d.micro_batch / d.dp);
  if (d.pp == 1) {
    d.blocks = {planner::count_blocks(job.graph)};
    return rectangle(job, d, file);
  }
  const auto parts = values.find("parallelism.module_fqns_per_model_part");
  if (parts == values.end() || !parts->second.is_array() || parts->second.size() % d.pp != 0)
    throw user_error("import", "{}: module_fqns_per_model_part has no list for each of {} stages",
                     file, d.pp);
  d.interleave = static_cast<int>(parts->second.size()) / d.pp;
  int layer = 0;
  for (const Json& part : parts->second) {
    d.blocks.push_back(0);
    if (!part.is_array())
      throw user_error("import", "{}: module_fqns_per_model_part holds {}", file, part.dump());
    for (const Json& name : part) {
      const std::string text = name.is_string() ? name.get<std::string>() : name.dump();
      if (!text.starts_with("layers.")) continue;
      same(file + ": module_fqns_per_model_part: " + text.substr(0, 40),
           number_in(text.substr(7), file, 0), layer++, "the next layer");
      ++d.blocks.back();
    }
  }
  Arrangement a = rectangle(job, d, file);
  const std::string csv = word("parallelism.pipeline_parallel_schedule_csv", "");
  if (csv.empty()) return a;
  const std::vector<int> warm_up = read_csv(job, d.pp, d.interleave, d.micro_batches);
  for (size_t s = 0; s < a.stages.size() && d.interleave == 1; ++s) {
    if (warm_up[s] != a.stages[s].warm_up) a.schedule.clear();
    a.stages[s].warm_up = warm_up[s];
  }
  return a;
}

}  // namespace motley::exports
