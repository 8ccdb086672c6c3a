// The step of the whole batch, and of its micro-batches at the sizes that engines try: worked out
// once for all of them.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "pipeline/layers.h"
#include "plan/plan.h"
#include "shard/micro_batch.h"

namespace motley::planner {

class BatchStep {
 public:
  // `graph`: of a batch of so many samples. What follows throws TimeIsUp once `deadline` is over.
  BatchStep(Graph graph, int64_t batch, const Deadline& deadline = {});

  const Graph& graph() const { return graph_; }
  uint64_t fingerprint() const;  // of the graph
  const Theory& theory() const { return theory_; }
  int64_t batch() const { return batch_; }

  // At micro-batches of so many samples, which divide the batch; null where the model does not
  // allow it, for the reason why_not(). For several threads.
  std::shared_ptr<const MicroBatch> of(int64_t samples);
  std::string why_not() const;  // of the last that was null
  // Throws TimeIsUp where less is left than what looks at every node takes, about: as the theory.
  void check_time(const Deadline& deadline) const;
  // The layers of such a micro-batch, about so many; for several threads. 0: the finest;
  // kBlockLayers: its blocks. REQUIRES: of(samples).
  const pipeline::Layers& layers(int64_t samples, int count);
  // The number to ask for so that there are about `most` at most: that, or 0. Finds these layers.
  int at_most(int64_t samples, int most);

 private:
  using Clock = std::chrono::steady_clock;
  const Clock::time_point begin_;
  Graph graph_;
  Theory theory_;
  const double theory_s_;  // that deriving it took
  int64_t batch_;
  const Deadline deadline_;
  mutable std::mutex mutex_;  // of what follows
  template <typename T>
  struct Entry {
    std::mutex mutex;  // of what follows
    std::shared_ptr<const T> known;
  };
  std::map<int64_t, Entry<MicroBatch>> parts_;
  std::map<std::pair<int64_t, int>, Entry<pipeline::Layers>> layers_;
  mutable std::optional<uint64_t> fingerprint_;
  std::string why_not_;
};

// Gives a plan the step's graph and theory, which they share.
void take_step(const std::shared_ptr<const BatchStep>& step, Plan* plan);

}  // namespace motley::planner
