// What engines choose, and compose.h makes into a plan: the stages of replicas.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "core/units.h"

namespace motley::planner {

// Which blocks of a stage its backward passes compute again: none; as few as memory asks for; all.
enum class Again : uint8_t { never, if_needed, always };

struct StageChoice {
  int first = 0, last = 0;  // layers, last included
  std::vector<int> devices;
  Again again = Again::never;
  int in_flight = 0;  // micro-batches that it has room for, if it can; at least those of 1F1B
  // What its program is restricted to (program_plan.h), and its shares; empty: what PlanOptions
  // say, and the program's own. The same in all replicas.
  std::string strategy;
  std::vector<double> ratios;
};
struct ReplicaChoice {
  int micro_batches = 1;
  // The same layers in every replica. Stages may share their devices, as many on all.
  std::vector<StageChoice> stages;
};
struct Composition {
  int64_t micro_batch = 1;
  std::vector<ReplicaChoice> replicas;
  // Programs are searched for gradients that are reduced over ranks and replicas at once. Plans of
  // other compositions reduce them so where that is faster.
  bool joint = false;
  // The level at which replicas divide the state of parameters (plan/pipeline.h), in shares by the
  // room that their devices have. With `try_zero` level 1 where that is faster than 0. At level 3
  // the stages' own devices do: programs cut all parameters that can be cut, and hold them and
  // their gradients whole no longer than they use them (spmd/recompute.h, hold_pieces).
  int zero = 0;
  bool try_zero = false;
  // Where memory is short, a stage's program is searched for even if the best one with all
  // parameters cut fits and is not much slower than without a limit.
  bool thorough = true;
  std::string schedule;  // of schedule_table(), whose warm-up counts have to fit; empty: the best
  // Stages split their backward passes where that is faster.
  bool try_split = true;
  // Of a composition of one stage: no program is fitted into memory that would take longer than
  // this even if it fitted.
  Seconds worth = std::numeric_limits<double>::infinity();
};

}  // namespace motley::planner
