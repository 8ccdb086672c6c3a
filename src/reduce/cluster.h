// Reduction programs for the all-reduces of a cluster: what `motley plan` puts into a plan.
#pragma once

#include <optional>
#include <vector>

#include "cluster/cluster.h"
#include "core/deadline.h"
#include "net/reduction.h"
#include "net/topology.h"
#include "reduce/best.h"
#include "reduce/placement.h"

namespace motley::reduce {

// The levels of a cluster whose groups are alike at every depth.
std::optional<Hierarchy> hierarchy_of(const Cluster& cluster);

// [step] What part of the tensor the first group holds, which is what every group does; an
// all-gather makes it. REQUIRES: check(steps) is empty.
std::vector<double> held_in_steps(const std::vector<ReductionStep>& steps, int devices);

// The time of the steps, one after another, on rings of `network`; `bytes`: the whole tensor.
// REQUIRES: check(steps) is empty.
Seconds seconds_of(const std::vector<ReductionStep>& steps, const net::Topology& network,
                   Bytes bytes);

// What all-reduces over the groups should do instead of the plain collective while all groups
// reduce at the same time: a program for each group, or none for any if none is faster by 3% (20%
// through heads) for large tensors or the groups are not alike. REQUIRES: groups are disjoint, of
// one size.
//
// Where a group's part of the tree has groups that are alike, it is the fastest of P2's synthesis
// of at most three steps, on rings; otherwise tensors are reduced to the first device of every
// group, all-reduced among those, and broadcast. For a single group whose plain collective was
// measured, the program is taken to be as much faster as it is in simulation.
std::vector<ReductionProgram> reductions_of(const Cluster& cluster, const net::Groups& groups);

// One all-reduce over the devices of all groups, of a tensor of `bytes` and so of every size: the
// fastest of the plain collective as a program of one step, of what reductions_of says, and, where
// the groups are of one size, of three steps over two axes: reduce-scatter among the i-th members
// of all groups, all-reduce inside the groups, all-gather. REQUIRES: groups are disjoint.
ReductionProgram joint_reduction(const Cluster& cluster, const net::Groups& groups, Bytes bytes);

// The devices of a grid, numbered along its axes with the first axis most significant, in the
// placement where the reductions, each by its best program of at most three steps, take the least
// time together (place_jointly). Empty where the cluster's groups are not alike, or the axes are
// not as large as the cluster, or there are too many placements, or the deadline is over before one is
// priced; then it is the best of those that were.
std::vector<int> devices_jointly(const Cluster& cluster, const std::vector<int>& axes,
                                 const std::vector<Reduction>& reductions,
                                 const Deadline& deadline = {});

// What programs that were found for one cluster take on another with the same devices in the same
// tree but other links: their times change as in simulation. Those that reduce at the same time
// (equal times, equal collectives, disjoint devices) are simulated together.
void reprice(const Cluster& before, const Cluster& after, std::vector<ReductionProgram>* programs);

// Over all devices: at most one program.
std::vector<ReductionProgram> reductions_of_all(const Cluster& cluster);

}  // namespace motley::reduce
