// Galvatron-2: the plan as JSON, read by hybrid_parallel_config.py through galvatron_config_path. Of
// every layer a number, in strings.
#include <algorithm>
#include <map>
#include <numeric>

#include "core/error.h"
#include "export/common.h"

namespace motley::exports {

using planner::ArrangedStage;
using planner::Arrangement;
using planner::Inside;

namespace {

constexpr const char* kFile = "galvatron_config.json";
constexpr const char* kArguments = "arguments.txt";

std::vector<int64_t> numbers_in(const Json& json, const char* key, const std::string& file) {
  const auto it = json.find(key);
  if (it == json.end() || !it->is_string())
    throw user_error("import", "{}: {} is no string of numbers", file, key);
  const std::string text = it->get<std::string>();
  std::vector<int64_t> numbers;
  for (size_t at = 0; at <= text.size();) {
    const size_t comma = std::min(text.find(',', at), text.size());
    numbers.push_back(number_in(text.substr(at, comma - at), file + ": " + key, 0, 1 << 20));
    at = comma + 1;
  }
  return numbers;
}

}  // namespace

void write_galvatron(const ExportJob& job, Exported* out) {
  const Arrangement& a = job.arrangement;
  std::vector<int> tp, consecutive, types, again, blocks, zeros, ones;
  const bool pieces = a.stages[0].inside == Inside::pieces;
  for (const ArrangedStage& s : a.stages) {
    blocks.push_back(s.blocks);
    for (int k = 0; k < s.blocks; ++k) {
      tp.push_back(s.tp());
      consecutive.push_back(1);
      types.push_back(pieces ? 1 : 0);
      again.push_back(s.recompute ? 1 : 0);
      zeros.push_back(0);
      ones.push_back(1);
    }
  }
  const auto list = [](const std::vector<int>& v) { return fmt::format("{}", fmt::join(v, ",")); };
  const char* data = a.zero == 2 ? "zero2" : "ddp";
  const Json json = {{"pp_deg", a.pp()},
                     {"tp_sizes_enc", list(tp)},
                     {"tp_consecutive_flags", list(consecutive)},
                     {"cp_sizes_enc", list(ones)},
                     {"dp_types_enc", list(types)},
                     {"use_sp", list(zeros)},
                     {"checkpoint", list(again)},
                     {"global_bsz", a.batch()},
                     {"chunks", job.micro_batches()},
                     {"pp_division", list(blocks)},
                     {"pipeline_type", "pipedream_flush"},
                     {"default_dp_type", data},
                     {"vtp", job.tp()},
                     {"vsp", 0},
                     {"vcp", 1},
                     {"embed_sdp", pieces ? 1 : 0},
                     {"vocab_sdp", pieces ? 1 : 0}};
  out->files.push_back({kFile, json.dump(2) + "\n"});
  std::string arguments =
      "--galvatron_config_path\ngalvatron_config.json\n--set_model_config_manually\n1\n";
  const Sizes& s = job.need_sizes("Galvatron");
  arguments += fmt::format(
      "--num_hidden_layers\n{}\n--hidden_size\n{}\n--num_attention_heads\n{}\n--seq_length\n{}\n"
      "--vocab_size\n{}\n--mixed_precision\n{}\n",
      s.layers, s.hidden, s.heads, s.seq, s.vocab, precision_name(job.plan.precision));
  out->files.push_back({kArguments, arguments});
  out->files.push_back(launch_script(job, "\"${TRAINER:-train_dist.py}\"", kArguments));
  if (a.zero == 1)
    out->differences.push_back(
        "Galvatron divides optimizer state only with gradients (zero2); the file "
        "says ddp, which holds both whole");
  if (s.experts > 0)
    out->differences.push_back("the file divides no experts: they are cut as other matrices are");
}

namespace {

// Options of the trainer, one word a line, which say the model's sizes.
void check_arguments(const ImportJob& job) {
  if (!job.directory.has(kArguments)) return;
  const std::string file = job.directory.name(kArguments), text = job.directory.text(kArguments);
  std::map<std::string, std::string> words;
  std::string name;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    const std::string word = text.substr(at, end - at);
    at = end + 1;
    if (word.starts_with("--"))
      words[name = word] = "";
    else
      words[name] += word;
  }
  const auto check = [&](const char* option, const std::string& wanted) {
    const auto it = words.find(option);
    if (it == words.end()) throw user_error("import", "{}: {} is missing", file, option);
    same_word(file + ": " + option, it->second, wanted, "the plan's");
  };
  check("--mixed_precision", precision_name(job.precision));
  if (!job.sizes) return;
  const Sizes& s = *job.sizes;
  check("--set_model_config_manually", "1");
  const std::pair<const char*, int64_t> sizes[] = {{"--num_hidden_layers", s.layers},
                                                   {"--hidden_size", s.hidden},
                                                   {"--num_attention_heads", s.heads},
                                                   {"--seq_length", s.seq},
                                                   {"--vocab_size", s.vocab}};
  for (const auto& [option, wanted] : sizes) check(option, std::to_string(wanted));
}

}  // namespace

