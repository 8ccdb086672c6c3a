// From what messages between workers take to the tree of groups that explains it.
//
//   bandwidth   0    1    2    3          0 and 1 are a group, 2 and 3 are one; between the two there
//   0                1.0  0.1  0.1        is a slower link:
//   1           1.0       0.1  0.1
//   2           0.1  0.1       1.0          [0.1] -+- [1.0] -- 0, 1
//   3           0.1  0.1  1.0                      +- [1.0] -- 2, 3
#pragma once

#include <vector>

#include "core/units.h"

namespace motley::discover {

// Measured between pairs of workers, alone: [from][to]. Latency: one way, of an empty message.
struct Distances {
  std::vector<std::vector<BytesPerSecond>> bandwidth;
  std::vector<std::vector<Seconds>> latency;

  explicit Distances(int size);
  int size() const { return static_cast<int>(bandwidth.size()); }
};

// Workers that are joined by a link, or groups of them.
struct Level {
  std::vector<int> workers;      // all below, in the order of groups
  std::vector<Level> groups;     // empty: the workers themselves are joined
  BytesPerSecond bandwidth = 0;  // of a port of this link, in one direction
  Seconds latency = 0;           // one way, beyond that inside of the groups
  BytesPerSecond port = 0;       // of this group on the link above
};

// Two measurements are of one level if they differ by less.
constexpr double kAlike = 1.2;          // of bandwidths
constexpr double kAlikeLatency = 1.35;  // of latencies, ...
constexpr Seconds kNoLatency = 40e-6;   // ... but for so little, which is noise

// The tree with the fewest levels whose slowest port and added latencies explain every pair. Workers
// of one machine (equal numbers) are never torn apart by workers of another. Where groups differ in
// what they reach of others, the slower ones have a slower port.
Level levels_of(const Distances& distances, const std::vector<int>& machines);

// What such a tree says of a pair.
BytesPerSecond bandwidth_between(const Level& level, int a, int b);
Seconds latency_between(const Level& level, int a, int b);

}  // namespace motley::discover
