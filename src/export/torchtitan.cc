// torchtitan: a TOML file for 0.2, a Python recipe of the same numbers for 0.3, and the schedule as
// the CSV that torch.distributed.pipelining loads.
//
// A row of the CSV is a stage's rank, a cell what it does at that time: "0F2" is the forward pass of
// micro-batch 2 in stage 0, "0B2" the backward pass, an empty cell nothing. So warm-up passes of any
// number can be said.
#include <algorithm>
#include <initializer_list>
#include <map>
#include <set>

#include "core/error.h"
#include "export/common.h"

namespace motley::exports {

using planner::Arrangement;
using planner::Inside;

namespace {

constexpr const char* kFile = "train.toml";
constexpr const char* kSchedule = "schedule.csv";
// The head's module, in 0.2 and in 0.3.
constexpr const char *kOldHead = "output", *kNewHead = "lm_head";

// Modules of every stage.
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
    R"py("""The plan's sizes (model.json) as a flavor of torchtitan 0.2's Llama 3; train.toml imports this."""
import json
import pathlib

from torchtitan.models.llama3 import TransformerModelArgs, llama3_args

SIZES = json.loads((pathlib.Path(__file__).resolve().parent / "model.json").read_text())

llama3_args["motley"] = TransformerModelArgs(
    dim=SIZES["hidden"], n_layers=SIZES["layers"], n_heads=SIZES["heads"], n_kv_heads=SIZES["kv_heads"], vocab_size=SIZES["vocab"],
    multiple_of=1, ffn_dim_multiplier=(SIZES["ffn"] + 0.5) / int(8 * SIZES["hidden"] / 3), max_seq_len=SIZES["seq"], rope_theta=10000)
)py";

const char* kRecipeFile = "recipe.py";
const char* kRecipe =
    R"py("""The plan for torchtitan 0.3: bash launch-0.3.sh, which gives --module recipe --config motley. For 0.2 there is train.toml.
Text and tokenizer are torchtitan's own for tests, from its checkout; put yours in their place."""
import json
import pathlib
from functools import partial

from torch import nn
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.config_utils import get_attention_config, make_ffn_config, make_gqa_config
from torchtitan.models.llama3 import Llama3Model, parallelize_llama
from torchtitan.models.llama3.model import Llama3TransformerBlock
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

SIZES = json.loads((pathlib.Path(__file__).resolve().parent / "model.json").read_text())
RECOMPUTE = {recompute}
PARALLELISM = dict(
{parallelism})
TRAINING = dict(
{training})


def model():
    """A Llama of the plan's sizes."""
    dim, heads, vocab = SIZES["hidden"], SIZES["heads"], SIZES["vocab"]
    random = {"weight": partial(nn.init.trunc_normal_, std=0.02), "bias": nn.init.zeros_}
    norm = RMSNorm.Config(normalized_shape=dim, param_init={"weight": nn.init.ones_})
    rope = ComplexRoPE.Config(dim=dim // heads, max_seq_len=SIZES["seq"], theta=10000)
    layers = [Llama3TransformerBlock.Config(
        attention_norm=norm, ffn_norm=norm,
        attention=make_gqa_config(dim=dim, n_heads=heads, n_kv_heads=SIZES["kv_heads"], wqkv_param_init=random, wo_param_init=random,
                                  inner_attention=get_attention_config("flex"), rope=rope),
        feed_forward=make_ffn_config(dim=dim, hidden_dim=SIZES["ffn"], w1_param_init=random, w2w3_param_init=random))
        for _ in range(SIZES["layers"])]
    config = Llama3Model.Config(
        dim=dim, vocab_size=vocab, norm=norm, layers=layers,
        tok_embeddings=Embedding.Config(num_embeddings=vocab, embedding_dim=dim, param_init={"weight": partial(nn.init.normal_, std=0.02)}),
        lm_head=Linear.Config(in_features=dim, out_features=vocab, param_init=random))
    return ModelSpec(name="llama3", flavor="motley", model=config, parallelize_fn=parallelize_llama, pipelining_fn=pipeline_llm,
                     post_optimizer_build_fn=None, state_dict_adapter=Llama3StateDictAdapter)


def motley():
    return Trainer.Config(
        model_spec=model(), loss=CrossEntropyLoss.Config(global_vocab_size=SIZES["vocab"]), optimizer=default_adamw(lr=8e-4),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4_test"), training=TrainingConfig(**TRAINING),
        parallelism=ParallelismConfig(**PARALLELISM), activation_checkpoint=FullAC.Config() if RECOMPUTE else None)
)py";

std::string toml(const Json& value) { return value.dump(); }

struct Field {
  std::string name;
  Json value;
};

// The same fields in both files.
std::vector<Field> parallelism_of(const ExportJob& job, const char* head) {
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
  fields.push_back({"module_fqns_per_model_part", modules_of(a, head)});
  fields.push_back({"pipeline_parallel_schedule", a.interleave > 1 ? "Interleaved1F1B" : "1F1B"});
  fields.push_back({"pipeline_parallel_schedule_csv", kSchedule});
  fields.push_back({"pipeline_parallel_microbatch_size", job.samples()});
  return fields;
}

const char* type_name(DType precision) { return precision == DType::f32 ? "float32" : "bfloat16"; }

std::vector<Field> training_of(const ExportJob& job) {
  const Arrangement& a = job.arrangement;
  return {{"local_batch_size", job.samples() * (a.pipelined() ? job.micro_batches() : 1)},
          {"global_batch_size", a.batch()},
          {"seq_len", job.sizes->seq},
          {"steps", 1000},
          {"mixed_precision_param", type_name(job.plan.precision)},
          {"mixed_precision_reduce", "float32"}};
}

std::string recipe_of(const ExportJob& job) {
  std::map<std::string, std::string> values;
  const auto add = [&](const char* where, const Field& field) {
    values[where] += fmt::format("    {}={},\n", field.name, field.value.dump());
  };
  for (const Field& field : parallelism_of(job, kNewHead)) add("parallelism", field);
  for (const Field& field : training_of(job)) add("training", field);
  // 0.3 refuses graphs of CUDA beside stages, and beside experts that are divided.
  values["training"] += "    disable_cuda_graphs=True,\n";
  values["recompute"] = job.arrangement.stages[0].recompute ? "True" : "False";
  return filled(kRecipe, values);
}

}  // namespace

void write_torchtitan(const ExportJob& job, Exported* out) {
  const Arrangement& a = job.arrangement;
  const Sizes& s = job.need_sizes("torchtitan");
  std::string text = fmt::format(
      "# Written by motley export: {}. torchtitan 0.2: bash launch.sh\n"
      "[job]\ndump_folder = \"./outputs\"\ndescription = {}\n\n[experimental]\ncustom_import = "
      "\"motley_model\"\n\n[model]\nname = \"llama3\"\nflavor = \"motley\"\n\n[training]\n",
      planner::to_string(a), toml(job.plan.model));
  for (const Field& field : training_of(job))
    text += fmt::format("{} = {}\n", field.name, toml(field.value));
  text += fmt::format("\n[activation_checkpoint]\nmode = \"{}\"\n\n[parallelism]\n",
                      a.stages[0].recompute ? "full" : "none");
  for (const Field& field : parallelism_of(job, kOldHead))
    text += fmt::format("{} = {}\n", field.name, toml(field.value));
  out->files.push_back({kFile, text});
  out->files.push_back({kModelSizes, to_json(s).dump(2) + "\n"});
  out->files.push_back({"motley_model.py", kModel});
  out->files.push_back({kRecipeFile, recipe_of(job)});
  if (a.pipelined()) out->files.push_back({kSchedule, csv_of(job)});
  const char* path = "export PYTHONPATH=\"$PWD:${PYTHONPATH:-}\"\n";
  out->files.push_back(
      launch_script(job, "-m torchtitan.train --job.config_file train.toml", "", path));
  out->files.push_back(launch_script(job, "-m torchtitan.train --module recipe --config motley", "",
                                     path, "launch-0.3.sh"));
  if (s.positions > 0 || !s.gated || !s.rms_norm || s.tied || s.bias || s.experts > 0)
    out->differences.push_back(
        "torchtitan has Llama of these sizes, not the model itself: take its module with the same "
        "layers in the place of motley_model.py and of model() in recipe.py");
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
      const std::string place = fmt::format("{}: row {}: {}", where, rows, cell.substr(0, 20));
      const auto stage = number_in(cell.substr(0, letter), place, 0, stages - 1);
      const auto batch = number_in(cell.substr(letter + 1), place, 0, micro_batches - 1);
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

// The TOML file with its rules.
class TrainFile {
 public:
  explicit TrainFile(const ImportJob& job)
      : job_(job), file_(job.directory.name(kFile)), values_(read_toml(job.directory)) {
    static const std::set<std::string> known = {"context_parallel_load_balancer",
                                                "context_parallel_rotate_method",
                                                "data_parallel_replicate_degree",
                                                "data_parallel_shard_degree",
                                                "disable_loss_parallel",
                                                "enable_async_tensor_parallel",
                                                "expert_parallel_comm_backend",
                                                "expert_parallel_degree",
                                                "fsdp_reshard_after_forward",
                                                "module_fqns_per_model_part",
                                                "pipeline_parallel_degree",
                                                "pipeline_parallel_expert_parallel_overlap",
                                                "pipeline_parallel_first_stage_less_layers",
                                                "pipeline_parallel_last_stage_less_layers",
                                                "pipeline_parallel_microbatch_size",
                                                "pipeline_parallel_schedule",
                                                "pipeline_parallel_schedule_csv",
                                                "tensor_parallel_degree"};
    for (const auto& [key, value] : values_) {
      if (!key.starts_with("parallelism.")) continue;
      const std::string name = key.substr(12);
      if (name == "context_parallel_degree" || name == "expert_tensor_parallel_degree")
        same(at(key), number(key, 1), 1, "which alone plans of motley have");
      else if (!known.contains(name))
        throw user_error("import", "{} is no field that motley reads; leave it out", at(key));
    }
  }
  std::string at(const std::string& key) const { return file_ + ": " + key; }
  const Json* find(const std::string& key) const {
    const auto it = values_.find(key);
    return it == values_.end() ? nullptr : &it->second;
  }
  int64_t number(const std::string& key, int64_t otherwise) const {
    const Json* value = find(key);
    return value ? number_in(value->dump(), at(key), 1) : otherwise;
  }
  std::string word(const std::string& key, const char* otherwise) const {
    const Json* value = find(key);
    return value && value->is_string() ? value->get<std::string>() : otherwise;
  }
  // One of `words`.
  std::string word_of(const std::string& key, const char* otherwise,
                      std::initializer_list<const char*> words) const {
    const std::string text = word(key, otherwise);
    if (std::none_of(words.begin(), words.end(), [&](const char* w) { return text == w; }))
      throw user_error("import", "{} is '{}'; give {}", at(key), text.substr(0, 40),
                       fmt::join(words, " or "));
    return text;
  }

  // Model and precision are the plan's.
  void check_model_and_types() const {
    if (job_.sizes)
      same(at("training.seq_len"), number("training.seq_len", 2048), job_.sizes->seq,
           "the model's");
    if (word("model.flavor", "") == "motley")
      same_word(at("model.name"), word("model.name", "llama3"), "llama3",
                "to which motley_model.py adds the flavor");
    const char* const param = "training.mixed_precision_param";
    same_word(at(param), word(param, "bfloat16"), type_name(job_.precision), "the plan's");
    const char* const reduce = "training.mixed_precision_reduce";
    same_word(at(reduce), word(reduce, "float32"), "float32", "which alone torchtitan has");
    check_model(job_);
  }

  // Parts of the model and the layers of each.
  std::vector<int> blocks(int pp) const {
    const char* const key = "parallelism.module_fqns_per_model_part";
    const Json* parts = find(key);
    if (!parts || !parts->is_array() || parts->empty() || parts->size() % pp != 0)
      throw user_error("import", "{} has no list for each of {} stages", at(key), pp);
    std::vector<int> blocks;
    std::vector<std::string> others;
    int layer = 0;
    for (const Json& part : *parts) {
      blocks.push_back(0);
      if (!part.is_array())
        throw user_error("import", "{} holds {}", at(key), part.dump().substr(0, 40));
      for (const Json& name : part) {
        const std::string text = name.is_string() ? name.get<std::string>() : name.dump();
        if (!text.starts_with("layers.")) {
          others.push_back(fmt::format("{} {}", blocks.size(), text.substr(0, 40)));
          continue;
        }
        same(at(key) + ": " + text.substr(0, 40), number_in(text.substr(7), at(key), 0), layer++,
             "the next layer");
        ++blocks.back();
      }
    }
    const std::vector<std::string> wanted = {"1 tok_embeddings",
                                             fmt::format("{} norm", blocks.size()),
                                             fmt::format("{} {}", blocks.size(), kOldHead)};
    if (others != wanted)
      throw user_error("import",
                       "{} has besides layers {}; give tok_embeddings in the first, norm and {} in "
                       "the last",
                       at(key), fmt::join(others, ", "), kOldHead);
    return blocks;
  }

  // The recipe says the same, if there is one: `name=value,` in its two tables.
  void check_recipe(bool recompute) const {
    if (!job_.directory.has(kRecipeFile)) return;
    const std::string file = job_.directory.name(kRecipeFile),
                      text = job_.directory.text(kRecipeFile);
    const auto differs = [&](const std::string& name, const std::string& value,
                             const std::string& wanted) {
      return user_error("import", "{}: {} is {}, in {} {}; give both the same, or leave one out",
                        file, name, value.substr(0, 60), kFile, wanted.substr(0, 60));
    };
    const std::pair<const char*, std::string> tables[] = {
        {"parallelism", "\nPARALLELISM = dict(\n"}, {"training", "\nTRAINING = dict(\n"}};
    for (const auto& [section, mark] : tables) {
      size_t line = text.find(mark);
      if (line == std::string::npos)
        throw user_error("import", "{}: {} is missing; leave the file out or export it again", file,
                         mark.substr(1, mark.find(' ') - 1));
      for (line += mark.size(); text.compare(line, 4, "    ") == 0;) {
        const size_t end = std::min(text.find('\n', line), text.size());
        const std::string field = text.substr(line + 4, end - line - 4);
        line = end + 1;
        const size_t equals = field.find('=');
        if (equals == std::string::npos || !field.ends_with(",")) continue;
        const std::string name = field.substr(0, equals),
                          value = field.substr(equals + 1, field.size() - equals - 2);
        if (name == "steps" || name == "disable_cuda_graphs") continue;
        const Json* other = find(fmt::format("{}.{}", section, name));
        if (!other) throw differs(name, value, "missing");
        std::string wanted = other->dump();
        if (name == "module_fqns_per_model_part")
          if (const size_t head = wanted.rfind(kOldHead); head != std::string::npos)
            wanted.replace(head, std::string(kOldHead).size(), kNewHead);
        if (value != wanted) throw differs(name, value, wanted);
      }
    }
    if (text.find(recompute ? "\nRECOMPUTE = True\n" : "\nRECOMPUTE = False\n") ==
        std::string::npos)
      throw differs("RECOMPUTE", recompute ? "not True" : "not False",
                    recompute ? "mode = \"full\"" : "mode = \"none\"");
  }

 private:
  const ImportJob& job_;
  std::string file_;
  std::map<std::string, Json> values_;
};

Degrees degrees_of(const TrainFile& train, const ImportJob& job, const std::string& file) {
  Degrees d;
  d.tp = static_cast<int>(train.number("parallelism.tensor_parallel_degree", 1));
  d.pp = static_cast<int>(train.number("parallelism.pipeline_parallel_degree", 1));
  d.ep = static_cast<int>(train.number("parallelism.expert_parallel_degree", 1));
  const int64_t copies = train.number("parallelism.data_parallel_replicate_degree", 1),
                shards = train.number("parallelism.data_parallel_shard_degree", 1);
  if (copies > 1 && shards > 1)
    throw user_error("import",
                     "{}: data_parallel_replicate_degree {} and _shard_degree {}; motley "
                     "has one of both",
                     file, copies, shards);
  d.dp = static_cast<int>(std::max(copies, shards));
  const bool whole = train.word_of("parallelism.fsdp_reshard_after_forward", "default",
                                   {"default", "always", "never"}) == "always";
  d.pieces = shards > 1 && whole && d.pp == 1 && d.tp == 1;
  d.zero = shards > 1 && !d.pieces ? 1 : 0;
  d.recompute =
      train.word_of("activation_checkpoint.mode", "selective", {"full", "none"}) == "full";
  const int64_t local = train.number("training.local_batch_size", 8),
                global = train.number("training.global_batch_size", local * d.dp);
  same(train.at("training.global_batch_size"), global, job.batch, "the batch");
  d.micro_batch =
      d.pp > 1 ? train.number("parallelism.pipeline_parallel_microbatch_size", 1) : local;
  if (d.pp > 1 && (local % d.micro_batch != 0 || local * d.dp != global))
    throw user_error("import",
                     "{}: local_batch_size {} x {} replicas in micro-batches of {} is not "
                     "the batch of {}",
                     file, local, d.dp, d.micro_batch, global);
  if (global % (d.micro_batch * d.dp) != 0)
    throw user_error("import", "{}: local_batch_size {} x {} replicas does not divide {}", file,
                     d.micro_batch, d.dp, global);
  d.micro_batches = static_cast<int>(global / d.micro_batch / d.dp);
  return d;
}

}  // namespace

Arrangement read_torchtitan(const ImportJob& job) {
  const std::string file = job.directory.name(kFile);
  const TrainFile train(job);
  train.check_model_and_types();
  Degrees d = degrees_of(train, job, file);
  train.check_recipe(d.recompute);
  if (d.pp == 1) {
    d.blocks = {planner::count_blocks(job.graph)};
    return rectangle(job, d, file);
  }
  d.blocks = train.blocks(d.pp);
  d.interleave = static_cast<int>(d.blocks.size()) / d.pp;
  const char* const schedule = "parallelism.pipeline_parallel_schedule";
  same_word(train.at(schedule), train.word(schedule, "1F1B"),
            d.interleave > 1 ? "Interleaved1F1B" : "1F1B",
            fmt::format("of {} stages a device", d.interleave));
  Arrangement a = rectangle(job, d, file);
  const char* const csv_key = "parallelism.pipeline_parallel_schedule_csv";
  const std::string csv = train.word(csv_key, "");
  if (csv.empty()) return a;
  same_word(train.at(csv_key), csv, kSchedule, "the file that motley reads");
  const std::vector<int> warm_up = read_csv(job, d.pp, d.interleave, d.micro_batches);
  for (size_t s = 0; s < a.stages.size() && d.interleave == 1; ++s) {
    if (warm_up[s] != a.stages[s].warm_up) a.schedule.clear();
    a.stages[s].warm_up = warm_up[s];
  }
  return a;
}

}  // namespace motley::exports
