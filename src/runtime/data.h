// Batches of training data, the same on every worker.
//
// A batch is a function of (seed, step) alone: every worker builds the global batch and keeps its
// pieces. Language models read text as bytes, a file or all files of a folder, and predict the next
// byte; every other model gets random inputs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "interpret/interpret.h"
#include "zoo/module.h"

namespace motley {

// Where text is found if the user names none: the license texts of Debian and its children.
constexpr const char* kDefaultText = "/usr/share/common-licenses";

class Dataset {
 public:
  // `path` empty: the default text for models that can read it, random inputs otherwise. Throws
  // UserError if the path cannot be read or holds too little text, or if the model does not read
  // text.
  Dataset(std::vector<InputSpec> inputs, const std::string& path, uint64_t seed);

  TensorMap batch(int64_t step) const;
  // "141 kB of text from /usr/share/common-licenses", "random inputs".
  const std::string& description() const { return description_; }

 private:
  std::vector<InputSpec> inputs_;
  uint64_t seed_;
  std::string text_;  // empty: random inputs
  std::string description_;
};

}  // namespace motley
