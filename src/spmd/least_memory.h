// A bound that needs no search: what all devices together hold at least.
#pragma once

#include "cost/cost.h"

namespace motley::spmd {

// Bytes of parameters and optimizer state, and of what the forward pass makes and the backward pass
// reads: when the backward pass begins, every program that makes nothing again holds all of it, in
// whatever pieces. With gradients instead of activations, if that is more.
Bytes least_memory(const Graph& graph, Optimizer optimizer);

}  // namespace motley::spmd
