// Gradients that travel while the backward pass goes on.
//
// A program's all-reduces of gradients stand at its end, and until then nothing but the optimizer
// waits for them. So the executor sends each as soon as its operand is there, several small ones as
// one message, and waits where the program has them. A message starts no earlier than after the
// last other collective before its end, so that it delays none; one of a pair of programs that
// differ in nothing else is never slower for it.
//
// The costs of cost.h are stage-synchronised, as HAP's are: hidden_seconds is how much shorter the
// step is than that. Beside messages computation is slower (DeviceType::interference).
#pragma once

#include <vector>

#include "cost/cost.h"

namespace motley {

struct GradientMessage {
  int ready = 0;           // step of the program after which it may start
  std::vector<int> steps;  // its all-reduces, ascending; all come after `ready`
};

// Whether each step is a collective that no gradient overlaps with: any but all-reduces of pure
// gradients. Boundaries between segments that move nothing at these shares are none.
std::vector<bool> barriers(const Theory& theory, const Program& program, const Shares& shares);

// In the order in which they start. Every all-reduce of a pure gradient is in one message; those of
// one message have one dtype and lie in one phase.
std::vector<GradientMessage> gradient_messages(const Theory& theory, const Program& program,
                                               const Shares& shares);

// [step] Of a program whose collectives travel beside computation (shard/duplex.h): where the
// message ends that begins with this step: all-reduces of pure gradients of one type that stand side by
// side, in messages of the program's sizes. Of other steps, -1.
std::vector<int> gradient_buckets(const Theory& theory, const Program& program);

// Seconds for which a gradient keeps the network busy at least, alone or as part of a message of
// these sizes; of kLargestSizes: of any sizes.
Seconds message_seconds(const CostModel& model, const TensorSpec& gradient,
                        const GradientSizes& sizes);

// Seconds by which a step is shorter than cost_of(...).step; 0 over a backend that hides nothing.
// Slightly negative where many messages pay latencies that one would not and nothing is there to hide
// them.
//
// `first`, if given: the gradient from whose message on the network is busy until it is waited for;
// not valid if all messages arrive in time. Of these messages together, no more is hidden than
// there is computation after it.
Seconds hidden_seconds(const Theory& theory, const Program& program, const CostModel& model,
                       const Fractions& fractions, ValueId* first = nullptr);

// What cost_of() charges for the gradients of a program in messages of these sizes, if nothing that
// takes time lies between them.
Seconds gradient_seconds(const Theory& theory, const Program& program, const GradientSizes& sizes,
                         const CostModel& model);

// Sizes that are worth a try: powers of four, the usual ones first.
std::vector<GradientSizes> usual_sizes();

struct SizesTried {
  GradientSizes sizes;
  Seconds waited;  // a step, for gradients
};
// Sizes with which a step waits for its gradients less than with the program's, by more than `worth`
// seconds; the best first. Empty where all waiting is not worth as much.
std::vector<SizesTried> try_sizes(const Theory& theory, const Program& program,
                                  const CostModel& model, const Fractions& fractions,
                                  Seconds worth);

}  // namespace motley
