// MODEL of commands that plan: its graph at any number of samples.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "cli/kept_graphs.h"
#include "graph/file.h"
#include "readers/huggingface.h"

namespace motley {

// Read from a file, or captured, each size once. Threads may ask at the same time.
class ModelGraphs {
 public:
  // `look` sees the parameters of a model that is captured, before its step is run; what it throws
  // ends at().
  explicit ModelGraphs(const std::string& model, std::function<void(const Graph&)> look = {});

  // Where the model has to be captured, was not kept (kept_graphs.h), and this program has no
  // libtorch, it becomes the one that has (commands.h), which starts anew, and, once it has kept
  // the first, becomes this one again.
  Graph at(int64_t samples);
  // Of a graph file, those that it was captured with; else 0.
  int64_t samples() const { return file_ ? file_->batch : 0; }
  double capture_s() const { return capture_s_; }

 private:
  std::string model_;
  std::function<void(const Graph&)> look_;
  std::unique_ptr<GraphFile> file_;  // null: captured, or
  std::unique_ptr<readers::HuggingFaceModel> huggingface_;
  std::unique_ptr<KeptGraphs> kept_;  // of a model of the zoo
  std::mutex capturing_;
  std::map<int64_t, Graph> captured_;
  double capture_s_ = 0;
};

}  // namespace motley
