// Layer assignment: cut a chain of layers into pipeline stages (AMP section 3.5), exactly.
//
// Given time[s][l], the forward and backward seconds of a micro-batch in layer l on stage s's
// devices, and transfer[s][l], the seconds to hand layer l's output from stage s to s + 1 and its
// gradient back, find the consecutive, non-empty ranges that minimise
//
//     (M - 1) max_s period_s + sum_s time of s + sum of transfers                  (eq. 5)
//
// for M micro-batches. A stage's period is its time, plus the transfers at both its ends if the
// runtime does not overlap them (`blocking`); else a link slower than every stage is the period.
// Ranges must fit: sum of memory[s][l] <= limit[s]. Every stage must hold a layer marked `block`
// (no stage of an embedding alone) where there are enough of them.
//
// Method. Let g(m) be the least sum over assignments whose periods are all <= m: a DP over (stages,
// cut) in O(P L), or O(P L^2) where links block. The optimum is min over m of (M - 1) m + g(m), and
// g falls with m. The least feasible m comes from a minimax DP, g(infinity) from the unbounded one;
// between two thresholds lo < hi nothing beats (M - 1) n + g(hi), n being the least period above lo
// that any range has, so intervals are halved, and dropped by that bound. A handful of DPs are
// solved instead of the paper's table over all m (O(P L^4)).
#pragma once

#include <vector>

#include "core/units.h"

namespace motley::grid {

struct Assignment {
  bool feasible = false;
  Seconds cost = 0;         // eq. 5
  Seconds period = 0;       // of the slowest stage or link
  std::vector<int> stages;  // layers of each
  int solves = 0;           // DPs run
};

struct AssignProblem {
  std::vector<std::vector<Seconds>> time;      // [stage][layer]
  std::vector<std::vector<Seconds>> transfer;  // [stage but the last][layer]
  std::vector<std::vector<Bytes>> memory;      // [stage][layer]; empty: no limit
  std::vector<Bytes> limit;                    // [stage]
  std::vector<bool> block;                     // [layer]; empty: any layer will do
  int micro_batches = 1;
  bool blocking = false;
  int stages() const { return static_cast<int>(time.size()); }
  int layers() const { return static_cast<int>(time[0].size()); }
};

// REQUIRES: at least one stage and one layer.
Assignment assign_layers(const AssignProblem& problem);

// Eq. 5 of a given assignment; infeasible if it breaks a limit or holds a degenerate stage.
Assignment price_assignment(const AssignProblem& problem, const std::vector<int>& stages);

// A named baseline: blocks shared out evenly, the first stage with what precedes them and the last
// with what follows.
std::vector<int> uniform_layers(const std::vector<bool>& block, int stages);

}  // namespace motley::grid
