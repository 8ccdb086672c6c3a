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
  if (is_graph_file(model))
    file_ = std::make_unique<GraphFile>(load_graph_file(model));
  else
    kept_ = std::make_unique<KeptGraphs>(torch_program(), model), capture_s_ = captured_before();
}

Graph ModelGraphs::at(int64_t samples) {
  if (file_) return file_->at(samples);
  if (huggingface_) return huggingface_->at(samples);
  const std::lock_guard lock(capturing_);
  auto it = captured_.find(samples);
  if (it == captured_.end()) {
#ifdef MOTLEY_WITH_TORCH
    GraphSource source = load_graph(model_, samples, DType::f32, look_);
    capture_s_ += source.capture_s;
    const bool first = captured_.empty(), kept = kept_->keep(samples, source.graph);
    if (first && kept) become_plain(capture_s_);
    it = captured_.emplace(samples, std::move(source.graph)).first;
#else
    std::optional<Graph> kept = kept_->find(samples);
    if (!kept) become_torch();
    it = captured_.emplace(samples, std::move(*kept)).first;
#endif
  }
  return it->second;
}

}  // namespace motley
