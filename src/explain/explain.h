// Why a plan takes as long as it does, in words and numbers: what its step waits for, what each
// resource is worth, how full memory is, why large tensors are held as they are, and how much
// faster any plan could be.
//
// Everything is the event simulator's word. More of a resource is another cluster
// (cluster/resources.h) on which the same plan is simulated again; "replanned" is what planning
// anew for that cluster finds, the same plan being one candidate. What a tensor's other placements
// would cost is found by searching for the best program with the tensor held so (Theory::
// restrict_to), at the plan's shares, and simulating the plan with that program in the place of its
// own.
#pragma once

#include <string>
#include <vector>

#include "cluster/resources.h"
#include "core/deadline.h"
#include "explain/critical_path.h"
#include "plan/plan.h"

namespace motley::explain {

struct Options {
  double more = 1.1;    // of each resource
  bool replan = false;  // plan anew for more of each resource, too
  int tensors = 8;      // groups of tensors whose alternatives are looked for; 0: none
  bool path = true;     // the critical path, which takes a timeline
  double seconds = 10;  // that alternatives and replanning may take, about
};

struct Sensitivity {
  Resource resource;
  Seconds step = 0;       // of the same plan with that much more of it
  Seconds unlimited = 0;  // with a thousand times as much
  Seconds replanned = 0;  // 0: not planned anew
};

// How a group of equal tensors is held, and what other ways would cost.
struct TensorChoice {
  struct Other {
    std::string placement;
    bool feasible = false;
    std::string reason;  // why not
    Seconds step = 0, compute = 0, comm = 0;
    Bytes memory = 0;  // at the peak of the fullest device
  };
  std::string name;  // "block*.up.weight", "activations of aten::addmm"
  int stage = -1;    // -1: one program
  int count = 1;
  TensorSpec spec;
  Bytes bytes = 0;  // of all, whole
  std::string placement;
  Seconds compute = 0, comm = 0;  // of the plan as it is: busiest device, most in collectives
  Bytes memory = 0;
  std::vector<Other> others;  // nearest first
  std::string why;            // one sentence
};

struct MemoryUse {
  std::string group;  // of devices
  Bytes peak = 0, memory = 0;
};

struct Explanation {
  Seconds step = 0;
  Seconds lower_bound = 0;    // that the plan has; 0: none
  Seconds compute_bound = 0;  // of every plan on this cluster
  bool has_path = false;      // false: the timeline is too long to draw, or not asked for
  Path path;
  std::vector<Sensitivity> sensitivity;
  std::vector<MemoryUse> memory;
  std::vector<TensorChoice> tensors;
  bool out_of_time = false;          // some tensors or replanning were left out
  std::vector<std::string> verdict;  // what limits the step, in sentences, the first the answer
};

// REQUIRES: check(plan, false) finds nothing. The plan is changed while this runs, and is as it was
// afterwards.
Explanation explain(Plan* plan, const Options& options);

std::string to_text(const Plan& plan, const Explanation& explanation, const Options& options);
Json to_json(const Explanation& explanation, const Options& options);

}  // namespace motley::explain
