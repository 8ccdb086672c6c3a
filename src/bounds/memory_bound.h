// Lower bounds of the step of programs that fit into memory, at given shares, whatever blocks they
// compute again.
//
// Any weights of device types, or of the bounds of overlap_pricing.h, and any multipliers of the
// bytes that a solution of memory_problem.h holds over the memory of a device make a price whose
// least is a lower bound (Lagrange). Cutting planes (cutting_planes.h) find those that prove
// most.
//
// What multipliers cannot see is that blocks run twice or not: the bound may be that of a mixture
// of programs, seven and a half blocks of one kind. So programs are divided, by branch and bound,
// into those with up to so many such blocks and those with more, each with a multiplier for that.
//
// Programs between two of a mixture are looked at too, node by node from the one to the other: a
// mixture may fill the memory that neither does.
#pragma once

#include <functional>
#include <vector>

#include "bounds/certify.h"
#include "solver/problem.h"
#include "spmd/build.h"

namespace motley::bounds {

// What a bound is wanted of.
struct MemoryBoundRequest {
  const Fractions* fractions;
  const std::vector<int>* block_of;  // as by blocks_of(); all -1: nothing is computed again
  bool overlap;                      // gradients are sent during the backward pass
  ValueId first;                     // with overlap: see hidden_seconds()
  std::function<Seconds()> step;     // no bound is looked for that is nearer to it than need be
  // Told of programs that searches find, solutions of a builder's problem: they compute nothing
  // again, and need not fit. They may lower the step.
  std::function<void(const solver::Solution&)> found;
  std::function<bool(const Effort&)> enough;  // no search but the first begins once it says so
};

struct MemoryBound {
  Seconds bound = 0;  // no more than the step; 0: none was found
  Effort effort;
};

// REQUIRES: programs run once in a step.
MemoryBound memory_bound(const Theory& theory, const CostModel& model, Optimizer optimizer,
                         spmd::Restriction restriction, const solver::Limits& limits,
                         const MemoryBoundRequest& request);

}  // namespace motley::bounds
