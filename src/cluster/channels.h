// Channels over direct links: the rings and chains that a collective of NCCL drives side by side.
//
//   four V100 of a DGX-1: 0-3 and 1-2 have two links, the other four pairs one. Two rings share
//   nothing, 0-1-2-3 and 0-2-1-3; both ways each they are four times as fast as one link
//
// The devices are vertices of a multigraph, of which every link is an edge. A ring of NCCL is a
// Hamiltonian cycle, and it is driven both ways; a chain (the part of a tree inside a machine) a
// Hamiltonian path. Channels share no link. A channel is as fast as the slowest of its links; we
// look for those that are fastest together. Five of the eight GPUs of a DGX-1 have no ring, as one
// of them has a single neighbour.
//
// The search is exact, by backtracking, with the bound that each ring takes two links of every
// device; after kTried steps it returns the best so far, which happens in meshes of more than eight
// devices only. tests compare it with all sets of all cycles.
#pragma once

#include <vector>

#include "cluster/cluster.h"

namespace motley {

struct Channel {
  std::vector<int> order;        // all devices, each once; a ring begins at 0
  BytesPerSecond bandwidth = 0;  // one way
  friend bool operator==(const Channel&, const Channel&) = default;
};

// Rings through the devices 0 .. n-1, n >= 2; two devices have one for each of their links.
std::vector<Channel> ring_channels(int n, const std::vector<DirectLink>& links);
// Chains. `first`: where each of them begins, -1: anywhere.
std::vector<Channel> chain_channels(int n, const std::vector<DirectLink>& links, int first = -1);

// A chain through all devices from one of `ends` to another of them, as NCCL's rings enter and leave a
// machine by one NIC; if there is none, from one of them to anywhere. Empty: there is none at all.
std::vector<int> chain_from(int n, const std::vector<DirectLink>& links,
                            const std::vector<int>& ends);

// The bytes a second that the rings carry together: twice as much as one way, except for two
// devices, whose rings need both directions of a link. 0: there is no ring.
BytesPerSecond ring_bandwidth(int n, const std::vector<Channel>& channels);

// Of a chain that sums up to its end and hands the sum back, both at once: NCCL counts half of the
// bandwidth of its links (its tuning model's ratio of trees inside a machine).
constexpr double kChainShare = 0.5;

// The bandwidth of the bus of an all-reduce, 2 (n - 1) / n bytes / seconds, by rings, or by chains
// where there is no ring; 0 if there are neither.
BytesPerSecond direct_bandwidth(int n, const std::vector<DirectLink>& links);

// The links that join two of `devices`, which are numbered in their order.
std::vector<DirectLink> links_among(const std::vector<DirectLink>& links,
                                    const std::vector<int>& devices);

}  // namespace motley
