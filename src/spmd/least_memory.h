// A bound that needs no search: what all devices together hold at least.
#pragma once

#include "cost/cost.h"

namespace motley::spmd {

// Bytes of parameters and optimizer state, and of what the forward pass makes and the backward pass
// reads: when the backward pass begins, every program that makes nothing again holds all of it, in
// whatever pieces. With gradients instead of activations, if that is more.
Bytes least_memory(const Graph& graph, Optimizer optimizer);

// The same of programs that may make activations again: with what one operator reads and makes, which
// is there at once. Of attention over many samples that alone may be too much.
Bytes least_memory_again(const Graph& graph, Optimizer optimizer);

}  // namespace motley::spmd
