// Megatron-LM: arguments of pretrain_gpt.py, one word a line.
//
// Names, defaults and rules are those of Megatron-LM after core_v0.19.0 (arguments.py,
// pipeline_parallel_layer_layout.py); tests compare with a table of its options. Layers of stages are
// a layout: "Et*7|t*5L" is the embedding and 7 layers, then 5 layers and the loss; with interleaved
// stages part i is the (i / pp)-th of rank i % pp.
#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "core/error.h"
#include "export/common.h"

namespace motley::exports {

using planner::Arrangement;
using planner::Inside;

namespace {

constexpr const char* kFile = "arguments.txt";
constexpr const char* kTensors = "--tensor-model-parallel-size";
constexpr const char* kStages = "--pipeline-model-parallel-size";
constexpr const char* kLayout = "--pipeline-model-parallel-layout";
constexpr const char* kExperts = "--expert-model-parallel-size";
constexpr const char* kExpertTensors = "--expert-tensor-parallel-size";
constexpr size_t kMostParts = 4096;

std::string layout_of(const Arrangement& a) {
  std::string text = "E";
  for (size_t s = 0; s < a.stages.size(); ++s) {
    if (s > 0) text += "|";
    if (a.stages[s].blocks > 0) text += fmt::format("t*{}", a.stages[s].blocks);
  }
  return text + "L";
}

bool scatters_activations(const Plan& plan) {
  if (!plan.pipeline) return false;
  for (int s = 0; s < plan.pipeline->stages(); ++s) {
    const Theory& theory = plan.pipeline->theory(s);
    const std::vector<bool>& gradient = theory.pure_gradients();
    for (const Step& step : plan.pipeline->replicas[0].stages[s].program.steps)
      if (!step.is_compute() && step.kind == Collective::reduce_scatter &&
          !gradient[step.value.index])
        return true;
  }
  return false;
}

// Which layers have experts, "1" if all of them do.
std::string layer_pattern(const Sizes& s) {
  if (std::all_of(s.routed.begin(), s.routed.end(), [](bool r) { return r; })) return "1";
  const std::vector<int> pattern(s.routed.begin(), s.routed.end());
  return fmt::format("[{}]", fmt::join(pattern, ","));
}

class Arguments {
 public:
  void add(const std::string& name) { words_ += name + "\n"; }
  template <typename T>
  void add(const std::string& name, const T& value) {
    words_ += fmt::format("{}\n{}\n", name, value);
  }
  const std::string& text() const { return words_; }

