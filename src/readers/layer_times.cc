#include "readers/layer_times.h"

#include <algorithm>
#include <cmath>
#include <regex>

#include "core/error.h"
#include "core/file.h"
#include "readers/text.h"

namespace motley::readers {

namespace {

constexpr int64_t kMostSamples = 1 << 20, kMostTokens = 1 << 26;

Json object_of(const std::string& text, const std::string& name) {
  Json json = parse_json(text, name);
  if (!json.is_object())
    throw cluster_error(name, "is no JSON object", "a file that Galvatron wrote");
  return json;
}

int64_t number(const std::string& digits, int64_t most, const std::string& name,
               const std::string& field) {
  int64_t value = 0;
  if (!whole(digits, &value) || value < 1 || value > most)
    throw cluster_error(name, fmt::format("{} says {}", field.substr(0, 60), digits.substr(0, 20)),
                        fmt::format("numbers from 1 to {}", most));
  return value;
}

}  // namespace

LayerTimes parse_layer_times(const std::string& text, const std::string& name) {
  static const std::regex layer(R"(layertype_0_bsz(\d{1,9})_seq(\d{1,9}))");
  static const std::regex model(R"(layernum\[(\d{1,9})\]_bsz(\d{1,9})_seq(\d{1,9}))");
  const Json json = object_of(text, name);
  const std::string file = lower(name.substr(name.find_last_of('/') + 1));
  LayerTimes found;
  found.half = file.find("bf16") != std::string::npos || file.find("fp16") != std::string::npos;
  if (!found.half && file.find("fp32") == std::string::npos)
    throw cluster_error(
        name, "does not say in which precision it was measured",
        "a name such as computation_profiling_bf16_llama-7b.json, as Galvatron writes it");
  if (json.size() > kMostPoints) throw cluster_error(name, "has too many entries", "fewer");
  using Pass = std::pair<int64_t, int64_t>;             // tokens, samples
  std::map<Pass, Seconds> direct;                       // of a layer
  std::map<Pass, std::map<int64_t, Seconds>> by_count;  // of models of so many layers
  for (const auto& [key, value] : json.items()) {
    std::smatch of;
    if (std::regex_match(key, of, layer)) {
      const int64_t samples = number(of[1], kMostSamples, name, key);
      const int64_t tokens = number(of[2], kMostTokens, name, key);
      direct[{tokens, samples}] = static_cast<double>(samples) * 1e-3 * positive(value, name, key);
    } else if (std::regex_match(key, of, model)) {
      const int64_t layers = number(of[1], kMostSamples, name, key);
      const int64_t samples = number(of[2], kMostSamples, name, key);
      by_count[{number(of[3], kMostTokens, name, key), samples}][layers] =
          1e-3 * positive(value, name, key);
    }
  }
  for (const auto& [pass, times] : by_count) {
    if (times.size() < 2 || direct.count(pass)) continue;
    const auto& [few, less] = *times.begin();
    const auto& [many, more] = *times.rbegin();
    if (more <= less)
      throw cluster_error(
          name,
          fmt::format("{} layers take no longer than {} over {} samples", many, few, pass.second),
          "what was measured");
    direct[pass] = (more - less) / static_cast<double>(many - few);
  }
  for (const auto& [pass, seconds] : direct)
    found.forward[pass.first].emplace_back(pass.second, seconds);
  if (found.forward.empty())
    throw cluster_error(
        name, "has no time of a whole layer",
        "entries such as layertype_0_bsz4_seq2048, or layernum[2]_... and layernum[4]_...");
  return found;
}

double parse_overlap(const std::string& text, const std::string& name) {
  const Json json = object_of(text, name);
  if (!json.contains("overlap_coe"))
    throw cluster_error(name, "has no overlap_coe", "overlap_coefficient.json of Galvatron");
  const double times = positive(json["overlap_coe"], name, "overlap_coe");
  if (times < 1 || times > 100)
    throw cluster_error(name, fmt::format("overlap_coe is {}", times), "a number from 1 to 100");
  return times - 1;
}

}  // namespace motley::readers
