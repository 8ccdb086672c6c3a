// A Hugging Face config.json as a model: its training step, built from the sizes in the file by
// `model_type`, without weights, transformers or libtorch.
//
//   motley plan llama/config.json --cluster hap-64 --batch 64
//   motley plan llama/config.json:seq=4096,layers=8 --cluster hap-64 --batch 64
//
// The step is next-token prediction (encoders: every token is predicted; images: their class) with
// the mean cross-entropy. Parameters have the shapes and, for decoders, the names of transformers'
// classes with a language-model head, so that their number is the same; tied ones are one. A token
// is a position: sequences have `seq` tokens, by default as many as the model has positions, at
// most 2048. Experts have capacities (zoo/experts.h), and dropout is none. Attention over a sliding
// window is computed over the whole sequence. In what trains nothing (rotary frequencies, alibi
// slopes, scales) sizes alone are like transformers'.
#pragma once

#include <string>
#include <vector>

#include "core/file.h"
#include "graph/graph.h"

namespace motley::readers {

// Whether MODEL names a JSON file with a "model_type", options behind it or not. Throws UserError
// if it ends in .json and cannot be read.
bool is_huggingface(const std::string& model);

// What `model_type` may be, sorted.
std::vector<std::string> huggingface_families();

// Reads a config once; steps follow at any number of samples.
class HuggingFaceModel {
 public:
  // `model`: path, or path:key=value,...; keys are seq and layers. Throws UserError that names the
  // file, the field and its value: families that are not known, sizes that are missing, are no
  // whole numbers in range or do not divide, and features that are not built.
  explicit HuggingFaceModel(const std::string& model);
  HuggingFaceModel(const Json& config, const std::string& name, int64_t seq, int64_t layers);

  Graph at(int64_t samples) const;

 private:
  std::string name_;
  Json config_;
  int64_t seq_ = 0, layers_ = 0;  // 0: not given
};

}  // namespace motley::readers
