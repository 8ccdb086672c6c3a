// Lower bounds of a step whose gradients are sent during the backward pass (cost/overlap.h), as
// prices of program searches.
//
// Let N be what the step takes without all-reduces of gradients, c_g how long the message of
// gradient g keeps the network busy, r_g what the backward pass computes before it starts and C all
// that it computes before the wait. Messages queue, so with h over the messages from g on
//
//     step = N + max(0, max over g of ( r_g + sum c_h ) - C)
//
// A message starts once its gradient is made. Hence, for any node i of the graph and with h over
// the gradients made by the node before i or later,
//
//     begin     step >= N - (computation from i on) + sum c_h
//     never     step >= N
//
// and, if another collective runs at or after node b, which all messages then wait for,
//
//     barrier   step >= N - (computation from b on) + sum of all c_g
//
// each with one device type in the place of the slowest. All are sums over nodes and values, and so
// is every mixture of them: the least price of a program under a mixture (weights >= 0 with sum 1)
// is a lower bound, and the best mixture is found like the weights of device types alone, by cutting
// planes (bounds/cutting_planes.h).
//
// The third holds for some programs only. So programs fall into classes by where their last such
// collective runs: at or after b, or before it. Of the second class no value first read from b on
// is converted, and no node from b on communicates inside, but for all-reduces of gradients: there
// the prices of a search are infinite. It may be divided again.
//
// What is left is the gap between programs and their mixtures: it takes two programs, of which one
// all-reduces a large gradient and the other does not, to hide exactly as much as can be hidden. So
// programs also fall into classes by whether they all-reduce a gradient. Of those that do not, that
// conversion is infinitely expensive; those that do pay for it anyway, so it is free and its price
// counts for all programs. Programs of the other class are then still in the search, but at a price
// that is not below their own: they are no cheaper for being left in.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "core/units.h"
#include "graph/graph.h"

namespace motley::spmd {

// The nodes of a graph by number in stretches: those before from[0] are in stretch 0, those from
// from[s] on in stretch s + 1 or later.
int stretch_of(const std::vector<int64_t>& from, int64_t node);

// Whether programs all-reduce a gradient.
struct Decision {
  ValueId gradient;  // as ProblemBuilder::reduced() names it
  bool reduced;
};

// What counts of a price.
struct OverlapPricing {
  std::vector<int64_t> from;                 // ascending
  std::vector<std::vector<double>> compute;  // [stretch][type] of seconds of computation
  std::vector<double> gradients;             // [stretch that it is ready in] of c_g; no less than
                                             // before
  int closed = std::numeric_limits<int>::max();  // stretch from which on nothing else communicates
  std::vector<Decision> decided = {};

  // nullptr: not decided.
  const Decision* decision(ValueId gradient) const;
  int stretch(int64_t node) const { return stretch_of(from, node); }
};

// One of the bounds above, for one device type.
struct OverlapBound {
  enum class Kind { begin, never, barrier };
  Kind kind;
  int stretch;  // at whose first node i or b is; of never: one past the last
  int type;
};

// All bounds for these stretches, those of a barrier at the beginning of one stretch only, of none
// if `barrier` is 0.
std::vector<OverlapBound> overlap_bounds(int stretches, int types, int barrier);

// The mixture of bounds by their weights, to be used with weights of 1 for all types.
OverlapPricing mixture(const std::vector<OverlapBound>& bounds, const std::vector<double>& weights,
                       std::vector<int64_t> from, int types);

// The parts of a program's cost, all synchronised.
struct OverlapCost {
  Seconds comm = 0;                           // collectives but gradients
  std::vector<std::vector<Seconds>> compute;  // [stretch][type]; the optimizer in the first
  std::vector<Seconds> gradients;             // [stretch that it is ready in] c_g
};

// [bound] of the step of such a program.
std::vector<double> overlap_values(const std::vector<OverlapBound>& bounds,
                                   const OverlapCost& cost);

}  // namespace motley::spmd
