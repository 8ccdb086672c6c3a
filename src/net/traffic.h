// What a collective puts on the network: for a group of devices, the chain of transfers of fluid.h.
//
// n devices, S bytes: the full buffer. (all_reduce, reduce, broadcast hold S; reduce_scatter starts
// from S and leaves S/n on each; all_gather makes S from S/n of each.) The first device of a group
// is the root of reduce and broadcast. Devices are visited in *physical order*, in which every
// group of the cluster tree is entered once, starting in the root's; a *run* is the devices of one
// leaf group.
//
//   algorithm      collective          transfers (bytes of a unit flow: which flows)
//   ring           all_reduce          2(n-1)/n S: one flow a hop, half clockwise, half the other way
//                  reduce_scatter,
//                  all_gather          (n-1)/n S: the same
//                  reduce, broadcast   S: a chain from (to) the root; half visits each run in order,
//                                      half in reverse
//   tree           all_reduce          S: up and down the edges of two trees with S/2 each. The trees
//                                      are complementary binary trees over the runs (an inner run
//                                      of one is a leaf of the other, or nearly), each run is a chain
//                  reduce, broadcast   S: up, or down; the root feeds both trees
//                  reduce_scatter      S: up as for reduce, down s/n S/2 over an edge above s devices
//                  all_gather          S: up s/n S/2, down (n-s)/n S/2
//   hierarchical   all_reduce          runs of equal size m: ring reduce_scatter in each run, ring
//                                      all_reduce of S/m across the i-th devices, ring all_gather;
//                                      unequal: reduce to each run's head, all_reduce of the heads,
//                                      broadcast
//                  reduce_scatter,
//                  all_gather          equal runs: the rings in the runs and those across; unequal:
//                                      through the heads, whose ring carries (n-m)/n S, m the
//                                      smallest run
//                  reduce, broadcast   chains in the runs and a chain across the heads
//   automatic      all                 the faster of ring and tree for the group by itself, as NCCL
//                                      chooses
//   direct         all_reduce          reduce_scatter, then all_gather
//                  reduce_scatter,
//                  all_gather          S/n: a flow from each to each
//                  reduce, broadcast   S: a flow from (to) each to (from) the root
//
// Inside a machine with direct links (cluster.h) channels are chosen as NCCL does
// (cluster/channels.h): rings along direct links alone, which share the bytes as they are fast; for
// trees, chains along them; where there are neither, hops go as paths do, by direct links or PCIe and
// host. A ring across machines with several NICs is as many rings, each from the device near one.
//
// Trees are those of NCCL (Sanders, Speck, Traeff 2009). A tree edge moves two streams through one
// device, which on real systems do not fill a link: `Tuning::tree_share` caps a tree's rate at that
// share of the narrowest link it crosses.
//
// Latency: a ring's is the sum of its hops times its rounds over n; a chain's the sum of its hops;
// a tree's the deepest path, twice for up and down; direct: the farthest pair.
//
// Cost: O(n * depth) for a group of n.
#pragma once

#include <string>
#include <vector>

#include "core/collective.h"
#include "net/fluid.h"
#include "net/topology.h"

namespace motley::net {

inline constexpr Collective kReductionCollectives[] = {
    Collective::all_reduce, Collective::reduce_scatter, Collective::all_gather, Collective::reduce,
    Collective::broadcast};
enum class Algorithm { ring, tree, hierarchical, direct, automatic };

const char* to_string(Algorithm algorithm);
// Throws UserError that lists the names.
Algorithm parse_algorithm(const std::string& name);

// What a lone tree takes of a link: NCCL's tuning model counts a tree's bandwidth half (its ratio of
// bus to algorithm is 0.5). P2's A100 rows, to which it is not fitted, say 0.61.
constexpr double kNcclTreeShare = 0.5;

struct Tuning {
  Seconds launch = 0;     // paid once by every collective before it moves data
  double tree_share = 1;  // of a link's bandwidth that one tree can use
};

// REQUIRES: at least two devices, all different; bytes >= 0.
Chain traffic(const Topology& topology, Collective collective, Algorithm algorithm,
              const std::vector<int>& devices, Bytes bytes, const Tuning& tuning = {});

// The time until all groups, started together, have finished.
Seconds collective_time(const Topology& topology, Collective collective, Algorithm algorithm,
                        const std::vector<std::vector<int>>& groups, Bytes bytes,
                        const Tuning& tuning = {});

// The parent of `rank` in the first of the two trees over `ranks` ranks; -1 for the root, rank 0.
int tree_parent(int ranks, int rank);
// The same in the second: the first mirrored if `ranks` is even, shifted by one if odd.
int second_tree_parent(int ranks, int rank);

}  // namespace motley::net