Arrangement read_galvatron(const ImportJob& job) {
  const std::string file = job.directory.name(kFile);
  const Json json = parse_json(job.directory.text(kFile), file);
  if (!json.is_object()) throw user_error("import", "{}: is no object", file);
  const auto number = [&](const char* key, int64_t least = 1) {
    const auto it = json.find(key);
    if (it == json.end()) throw user_error("import", "{}: {} is missing", file, key);
    return number_in(it->dump(), file + ": " + key, least, int64_t{1} << 31);
  };
  check_arguments(job);
  Degrees d;
  d.pp = static_cast<int>(number("pp_deg"));
  const int layers = planner::count_blocks(job.graph);
  const auto of_layers = [&](const char* key, int64_t most) {
    const std::vector<int64_t> values = numbers_in(json, key, file);
    same(file + ": " + key + ": numbers", static_cast<int64_t>(values.size()), layers,
         "the model's layers");
    for (const int64_t v : values) {
      if (v > most)
        throw user_error("import", "{}: {} holds {}; give at most {}", file, key, v, most);
    }
    return values;
  };
  const std::vector<int64_t> tp = of_layers("tp_sizes_enc", 1 << 16),
                             types = of_layers("dp_types_enc", 1),
                             again = of_layers("checkpoint", 1),
                             flags = of_layers("tp_consecutive_flags", 1),
                             sp = of_layers("use_sp", 1), cp = of_layers("cp_sizes_enc", 1);
  for (int l = 0; l < layers; ++l) {
    if (tp[l] != tp[0] || types[l] != types[0])
      throw user_error("import",
                       "{}: layer {} is divided otherwise than layer 0, which no plan of "
                       "motley says of layers of a stage",
                       file, l);
    if (flags[l] != 1 || sp[l] != 0 || cp[l] != 1)
      throw user_error("import",
                       "{}: layer {}: tp_consecutive_flags {}, use_sp {}, cp_sizes_enc {}; "
                       "motley reads 1, 0 and 1",
                       file, l, flags[l], sp[l], cp[l]);
  }
  d.tp = static_cast<int>(std::max<int64_t>(1, tp[0]));
  if (tp[0] < 1) throw user_error("import", "{}: tp_sizes_enc holds 0", file);
  same(file + ": vtp", number("vtp"), d.tp, "as many as divide layers");
  same(file + ": vsp", number("vsp", 0), 0, "no sequence parallelism of Ulysses");
  same(file + ": vcp", number("vcp"), 1, "no context parallelism");
  for (const char* key : {"embed_sdp", "vocab_sdp"})
    same(file + ": " + key, number(key, 0), types[0], "as dp_types_enc");
  same(file + ": global_bsz", number("global_bsz"), job.batch, "the batch");
  for (const int64_t b : numbers_in(json, "pp_division", file))
    d.blocks.push_back(static_cast<int>(b));
  const auto world = static_cast<int64_t>(job.ranks.size());
  if (world % (int64_t{d.tp} * d.pp) != 0)
    throw user_error("import", "{}: {} stages x {} do not divide the {} ranks", file, d.pp, d.tp,
                     world);
  d.dp = static_cast<int>(world / d.tp / d.pp);
  d.micro_batches = static_cast<int>(number("chunks"));
  if (job.batch % (int64_t{d.micro_batches} * d.dp) != 0)
    throw user_error("import", "{}: {} chunks x {} replicas do not divide the batch of {}", file,
                     d.micro_batches, d.dp, job.batch);
  d.micro_batch = job.batch / d.micro_batches / d.dp;
  d.pieces = types[0] == 1 && d.dp > 1;
  const auto dp_type = json.find("default_dp_type");
  const std::string data =
      dp_type != json.end() && dp_type->is_string() ? dp_type->get<std::string>() : "";
  if (data != "ddp" && data != "zero2" && data != "zero3")
    throw user_error("import", "{}: default_dp_type is '{}'; give ddp, zero2 or zero3", file,
                     data.substr(0, 40));
  d.zero = data == "zero2" ? 2 : 0;
  Arrangement a = rectangle(job, d, file);
  int layer = 0;
  for (ArrangedStage& stage : a.stages) {
    for (int k = 0; k < stage.blocks; ++k, ++layer)
      if (again[layer] != again[layer - k])
        throw user_error("import", "{}: checkpoint of layer {} is {}, of the first of its stage {}",
                         file, layer, again[layer], again[layer - k]);
    if (stage.blocks > 0) stage.recompute = again[layer - 1] == 1;
  }
  return a;
}

}  // namespace motley::exports
