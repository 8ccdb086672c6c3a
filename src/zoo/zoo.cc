#include "zoo/zoo.h"

#include <algorithm>
#include <charconv>

#include "core/error.h"

namespace motley {
namespace {

// Splits at every `separator`; "a,,b" has an empty piece.
std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> pieces(1);
  for (char c : text) {
    if (c == separator)
      pieces.emplace_back();
    else
      pieces.back() += c;
  }
  return pieces;
}

std::string known_params(const ModelInfo& info) {
  std::string text;
  for (const ModelParam& p : info.params) text += (text.empty() ? "" : ", ") + p.name;
  return text;
}

// What a model of that many layers, or that wide, takes to capture: one node per layer and more.
int64_t largest(const std::string& parameter) {
  for (const char* layers : {"layers", "every"})
    if (parameter == layers) return 4096;
  for (const char* few : {"heads", "kv_heads", "experts", "top", "image", "patch", "side", "width"})
    if (parameter == few) return 1 << 14;
  return 1 << 24;
}

double parse_value(const std::string& model, const std::string& key, const std::string& text) {
  double value = 0;
  const char* end = text.data() + text.size();
  if (key == "dropout") {
    const auto [p, error] = std::from_chars(text.data(), end, value);
    if (error != std::errc() || p != end || !(value >= 0 && value < 1))
      throw user_error("zoo", "{}: dropout is '{}'; give a probability from 0 to below 1", model,
                       text);
    return value;
  }
  int64_t integer = 0;
  const int64_t most = largest(key);
  const auto [p, error] = std::from_chars(text.data(), end, integer);
  if (error != std::errc() || p != end || integer < 1 || integer > most)
    throw user_error("zoo", "{}: {} is '{}'; give an integer from 1 to {}", model, key, text, most);
  return static_cast<double>(integer);
}

void check_divides(const ModelSpec& spec, const char* part, const char* whole) {
  bool has_part = false, has_whole = false;
  for (const ModelParam& p : spec.info().params) {
    has_part |= p.name == part;
    has_whole |= p.name == whole;
  }
  if (has_part && has_whole && spec[whole] % spec[part] != 0)
    throw user_error("zoo", "{}: {} is {}, which is not a multiple of {} = {}", spec.name(), whole,
                     spec[whole], part, spec[part]);
}

}  // namespace

std::string model_name(const char* identifier) {
  std::string name = identifier;
  std::replace(name.begin(), name.end(), '_', '-');
  return name;
}

const std::vector<ModelInfo>& zoo() {
  static const std::vector<ModelInfo> models = {
#define MOTLEY_MODEL(model, summary, ...) {model_name(#model), summary, {__VA_ARGS__}},
#include "zoo/models.inc"
#undef MOTLEY_MODEL
  };
  return models;
}

bool ModelSpec::has(const char* param) const {
  return std::any_of(info_->params.begin(), info_->params.end(),
                     [&](const ModelParam& p) { return p.name == param; });
}

double ModelSpec::value(const char* param) const {
  for (size_t i = 0; i < values_.size(); i++)
    if (info_->params[i].name == param) return values_[i];
  MOTLEY_CHECK(false, "model {} has no parameter {}", name(), param);
}

int64_t ModelSpec::operator[](const char* param) const {
  return static_cast<int64_t>(value(param));
}

double ModelSpec::dropout() const { return value("dropout"); }

std::string ModelSpec::text() const {
  std::string text = name();
  char separator = ':';
  for (size_t i = 0; i < values_.size(); i++) {
    const ModelParam& p = info_->params[i];
    if (values_[i] == p.value) continue;
    text += fmt::format("{}{}={}", separator, p.name, values_[i]);
    separator = ',';
  }
  return text;
}

ModelSpec parse_model(const std::string& text) {
  const size_t colon = text.find(':');
  const std::string name = text.substr(0, colon);
  ModelSpec spec;
  std::string names;
  for (const ModelInfo& info : zoo()) {
    if (info.name == name) spec.info_ = &info;
    names += (names.empty() ? "" : ", ") + info.name;
  }
  if (spec.info_ == nullptr)
    throw user_error("zoo", "there is no model '{}'; the zoo has {}", name, names);
  const ModelInfo& info = *spec.info_;
  for (const ModelParam& p : info.params) spec.values_.push_back(p.value);
  if (colon != std::string::npos) {
    std::vector<bool> given(info.params.size(), false);
    for (const std::string& item : split(text.substr(colon + 1), ',')) {
      const size_t equals = item.find('=');
      if (equals == std::string::npos)
        throw user_error("zoo", "{}: '{}' is not of the form parameter=value", name, item);
      const std::string key = item.substr(0, equals);
      size_t i = 0;
      while (i < info.params.size() && info.params[i].name != key) i++;
      if (i == info.params.size())
        throw user_error("zoo", "{} has no parameter '{}'; it has {}", name, key,
                         known_params(info));
      if (given[i]) throw user_error("zoo", "{}: {} is given twice", name, key);
      given[i] = true;
      spec.values_[i] = parse_value(name, key, item.substr(equals + 1));
    }
  }
  check_divides(spec, "heads", "hidden");
  check_divides(spec, "kv_heads", "heads");
  check_divides(spec, "patch", "image");
  return spec;
}

}  // namespace motley
