#include "planner/batch_step.h"

#include <algorithm>

#include "core/error.h"
#include "planner/options.h"
#include "spmd/recompute.h"

namespace motley::planner {

BatchStep::BatchStep(Graph graph, int64_t batch, const Deadline& deadline)
    : begin_(Clock::now()),
      graph_(std::move(graph)),
      theory_(graph_),
      theory_s_(std::chrono::duration<double>(Clock::now() - begin_).count()),
      batch_(batch),
      deadline_(deadline) {}

void BatchStep::check_time(const Deadline& deadline) const {
  if (deadline.over() || deadline.left() < theory_s_) throw TimeIsUp();
}

std::shared_ptr<const MicroBatch> BatchStep::of(int64_t samples) {
  const std::lock_guard lock(mutex_);
  if (const auto known = parts_.find(samples); known != parts_.end()) return known->second;
  MOTLEY_CHECK(samples > 0 && batch_ % samples == 0);
  check_time(deadline_);
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
  const std::pair key(samples, count);
  if (const auto known = layers_.find(key); known != layers_.end()) return known->second;
  check_time(deadline_);
  pipeline::LayerOptions options{.layers = std::max(0, count), .deadline = deadline_};
  if (count == kBlockLayers) {
    const std::vector<int> block = spmd::blocks_of(part->graph);
    for (size_t n = 0; n < block.size(); ++n)
      if (block[n] == static_cast<int>(options.begin.size()) && !is_source(part->graph.nodes[n]))
        options.begin.push_back(NodeId(static_cast<int64_t>(n)));
  }
  return layers_[key] = pipeline::find_layers(part->graph, options);
}

std::string BatchStep::why_not() const {
  const std::lock_guard lock(mutex_);
  return why_not_;
}

}  // namespace motley::planner
