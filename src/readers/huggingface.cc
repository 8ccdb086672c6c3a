#include "readers/huggingface.h"

#include <algorithm>
#include <charconv>

#include "core/error.h"
#include "readers/families.h"

namespace motley::readers {

namespace {

// The path and the options behind it.
std::pair<std::string, std::string> parts_of(const std::string& model) {
  const size_t at = model.find(".json:");
  if (at == std::string::npos) return {model, ""};
  return {model.substr(0, at + 5), model.substr(at + 6)};
}

Json read(const std::string& path) { return parse_json(read_file(path, size_t{1} << 24), path); }

}  // namespace

bool is_huggingface(const std::string& model) {
  const std::string path = parts_of(model).first;
  if (!path.ends_with(".json")) return false;
  const std::string text = read_file(path);
  if (text.find("\"model_type\"") == std::string::npos ||
      text.find("\"motley_graph\"") != std::string::npos)
    return false;
  const Json json = parse_json(text, path);
  return json.is_object() && json.contains("model_type");
}

std::vector<std::string> huggingface_families() {
  std::vector<std::string> names;
  for (const auto& [name, family] : families()) names.push_back(name);
  return names;
}

HuggingFaceModel::HuggingFaceModel(const std::string& model) {
  std::string options;
  std::tie(name_, options) = parts_of(model);
  config_ = read(name_);
  while (!options.empty()) {
    const std::string option = options.substr(0, options.find(','));
    options = option.size() < options.size() ? options.substr(option.size() + 1) : "";
    const size_t equals = option.find('=');
    const std::string key = option.substr(0, equals);
    int64_t value = 0;
    const char *begin = option.data() + std::min(option.size(), equals + 1),
               *end = option.data() + option.size();
    const auto parsed = std::from_chars(begin, end, value);
    if ((key != "seq" && key != "layers") || equals == std::string::npos || parsed.ptr != end ||
        value < 1 || value > kMost)
      throw user_error("model", "{}: option '{}'; give seq=N or layers=N, whole numbers from 1 on",
                       model, option);
    (key == "seq" ? seq_ : layers_) = value;
  }
  at(1);
}

HuggingFaceModel::HuggingFaceModel(const Json& config, const std::string& name, int64_t seq,
                                   int64_t layers)
    : name_(name), config_(config), seq_(seq), layers_(layers) {}

Graph HuggingFaceModel::at(int64_t samples) const {
  const Config c(config_, name_);
  const std::string type = c.text("model_type", "");
  const auto family = families().find(type);
  if (family == families().end())
    throw c.bad("model_type", fmt::format("one of {}", fmt::join(huggingface_families(), ", ")));
  Transformer t = family->second(c);
  if (t.hidden % t.heads != 0 && !c.has("head_dim") && t.latent.kv_rank == 0)
    throw c.bad("hidden_size", fmt::format("a multiple of {} heads", t.heads));
  if (t.heads % t.kv_heads != 0)
    throw c.bad("num_key_value_heads", fmt::format("a divisor of {} heads", t.heads));
  if (t.moe.top > t.moe.experts)
    throw c.bad("num_experts_per_tok", fmt::format("at most {} experts", t.moe.experts));
  if (t.head < 1) throw c.bad("head_dim", "at least 1");
  if (t.image == 0) {
    if (t.positions > 0 && seq_ > t.seq)
      throw user_error("model", "{}: seq={} is more than the {} positions of the model", name_,
                       seq_, t.seq);
    t.seq = seq_ > 0 ? seq_ : std::min(t.seq, kMostSeq);
  } else if (seq_ > 0) {
    throw user_error("model", "{}: seq={}: images have {} patches; leave it out", name_, seq_,
                     t.seq);
  }
  if (layers_ > 0) t.layers = layers_;
  if (t.moe.top > std::max(int64_t{1}, kMostChoices / std::max(int64_t{1}, t.layers)))
    throw c.bad("num_experts_per_tok",
                fmt::format("at most {} choices of experts in all layers", kMostChoices));
  t.eps = c.real("rms_norm_eps", c.real("layer_norm_eps", c.real("layer_norm_epsilon", t.eps)));
  Graph graph = training_step(t, samples);
  graph.model = fmt::format("{} of {} layers, sequences of {}", type, t.layers, t.seq);
  return graph;
}

}  // namespace motley::readers
