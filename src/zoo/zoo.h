// The model zoo's catalogue: names, parameters and defaults, and the text form of a choice.
//
//   gpt:layers=48,hidden=8192,heads=64
//
// This header and zoo.cc do not touch libtorch, so listing models and reading specs costs nothing;
// build_model (zoo/module.h) makes the model. One model is one line of models.inc and one file
// zoo/<name>.cc.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace motley {

struct ModelParam {
  std::string name;
  double value = 0;  // the default
};

struct ModelInfo {
  std::string name;
  std::string summary;
  std::vector<ModelParam> params;
};

// The name of a model from its identifier in models.inc: bert_moe is bert-moe.
std::string model_name(const char* identifier);

// All models, by name.
const std::vector<ModelInfo>& zoo();

// A model with values for all its parameters.
class ModelSpec {
 public:
  const std::string& name() const { return info_->name; }
  const ModelInfo& info() const { return *info_; }
  int64_t operator[](const char* param) const;  // REQUIRES: the model has it
  bool has(const char* param) const;
  double dropout() const;
  // "gpt:layers=2": the parameters that are not at their default, in the catalogue's order.
  std::string text() const;

 private:
  friend ModelSpec parse_model(const std::string& text);
  double value(const char* param) const;

  const ModelInfo* info_ = nullptr;
  std::vector<double> values_;  // one per parameter
};

// Throws UserError naming the model or parameter that is unknown, and what is known; the value that
// is not a number in range; sizes that do not divide (heads of hidden, patch of image).
ModelSpec parse_model(const std::string& text);

}  // namespace motley
