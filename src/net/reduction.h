// An all-reduce taken in steps: what a plan does in place of the plain collective.
//
// Every step is one collective on disjoint groups of devices; the first of a group is the root of
// reduce and broadcast. P2's synthesis finds such programs (reduce/); a plan records them and the
// runtime executes them. The tensor is cut into as many chunks as there are devices, of which a
// device holds some at a time (device_states.h).
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "core/units.h"
#include "net/device_states.h"

namespace motley {

struct ReductionStep {
  Collective collective = Collective::all_reduce;
  net::Groups groups;  // ranks in the reduction, each at most once; a rank in none sits it out
  friend bool operator==(const ReductionStep&, const ReductionStep&) = default;
};

constexpr int kMostReduced = 8192;  // devices that reduce in steps

struct ReductionProgram {
  std::vector<int> devices;          // [rank]; empty: all of the cluster in order
  std::vector<ReductionStep> steps;  // among ranks
  Bytes from = 0;                    // tensors of at least this size take it
  // Its time: fixed + bytes * seconds_per_byte, and no less than `least`, which is what small ones
  // take where that was measured (CollectiveRate::least). Informative: a cost, not a rule.
  Seconds fixed = 0;
  double seconds_per_byte = 0;
  Seconds least = 0;
  Seconds seconds(Bytes bytes) const { return std::max(least, fixed + bytes * seconds_per_byte); }
  friend bool operator==(const ReductionProgram&, const ReductionProgram&) = default;
};

// Those for exactly these devices, in this order, out of a cluster of `cluster_size`.
std::vector<ReductionProgram> programs_for(const std::vector<ReductionProgram>& programs,
                                           const std::vector<int>& devices, int cluster_size);

// What is wrong with the steps as an all-reduce of `devices`, as a sentence; empty if after them
// every device holds the sum of all. Trusts nothing.
std::string check(const std::vector<ReductionStep>& steps, int devices);

}  // namespace motley
