#include "cli/model_graphs.h"

#include "cli/commands.h"
#ifdef MOTLEY_WITH_TORCH
#include "capture/source.h"
#endif

namespace motley {

ModelGraphs::ModelGraphs(const std::string& model) : model_(model) {
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
  const auto [it, fresh] = captured_.try_emplace(samples);
#ifdef MOTLEY_WITH_TORCH
  if (fresh) {
    GraphSource source = load_graph(model_, samples);
    capture_s_ += source.capture_s;
    it->second = std::move(source.graph);
  }
#endif
  return it->second;
}

}  // namespace motley