 private:
  std::string words_;
};

void add_model_arguments(const ExportJob& job, Arguments* out, Exported* exported) {
  const Sizes& s = job.need_sizes("Megatron-LM");
  out->add("--num-layers", s.layers);
  out->add("--hidden-size", s.hidden);
  out->add("--ffn-hidden-size", s.ffn);
  out->add("--num-attention-heads", s.heads);
  if (s.kv_heads != s.heads) {
    out->add("--group-query-attention");
    out->add("--num-query-groups", s.kv_heads);
  }
  out->add("--seq-length", s.seq);
  out->add("--max-position-embeddings", std::max(s.seq, s.positions));
  out->add("--vocab-size", s.vocab);
  out->add("--tokenizer-type", "NullTokenizer");
  out->add("--mock-data");
  out->add("--position-embedding-type", s.positions > 0 ? "learned_absolute" : "rope");
  out->add("--normalization", s.rms_norm ? "RMSNorm" : "LayerNorm");
  if (s.gated) out->add("--swiglu");
  if (!s.bias) out->add("--disable-bias-linear");
  if (!s.tied) out->add("--untie-embeddings-and-output-weights");
  out->add("--attention-dropout", s.dropout);
  out->add("--hidden-dropout", s.dropout);
  if (!s.causal)
    exported->differences.push_back(
        "the model's attention is not causal, that of pretrain_gpt.py is: with pretrain_bert.py "
        "the "
        "same arguments hold");
  if (s.experts == 0) return;
  out->add("--num-experts", s.experts);
  if (s.top > 0) out->add("--moe-router-topk", s.top);
  out->add("--moe-ffn-hidden-size", s.ffn);
  out->add("--moe-token-dispatcher-type", "alltoall");
  if (const std::string pattern = layer_pattern(s); pattern != layer_pattern({}))
    out->add("--moe-layer-freq", pattern);
}

}  // namespace

void write_megatron(const ExportJob& job, Exported* out) {
  const Arrangement& a = job.arrangement;
  Arguments words;
  add_model_arguments(job, &words, out);
  words.add("--micro-batch-size", job.samples());
  words.add("--global-batch-size", a.batch());
  words.add("--train-iters", 1000);
  words.add("--lr", "1e-4");
  words.add("--eval-iters", 0);
  words.add("--optimizer", job.plan.optimizer.kind == Optimizer::sgd ? "sgd" : "adam");
  if (job.plan.precision == DType::bf16) words.add("--bf16");
  if (job.plan.precision == DType::f16) words.add("--fp16");
  words.add("--no-gradient-accumulation-fusion");
  words.add(kTensors, job.tp());
  words.add(kStages, a.pp());
  if (a.pipelined()) words.add(kLayout, layout_of(a));
  if (a.stages[0].inside == Inside::experts && a.stages[0].width() > 1)
    words.add(kExperts, a.stages[0].width());
  const bool moe = job.sizes->experts > 0;
  if (job.tp() > 1 && (moe || scatters_activations(job.plan))) words.add("--sequence-parallel");
  if (a.zero == 1) words.add("--use-distributed-optimizer");
  if (!job.plan.pipeline && job.dp() > 1) words.add("--overlap-grad-reduce");
  if (a.stages[0].recompute) {
    words.add("--recompute-granularity", "full");
    words.add("--recompute-method", "uniform");
    words.add("--recompute-num-layers", 1);
  }
  if (job.replicas_outside) words.add("--use-tp-pp-dp-mapping");
  out->files.push_back({kFile, words.text()});
  out->files.push_back(launch_script(job, "\"${MEGATRON:-.}/pretrain_gpt.py\"", kFile,
                                     "export CUDA_DEVICE_MAX_CONNECTIONS=1\n"));
  if (job.plan.optimizer.kind == Optimizer::amsgrad)
    out->differences.push_back("Megatron-LM has no amsgrad; the arguments say adam");
  if (moe)
    out->differences.push_back(
        "Megatron's router drops no tokens unless --moe-expert-capacity-factor is given; the "
        "plan's experts have a fixed capacity");
}

namespace {

struct Option {
  const char* name;
  char kind;
};
const Option kOptions[] = {
#include "export/megatron_options.inc"
};

// Options that divide a step in a way that no plan of motley does, and the value that does not.
const std::pair<const char*, const char*> kNotRead[] = {
    {"--account-for-embedding-in-pipeline-split", nullptr},
    {"--account-for-loss-in-pipeline-split", nullptr},
    {"--context-parallel-size", "1"},
    {"--cpu-offloading-num-layers", "0"},
    {"--decoder-first-pipeline-num-layers", nullptr},
    {"--decoder-last-pipeline-num-layers", nullptr},
    {"--delay-wgrad-compute", nullptr},
    {"--fine-grained-activation-offloading", nullptr},
    {"--mtp-num-layers", "0"},
    {"--num-distributed-optimizer-instances", "1"},
    {"--num-layers-per-virtual-pipeline-stage", nullptr},
    {"--num-virtual-stages-per-pipeline-rank", nullptr},
    {"--optimizer-cpu-offload", nullptr},
    {"--overlap-moe-expert-parallel-comm", nullptr},
    {"--recompute-activations", nullptr},
    {"--tensor-parallel-num-weight-shards", "1"},
    {"--use-megatron-fsdp", nullptr},
    {"--use-torch-fsdp2", nullptr},
    {"--yaml-cfg", nullptr}};

// Options with the words behind them, one a line; flags with none. Throws UserError where one is
// none of Megatron's, has no value, or one of another kind.
class Words {
 public:
  explicit Words(const ExportDirectory& directory) : file_(directory.name(kFile)) {
    std::vector<std::string> lines;
    const std::string text = directory.text(kFile);
    for (size_t at = 0; at < text.size();) {
      const size_t end = std::min(text.find('\n', at), text.size());
      if (end > at) lines.push_back(text.substr(at, end - at));
      at = end + 1;
    }
    for (size_t at = 0; at < lines.size();) at = read(lines, at);
    for (const auto& [name, harmless] : kNotRead)
      if (has(name) && !(harmless && word(name) == harmless))
        throw user_error("import", "{}: {} is given, which no plan of motley has; leave it out",
                         file_, name);
  }
  const std::string& file() const { return file_; }
  std::string at(const std::string& name) const { return file_ + ": " + name; }
  bool has(const std::string& name) const { return words_.contains(name); }
  const std::string& word(const std::string& name) const { return words_.at(name); }
  int64_t number(const std::string& name, int64_t otherwise) const {
    return has(name) ? number_in(word(name), at(name), 1, int64_t{1} << 31) : otherwise;
  }
  void is_flag(const std::string& name, bool wanted, const char* what) const {
    if (has(name) != wanted)
      throw user_error("import", "{} is {}; {}", at(name), has(name) ? "given" : "missing", what);
  }
  const std::string& need(const std::string& name) const {
    if (!has(name)) throw user_error("import", "{} is missing", at(name));
    return word(name);
  }

