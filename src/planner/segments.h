// How many segments pay (HAP section 5.2): SPMD programs of a model cut into segments, planned one
// after another and compared by the event simulator.
#pragma once

#include <string>
#include <vector>

#include "planner/options.h"
#include "planner/program_plan.h"

namespace motley::planner {

// One way to cut the model that was planned for.
struct Segmented {
  std::string what;  // "2 segments by flops", "segments features, classifier"
  int segments = 1;
  bool feasible = false;
  Seconds simulated_s = 0;
  double search_s = 0;
};

// The better of a plan of one segment and the best that cuts `graph`, the graph it is of, as asked
// for, on the devices of that plan (on all of `cluster` if nothing fits in one segment). What was
// tried is appended to `tried`.
ProgramResult plan_segments(ProgramResult one, const Graph& graph, const Cluster& cluster,
                            const ProgramRequest& request, const SegmentRequest& segments,
                            std::vector<Segmented>* tried);

}  // namespace motley::planner
