// What a program holds in memory, and from when to when.
#pragma once

#include <limits>
#include <utility>
#include <vector>

#include "cost/cost.h"
#include "cost/overlap.h"

namespace motley {

// Memory of its own, by the first (value, placement) that is in it: with views, slices that are
// one run of it, and sums that are taken in place it lives until the last of them dies.
struct Storage : Held {
  std::vector<std::pair<ValueId, Placement>> to_end;  // what is in it when the program ends
};

// lifetimes() by memory. Sources are there from the start of the phase in which they are read;
// small gradients that travel as one message (overlap.h) are there twice when it starts. With
// `phases` gradients are sums over micro-batches when the reduction begins, and not those of a
// pass.
// `messages`: of gradients (overlap.h).
std::vector<Storage> storages(const Theory& theory, const Program& program,
                              const Fractions& fractions, bool phases,
                              const std::vector<GradientMessage>& messages);

// Whether the pieces of a cut of a value are each one run of its elements.
bool is_one_run(const Theory& theory, ValueId value, Placement cut);

// A tensor of `bytes`, of which a device has its piece of a cut (of size 0: all).
struct Amount {
  Bytes bytes = 0;
  Cut cut;
  Bytes below = std::numeric_limits<Bytes>::infinity();  // of devices whose piece is larger: none
};
// [type] Local bytes at most.
void local_bytes(const Amount& amount, const Fractions& fractions, std::vector<Bytes>* local);

// What a step takes besides its operands and results while it runs: buffers of collectives,
// temporaries of operators and optimizers. Libraries keep more on some devices
// (DeviceType::reserved).
std::vector<Amount> workspace_of(const Theory& theory, const Step& step,
                                 const Fractions& fractions);
// Of the update of one parameter: tensors as large as its piece. A fused one has none.
double update_workspace(Optimizer optimizer);
// Of a reduction over replicas of gradients of so many bytes, the largest of `largest`: they travel
// in buckets, beside which there are copies in one run, or two pieces on their way.
Bytes bucket_workspace(Bytes all, Bytes largest);
constexpr Bytes kBucketBytes = 64 << 20;
// Elements of a random operator's result that are made together: in 64 bits, five of each at most.
constexpr int64_t kDrawnAtOnce = 1 << 20;
constexpr Bytes kSmallChange = 16 << 10;  // numbers beside tensors, sums of a row of channels
// What every worker holds for the whole step besides parameters and their state: the batch, of
// which it has all, and small change.
Bytes held_throughout(const Graph& graph);

}  // namespace motley
