// MODEL of commands that plan: its graph at any number of samples.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "graph/file.h"
#include "readers/huggingface.h"

namespace motley {

// Read from a file, or captured, each size once. Threads may ask at the same time.
class ModelGraphs {
 public:
  // Where the model has to be captured and this program has no libtorch, it becomes the one that
  // has (commands.h).
  explicit ModelGraphs(const std::string& model);

  Graph at(int64_t samples);
  double capture_s() const { return capture_s_; }

 private:
  std::string model_;
  std::unique_ptr<GraphFile> file_;  // null: captured, or
  std::unique_ptr<readers::HuggingFaceModel> huggingface_;
  std::mutex capturing_;
  std::map<int64_t, Graph> captured_;
  double capture_s_ = 0;
};

}  // namespace motley
