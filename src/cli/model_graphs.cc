#include "cli/model_graphs.h"

#include "cli/commands.h"
#ifdef MOTLEY_WITH_TORCH
#include "capture/source.h"
#endif

namespace motley {

ModelGraphs::ModelGraphs(const std::string& model, std::function<void(const Graph&)> look)
    : model_(model), look_(std::move(look)) {
  if (model.ends_with(".json") || model.find(".json:") != std::string::npos) {
    if (readers::is_huggingface(model)) {
      huggingface_ = std::make_unique<readers::HuggingFaceModel>(model);
      return;
    }
  }
  if (is_graph_file(model)) file_ = std::make_unique<GraphFile>(load_graph_file(model));
#ifndef MOTLEY_WITH_TORCH
  else
    become_torch();
#endif
}

Graph ModelGraphs::at(int64_t samples) {
  if (file_) return file_->at(samples);
  if (huggingface_) return huggingface_->at(samples);
  const std::lock_guard lock(capturing_);
  auto it = captured_.find(samples);
#ifdef MOTLEY_WITH_TORCH
  if (it == captured_.end()) {
    GraphSource source = load_graph(model_, samples, DType::f32, look_);
    capture_s_ += source.capture_s;
    it = captured_.emplace(samples, std::move(source.graph)).first;
  }
#endif
  return it->second;
}

}  // namespace motley
