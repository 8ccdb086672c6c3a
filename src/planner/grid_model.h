// Between the grid's strategies (grid/strategy.h) and compositions of a graph's layers.
#pragma once

#include <cstdint>

#include "grid/estimate.h"
#include "grid/model.h"
#include "grid/strategy.h"
#include "planner/composition.h"
#include "planner/layered_graph.h"

namespace motley::planner {

// The layers of a graph of `samples` as the grid sees them.
grid::Model grid_model(const LayeredGraph& graph, int64_t samples);

// What it estimates plans by: those of a cluster as it is described, judged by what they hold, with
// gradients of 16 bits as the cluster's backend sends them.
// `workspace`: of activations, what is there beside them.
grid::Estimator estimator_of(grid::Model model, const Cluster& cluster, double workspace = 0);

// A stage's program is searched on all devices of its replica: on those of context parallelism it
// may cut the sequence, on those of expert parallelism the experts, or whatever costs less.
// Replicas that divide experts are one, with micro-batches as large as theirs together; so are
// those that divide parameters (ZeRO stage 3). Of how many replicas one is made.
int merged_replicas(const grid::Strategy& strategy);
// Micro-batches of the strategy that `merged` replicas from `first` on take.
int taken_by(const grid::Strategy& strategy, int first, int merged);

// `again`: of stages that are to compute again.
Composition composition_of(const grid::Strategy& strategy, Again again = Again::if_needed);

}  // namespace motley::planner
