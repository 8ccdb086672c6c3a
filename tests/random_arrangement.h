// Random plans that a training framework can say, for tests of exporters.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "core/rng.h"
#include "planner/targets.h"

namespace motley {

// Captures every model once.
class RandomPlans {
 public:
  explicit RandomPlans(const std::string& target) : target_(*planner::find_target(target)) {}

  // Case `i` of a seed: a small GPT, Llama or mixture of experts on one to four machines of one to
  // three types of devices. Memory is no limit.
  std::unique_ptr<Plan> plan(uint64_t seed, int i);

  // The same choice without a search: a plan of `arrangement` that has no programs, as far as files of
  // frameworks tell.
  std::unique_ptr<Plan> outline(uint64_t seed, int i, planner::Arrangement* arrangement);

 private:
  struct Case;
  bool choose(Rng* rng, const Cluster& cluster, Case* c) const;

  const planner::Target& target_;
  std::map<std::string, std::shared_ptr<planner::BatchStep>> steps_;  // by model and batch
};

}  // namespace motley
