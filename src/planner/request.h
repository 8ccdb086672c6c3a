// What is to be planned.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "cluster/profile.h"
#include "cost/cost.h"
#include "graph/graph.h"
#include "solver/problem.h"

namespace motley::planner {

// The canonical graph of the model at a number of samples. Throws UserError if there is none. Of
// micro-batches engines derive it from that of the whole batch (batch_step.h).
using GraphOf = std::function<Graph(int64_t samples)>;

constexpr int kAutomaticLayers = -1;

struct Request {
  std::string model;
  int64_t batch = 0;  // global
  Optimizer optimizer = Optimizer::adamw;
  bool memory_limit = true;
  bool recompute = true;               // stages may compute activations again where memory is short
  std::vector<int64_t> micro_batches;  // samples, those that may be tried; empty: all
  // Of pipelines, about; 0: the finest, up to 160; kAutomaticLayers: finer until nothing is gained.
  int layers = 0;
  spmd::Limits limits;
  uint64_t seed = 0;
  std::vector<ProfiledStage> measured;  // layers whose costs on one device are not the model's
  int threads = 0;  // that plan layers and stages; 0: one per core. The plan does not depend on it.
};

}  // namespace motley::planner