 private:
  size_t read(const std::vector<std::string>& lines, size_t at) {
    const std::string& name = lines[at++];
    const auto option = std::lower_bound(std::begin(kOptions), std::end(kOptions), name,
                                         [](const Option& o, const std::string& wanted) {
                                           return std::string_view(o.name) < wanted;
                                         });
    if (option == std::end(kOptions) || option->name != name)
      throw user_error("import", "{}: '{}' is no option of Megatron-LM; give one word a line",
                       file_, name.substr(0, 60));
    std::string value;
    if (option->kind == 'l') {
      while (at < lines.size() && !lines[at].starts_with("--"))
        value += (value.empty() ? "" : " ") + lines[at++];
    } else if (option->kind != 'f') {
      if (at == lines.size()) throw user_error("import", "{}: {} has no value", file_, name);
      value = lines[at++];
      char* end = nullptr;
      if (option->kind == 'i') std::strtoll(value.c_str(), &end, 10);
      if (option->kind == 'd') std::strtod(value.c_str(), &end);
      if (end && (end == value.c_str() || *end != 0))
        throw user_error("import", "{}: {} is '{}'; give a number", file_, name,
                         value.substr(0, 40));
    }
    if (!words_.emplace(name, value).second)
      throw user_error("import", "{}: {} is given twice", file_, name);
    return at;
  }

