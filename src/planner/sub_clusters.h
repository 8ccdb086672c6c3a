// The sub-clusters of which stages of the pipeline engine are slices (HAPT section 5.2).
//
// Equal devices in equal nodes are one. Sub-clusters between which the link is about as good as
// inside are also taken together, as one of unequal devices, so that stages may lie in devices of
// several types: node after node, the types one after another in any order, or in turns. So are
// alike machines of unequal devices, as nodes of one sub-cluster.
#pragma once

#include <vector>

#include "cluster/cluster.h"
#include "pipeline/search.h"

namespace motley::planner {

struct Part {
  pipeline::SubCluster shape;
  std::vector<int> devices;      // node by node
  std::vector<int> covers = {};  // of unequal devices: those of equal ones that it takes together
};

// Of equal devices, disjoint, in the order of the file: neighbours that are alike are one.
std::vector<Part> equal_parts(const Cluster& cluster);

// What may stand for some of `parts`, as equal_parts() returns them. REQUIRES: of `cluster`.
std::vector<Part> unequal_parts(const Cluster& cluster, const std::vector<Part>& parts);

// Sub-clusters of which one or more are of unequal devices: one such beside equal ones, and those
// that stand for different ones together. Of `parts` the first `equal` are equal_parts(), the others
// unequal_parts(); lists are of numbers into it.
std::vector<std::vector<int>> uses_of_unequal(const std::vector<Part>& parts, int equal);

// What pipeline k of `count` has of a part (as pipeline/search.h divides), in its order.
std::vector<int> share_of(const Part& part, int count, int k);

// [stage] The devices of pipeline k, ascending: in each part one stage's after another's, but where
// that would let a stage straddle nodes in vain (4, 8 and 4 devices of two nodes of 8), whole nodes
// first and the others into what is left of one node each, if they go there.
std::vector<std::vector<int>> seats_of(const std::vector<Part>& parts,
                                       const pipeline::PipelinePlan& plan, int k);

// The devices of a mesh where it starts first, ascending.
std::vector<int> devices_of(const Part& part, const pipeline::Mesh& mesh);

// The devices of every kind of sub-mesh that the pipeline engine may give a stage: the first ones
// of each sub-cluster of equal devices in equal nodes.
std::vector<std::vector<int>> stage_meshes(const Cluster& cluster);

}  // namespace motley::planner
