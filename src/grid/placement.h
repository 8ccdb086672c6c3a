// Device placement: which device is which rank (AMP sections 3.6 and 4.2).
//
// A *group* is the cp * tp ranks of one (stage, replica); it wants to lie inside one node (leaf
// group of the cluster tree). Three ways to place groups:
//
//   heuristic    Megatron's: tensor parallelism innermost, then data or pipeline parallelism in
//                what is left of a node, nodes in file order; here for both orders of the axes and
//                every order of node classes (same devices, links and uplink), so that a slow
//                class may hold the first stages, the last, or be left out
//   enumerate    every placement of groups on nodes up to symmetry: untouched nodes of one class
//                under one parent are interchangeable, so are devices of a node and, in the first
//                stage, replicas. For small clusters; stops at a limit
//   annealing    swaps of groups, used or left out (search.h)
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "cluster/cluster.h"

namespace motley::grid {

// Distinct placements, each a list of pp * dp * size devices in rank order. Empty if the cluster
// has too few devices.
std::vector<std::vector<int>> heuristic_placements(const Cluster& cluster, int pp, int dp,
                                                   int size);

// Calls visit(devices) for each placement whose groups lie inside nodes. Returns false if `limit`
// placements were visited and there were more.
bool enumerate_placements(const Cluster& cluster, int pp, int dp, int size, int64_t limit,
                          const std::function<void(const std::vector<int>&)>& visit);

// Classes of leaf groups: equal number, equal class. Leaf groups are numbered as in the file.
struct Nodes {
  std::vector<std::vector<int>> devices;  // [node]
  std::vector<int> kind;                  // [node]
  std::vector<int> parent;                // [node] group
  int kinds = 0;
};
Nodes nodes_of(const Cluster& cluster);

}  // namespace motley::grid
