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
  std::unique_lock lock(mutex_);
  Entry<MicroBatch>& entry = parts_[samples];
  lock.unlock();
  const std::lock_guard own(entry.mutex);
  if (entry.known) return entry.known;
  MOTLEY_CHECK(samples > 0 && batch_ % samples == 0);
  check_time(deadline_);
  try {
    return entry.known = std::make_shared<MicroBatch>(
               micro_batch_of(theory_, batch_, static_cast<int>(batch_ / samples), graph_.model));
  } catch (const UserError& error) {
    lock.lock();
    why_not_ = error.what();
    return nullptr;
  }
}

uint64_t BatchStep::fingerprint() const {
  const std::lock_guard lock(mutex_);
  if (!fingerprint_) fingerprint_ = motley::fingerprint(graph_);
  return *fingerprint_;
}

const pipeline::Layers& BatchStep::layers(int64_t samples, int count) {
  const std::shared_ptr<const MicroBatch> part = of(samples);
  std::unique_lock lock(mutex_);
  Entry<pipeline::Layers>& entry = layers_[{samples, count}];
  lock.unlock();
  const std::lock_guard own(entry.mutex);
  if (entry.known) return *entry.known;
  check_time(deadline_);
  pipeline::LayerOptions options{.layers = std::max(0, count), .deadline = deadline_};
  if (count == kBlockLayers) {
    const std::vector<int> block = spmd::blocks_of(part->graph);
    for (size_t n = 0; n < block.size(); ++n)
      if (block[n] == static_cast<int>(options.begin.size()) && !is_source(part->graph.nodes[n]))
        options.begin.push_back(NodeId(static_cast<int64_t>(n)));
  }
  entry.known = std::make_shared<pipeline::Layers>(pipeline::find_layers(part->graph, options));
  return *entry.known;
}

int BatchStep::at_most(int64_t samples, int most) {
  const std::shared_ptr<const MicroBatch> part = of(samples);
  check_time(deadline_);
  auto found = std::make_shared<pipeline::Layers>(
      pipeline::find_layers(part->graph, {.most = most, .deadline = deadline_}));
  const int count = found->coarser ? most : 0;
  std::unique_lock lock(mutex_);
  Entry<pipeline::Layers>& entry = layers_[{samples, count}];
  lock.unlock();
  const std::lock_guard own(entry.mutex);
  if (!entry.known) entry.known = std::move(found);
  return count;
}

std::string BatchStep::why_not() const {
  const std::lock_guard lock(mutex_);
  return why_not_;
}

void take_step(const std::shared_ptr<const BatchStep>& step, Plan* plan) {
  plan->graph_fingerprint = step->fingerprint();
  plan->graph = {step, &step->graph()};
  plan->theory = {step, &step->theory()};
}

}  // namespace motley::planner