  std::string file_;
  std::map<std::string, std::string> words_;
};

// Layers of every part of a layout: groups and then letters are expanded as they are written.
std::vector<int> parse_layout(const std::string& text, const std::string& where) {
  const auto wrong = [&](const std::string& why) {
    return user_error("import", "{} is '{}': {}", where, text.substr(0, 60), why);
  };
  std::vector<int> parts = {0};
  bool embedded = false, lost = false;
  // Expands [at, end) `times` times.
  std::string flat;
  const auto times_at = [&](const std::string& from, size_t* at) -> int64_t {
    if (*at >= from.size() || from[*at] != '*') return 1;
    size_t end = *at + 1;
    while (end < from.size() && std::isdigit(static_cast<unsigned char>(from[end]))) ++end;
    const int64_t n = number_in(from.substr(*at + 1, end - *at - 1), where, 1, kMostParts);
    *at = end;
    return n;
  };
  const auto repeat = [&](std::string* to, const std::string& what, int64_t times) {
    if (to->size() + what.size() * static_cast<size_t>(times) > (size_t{1} << 20))
      throw wrong("it is too long");
    for (; times > 0; --times) *to += what;
  };
  std::string groups;
  for (size_t at = 0; at < text.size();) {
    if (text[at] != '(') {
      groups += text[at++];
      continue;
    }
    const size_t close = text.find(')', at);
    if (close == std::string::npos) throw wrong("a bracket is not closed");
    const std::string inner = text.substr(at + 1, close - at - 1);
    at = close + 1;
    repeat(&groups, inner, times_at(text, &at));
  }
  for (size_t at = 0; at < groups.size();) {
    const std::string letter(1, groups[at++]);
    if (letter == ",") continue;
    repeat(&flat, letter, times_at(groups, &at));
  }
  for (const char c : flat) {
    if (c == '|') {
      parts.push_back(0);
      if (parts.size() > kMostParts) throw wrong("it has too many parts");
    } else if (c == 'E') {
      if (embedded || parts.size() > 1 || parts[0] > 0) throw wrong("E is not first, or not alone");
      embedded = true;
    } else if (c == 't') {
      if (lost) throw wrong("a layer follows L");
      ++parts.back();
    } else if (c == 'L') {
      if (lost) throw wrong("there is more than one L");
      lost = true;
    } else {
      throw wrong(fmt::format("'{}' is none of E, t, L and |", c));
    }
  }
  if (!embedded || !lost || flat.empty() || flat.back() != 'L')
    throw wrong("it has to begin with E and end with L");
  return parts;
}

// What the file says of the model is what export would.
void check_sizes(const Words& words, const Sizes& s) {
  const std::pair<const char*, int64_t> sizes[] = {
      {"--num-layers", s.layers},   {"--hidden-size", s.hidden},
      {"--ffn-hidden-size", s.ffn}, {"--num-attention-heads", s.heads},
      {"--seq-length", s.seq},      {"--max-position-embeddings", std::max(s.seq, s.positions)},
      {"--vocab-size", s.vocab}};
  for (const auto& [name, wanted] : sizes) {
    words.need(name);
    same(words.at(name), words.number(name, wanted), wanted, "the model's");
  }
  words.is_flag("--group-query-attention", s.kv_heads != s.heads, "the model's is not");
  if (s.kv_heads != s.heads)
    same(words.at("--num-query-groups"), words.number("--num-query-groups", 1), s.kv_heads,
         "the model's");
  same(words.at("--num-experts"), words.number("--num-experts", 0), s.experts, "the model's");
  if (s.experts > 0) {
    if (s.top > 0)
      same(words.at("--moe-router-topk"), words.number("--moe-router-topk", 2), s.top,
           "the model's");
    same(words.at("--moe-ffn-hidden-size"), words.number("--moe-ffn-hidden-size", s.ffn), s.ffn,
         "the model's");
    const std::string pattern = layer_pattern(s);
    same_word(words.at("--moe-layer-freq"),
              words.has("--moe-layer-freq") ? words.word("--moe-layer-freq") : layer_pattern({}),
              pattern, "the model's");
  }
  const std::pair<const char*, bool> flags[] = {{"--swiglu", s.gated},
                                                {"--disable-bias-linear", !s.bias},
                                                {"--untie-embeddings-and-output-weights", !s.tied}};
  for (const auto& [name, wanted] : flags)
    words.is_flag(name, wanted, "the model is otherwise; export it again");
  same_word(words.at("--normalization"), words.need("--normalization"),
            s.rms_norm ? "RMSNorm" : "LayerNorm", "the model's");
  same_word(words.at("--position-embedding-type"), words.need("--position-embedding-type"),
            s.positions > 0 ? "learned_absolute" : "rope", "the model's");
  for (const char* name : {"--attention-dropout", "--hidden-dropout"})
    same_rate(words.at(name), words.has(name) ? words.word(name) : "0.1", s.dropout, "the model's");
}

bool recomputes(const Words& words) {
  if (!words.has("--recompute-granularity")) return false;
  same_word(words.at("--recompute-granularity"), words.word("--recompute-granularity"), "full",
            "which alone plans of motley have");
  same_word(words.at("--recompute-method"), words.need("--recompute-method"), "uniform",
            "which alone plans of motley have");
  same(words.at("--recompute-num-layers"), words.number("--recompute-num-layers", 1), 1,
       "a layer alone");
  return true;
}

}  // namespace

Arrangement read_megatron(const ImportJob& job) {
  const Words words(job.directory);
  const std::string& file = words.file();
  if (job.sizes) check_sizes(words, *job.sizes);
  words.is_flag("--bf16", job.precision == DType::bf16, "the plan's precision is another");
  words.is_flag("--fp16", job.precision == DType::f16, "the plan's precision is another");
  same_word(words.at("--optimizer"), words.has("--optimizer") ? words.word("--optimizer") : "adam",
            job.optimizer.kind == Optimizer::sgd ? "sgd" : "adam", "the plan's");
  same(words.at("--global-batch-size"), words.number("--global-batch-size", job.batch), job.batch,
       "the batch");
  Degrees d;
  d.tp = static_cast<int>(words.number(kTensors, 1));
  d.pp = static_cast<int>(words.number(kStages, 1));
  d.ep = static_cast<int>(words.number(kExperts, 1));
  same(words.at(kExpertTensors), words.number(kExpertTensors, d.tp), d.tp,
       "as many as divide other matrices");
  const auto world = static_cast<int64_t>(job.ranks.size());
  if (world % (int64_t{d.tp} * d.pp) != 0)
    throw user_error("import", "{}: {} {} x {} {} does not divide the {} ranks", file, kTensors,
                     d.tp, kStages, d.pp, world);
  d.dp = static_cast<int>(world / d.tp / d.pp);
  d.micro_batch = words.number("--micro-batch-size", 1);
  if (job.batch % (d.micro_batch * d.dp) != 0)
    throw user_error("import", "{}: --micro-batch-size {} x {} replicas does not divide {}", file,
                     d.micro_batch, d.dp, job.batch);
  d.micro_batches = static_cast<int>(job.batch / d.micro_batch / d.dp);
  const int layers = planner::count_blocks(job.graph);
  if (words.has(kLayout)) {
    d.blocks = parse_layout(words.word(kLayout), words.at(kLayout));
    if (d.blocks.size() % d.pp != 0)
      throw user_error("import", "{}: {} has {} parts for {} stages; give a multiple", file,
                       kLayout, d.blocks.size(), d.pp);
    d.interleave = static_cast<int>(d.blocks.size()) / d.pp;
  } else if (layers % d.pp != 0) {
    throw user_error("import", "{}: {} layers do not divide by {} {}; give {}", file, layers,
                     kStages, d.pp, kLayout);
  } else {
    d.blocks.assign(d.pp, layers / d.pp);
  }
  d.recompute = recomputes(words);
  d.zero = words.has("--use-distributed-optimizer");
  d.replicas_outside = words.has("--use-tp-pp-dp-mapping");
  if (words.has("--sequence-parallel") && d.tp == 1)
    throw user_error("import", "{}: --sequence-parallel needs {} of 2 or more", file, kTensors);
  return rectangle(job, d, file);
}

}  // namespace motley::exports
