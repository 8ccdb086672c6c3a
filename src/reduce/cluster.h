// Reduction programs for the all-reduces of a cluster: what `motley plan` puts into a plan.
#pragma once

#include <optional>
#include <vector>

#include "cluster/cluster.h"
#include "net/reduction.h"
#include "net/topology.h"
#include "reduce/placement.h"

namespace motley::reduce {

// The levels of a cluster whose groups are alike at every depth.
std::optional<Hierarchy> hierarchy_of(const Cluster& cluster);

// The time of the steps, one after another, on rings of `network`; `bytes`: the whole tensor.
// REQUIRES: check(steps) is empty.
Seconds seconds_of(const std::vector<ReductionStep>& steps, const net::Topology& network,
                   Bytes bytes);

// What all-reduces over all devices should do instead of the plain collective, at most one program;
// empty if none is faster by 3% for large tensors, and for clusters of one level. With groups that
// are alike it is the fastest of P2's synthesis of at most three steps, on rings; otherwise tensors
// are reduced to the first device of every group, all-reduced among those, and broadcast. Where the
// plain collective was measured, the program is taken to be as much faster as it is in simulation.
std::vector<ReductionProgram> reductions_of(const Cluster& cluster);

}  // namespace motley::reduce
