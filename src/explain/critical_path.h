// What a step waits for: the critical path of the simulated timeline, and who waits for whom.
//
// The path is walked backwards from the device that is done last. What a device does belongs to the
// path; where it waited, the path goes on at whoever ended the wait: the device that came last to a
// collective, or the message from another stage and then the stage that sent it. So the parts of
// the path add up to the timeline's end, and any of them, shortened alone, shortens the step until
// another path is the longest.
//
//   2 devices, an all-reduce that device 1 reaches last:
//     device 0   compute 3 s, wait 1 s, all_reduce 2 s       path: device 1 computes 4 s,
//     device 1   compute 4 s,           all_reduce 2 s             all_reduce 2 s
//
// Cost: O(spans log spans).
#pragma once

#include <string>
#include <vector>

#include "plan/plan.h"
#include "sim/simulate.h"

namespace motley::explain {

struct PathPart {
  std::string what;  // "A100-40GB: forward", "stage 1 on V100-32GB: backward", "message ..."
  Seconds seconds = 0;
  int times = 0;  // stretches of the path
};

struct Wait {
  std::string who, whom;  // "V100-32GB", "A100-40GB"; "the end of the step"
  std::string why;        // "all_reduce", "its forward passes", "messages from stage 0 to 1"
  Seconds seconds = 0;    // of each of those that wait, on average
};

struct Path {
  std::vector<PathPart> parts;  // longest first
  std::vector<Wait> waits;      // longest first
  Seconds end = 0;  // of the timeline, which draws gradients that travel beside the backward pass
                    // behind it: a step may end earlier
};

// REQUIRES: the simulation has spans.
Path critical_path(const Plan& plan, const Simulation& simulation);

}  // namespace motley::explain
