#include "planner/batch_step.h"

#include <algorithm>

#include "core/error.h"
#include "planner/options.h"
#include "spmd/recompute.h"

namespace motley::planner {

BatchStep::BatchStep(Graph graph, int64_t batch)
    : graph_(std::move(graph)), theory_(graph_), batch_(batch) {}

std::shared_ptr<const MicroBatch> BatchStep::of(int64_t samples) {
  const std::lock_guard lock(mutex_);
  if (const auto known = parts_.find(samples); known != parts_.end()) return known->second;
  MOTLEY_CHECK(samples > 0 && batch_ % samples == 0);
  try {
    return parts_[samples] = std::make_shared<MicroBatch>(
               micro_batch_of(theory_, batch_, static_cast<int>(batch_ / samples), graph_.model));
  } catch (const UserError& error) {
    why_not_ = error.what();
    return nullptr;
  }
}

uint64_t BatchStep::fingerprint() {
  const std::lock_guard lock(mutex_);
  if (!fingerprint_) fingerprint_ = motley::fingerprint(graph_);
  return *fingerprint_;
}

const pipeline::Layers& BatchStep::layers(int64_t samples, int count) {
  const std::shared_ptr<const MicroBatch> part = of(samples);
  const std::lock_guard lock(mutex_);
  const auto [it, fresh] = layers_.try_emplace({samples, count});
  if (!fresh) return it->second;
  pipeline::LayerOptions options{.layers = std::max(0, count)};
  if (count == kBlockLayers) {
    const std::vector<int> block = spmd::blocks_of(part->graph);
    for (size_t n = 0; n < block.size(); ++n)
      if (block[n] == static_cast<int>(options.begin.size()) && !is_source(part->graph.nodes[n]))
        options.begin.push_back(NodeId(static_cast<int64_t>(n)));
  }
  it->second = pipeline::find_layers(part->graph, options);
  return it->second;
}

std::string BatchStep::why_not() const {
  const std::lock_guard lock(mutex_);
  return why_not_;
}

}  // namespace motley::planner
