// The families of Hugging Face models: from a config to what a transformer is made of.
#pragma once

#include <map>
#include <string>

#include "core/file.h"
#include "readers/transformer.h"

namespace motley::readers {

constexpr int64_t kMostSeq = 2048;  // tokens, unless more are asked for
constexpr int64_t kMost = int64_t{1} << 24;
#ifdef MOTLEY_FUZZ
constexpr int64_t kMostLayers = 16, kMostChoices = 64;  // the same checks, sooner
#else
constexpr int64_t kMostLayers = 4096;
constexpr int64_t kMostChoices = 1 << 14;  // of experts for a token, in all layers
#endif

// Fields of a config. Every error names the file and the field.
class Config {
 public:
  Config(const Json& json, const std::string& name) : json_(json), name_(name) {}

  UserError bad(const std::string& field, const std::string& fix) const {
    const std::string value =
        json_.contains(field)
            ? "is " + json_[field].dump(-1, ' ', true, Json::error_handler_t::replace).substr(0, 60)
            : "is missing";
    return user_error("model", "{}: {} {}; give {}", name_, field, value, fix);
  }
  bool has(const std::string& field) const {
    return json_.contains(field) && !json_[field].is_null();
  }
  // The first of these names that the file has.
  int64_t size(std::initializer_list<const char*> names, int64_t most = kMost) const {
    for (const char* name : names)
      if (has(name)) return whole(name, 1, most);
    throw bad(*names.begin(), fmt::format("a whole number from 1 to {}", most));
  }
  int64_t size_or(std::initializer_list<const char*> names, int64_t absent,
                  int64_t least = 1) const {
    for (const char* name : names)
      if (has(name)) return whole(name, least, kMost);
    return absent;
  }
  bool flag(const char* name, bool absent) const {
    if (!has(name)) return absent;
    if (!json_[name].is_boolean()) throw bad(name, "true or false");
    return json_[name].get<bool>();
  }
  double real(const char* name, double absent) const {
    if (!has(name)) return absent;
    if (!json_[name].is_number()) throw bad(name, "a number");
    return json_[name].get<double>();
  }
  std::string text(const char* name, const std::string& absent) const {
    if (!has(name)) return absent;
    if (!json_[name].is_string()) throw bad(name, "a text");
    return json_[name].get<std::string>();
  }
  // The activation of a feed-forward layer.
  std::string act(std::initializer_list<const char*> names, const std::string& absent) const {
    static const std::map<std::string, std::string> known = {{"gelu", "gelu"},
                                                             {"gelu_new", "gelu_tanh"},
                                                             {"gelu_fast", "gelu_tanh"},
                                                             {"gelu_python", "gelu"},
                                                             {"relu", "relu"},
                                                             {"silu", "silu"},
                                                             {"swish", "silu"},
                                                             {"tanh", "tanh"},
                                                             {"gelu_pytorch_tanh", "gelu_tanh"},
                                                             {"quick_gelu", "gelu_tanh"},
                                                             {"relu2", "relu2"}};
    for (const char* name : names)
      if (has(name)) {
        const auto it = known.find(text(name, ""));
        if (it == known.end())
          throw bad(name, "gelu, gelu_new, gelu_pytorch_tanh, relu, relu2, silu or tanh");
        return it->second;
      }
    return absent;
  }
  // What is not built must have its usual value.
  void require(const char* name, bool usual) const {
    if (flag(name, usual) != usual)
      throw bad(name, fmt::format("{}: the other is not built", usual));
  }
  // The config of the text model inside of one of several modes.
  bool nested(const char* name) const { return has(name) && json_[name].is_object(); }
  const Json& json(const char* name) const { return json_[name]; }

 private:
  int64_t whole(const char* name, int64_t least, int64_t most) const {
    const Json& v = json_[name];
    if (!v.is_number_integer() || v.get<int64_t>() < least || v.get<int64_t>() > most)
      throw bad(name, fmt::format("a whole number from {} to {}", least, most));
    return v.get<int64_t>();
  }
  const Json& json_;
  const std::string& name_;
};

using Family = Transformer (*)(const Config&);

// By `model_type`.
const std::map<std::string, Family>& families();

}  // namespace motley::readers
