// What no program takes less than on other devices of a cluster, or at other shares: certificates
// of a plan beyond those of its own devices and shares (synthesis.h).
//
// Ratios are one per device type here, as everywhere in this module, so that the shares of a type's
// devices together, y_t >= 0 of sum 1, say all of them. Bounds at boxes of such shares (certify.h)
// hold at every share inside, and get as tight as the bounds at single shares where boxes shrink:
// branch and bound over boxes. Boxes meet where pieces change; there, where a share is half-way
// between two integers, a size is divided as on one of both sides.
//
// Of a cluster a plan may leave out any devices. Choices that differ by an exchange of equal
// devices of a group, or of equal groups, take the same time. What is left are bounded one by one
// if they are few, and else together:
//
//   - computation alone: every operator is done once, so that fewer devices compute no faster
//     (least_seconds);
//   - choices of n_t devices of type t, n_t between two numbers, that no single group below the
//     root holds: compute as if all of the larger numbers were there, and communicate as the
//     smaller number of devices would through the fastest ports below the root, without anything
//     that depends on where shares lie. All-reduces in steps send what any all-reduce has to,
//     2 (m - 1) / m times the tensor, m the least number of such ports.
#pragma once

#include <functional>
#include <vector>

#include "planner/synthesis.h"

namespace motley::spmd {

// What a step of any program takes at least, on all devices of the model's cluster or some of them:
// every operator is done once, by devices that share it as they like and never wait. With u_d >= 0
// of sum 1, s_d(n) the seconds of operator n as a whole on device d and f_d(n) the part that the
// device does, of which the sum is at least 1,
//
//     step >= sum_d u_d sum_n f_d(n) s_d(n) >= sum_n min_d u_d s_d(n)
//
// since a part of an operator takes at least that part of its time. Devices weigh what they are
// fast.
class LeastSeconds {
 public:
  LeastSeconds(const Theory& theory, const CostModel& model);
  // `count` [type] devices.
  Seconds of(const std::vector<int>& count) const;

 private:
  struct Operators {
    int times = 0;
    std::vector<Seconds> seconds;  // [type] of one of them, as a whole
  };
  std::vector<Operators> operators_;
  std::vector<Seconds> all_;  // [type] of everything on one device
};

struct Elsewhere {
  // No program on any other devices takes less, at any shares; no more than the step it is asked
  // for.
  Seconds bound = 0;
  int searched = 0;  // boxes of shares that programs were searched for
  int64_t states = 0;
};

using Reductions = std::function<std::vector<ReductionProgram>(const Cluster&)>;

// A lower bound of the step of any program on all devices of the model's cluster, whatever the
// shares, no more than `step`. Goes on until it is within kWideGap of that, or about so many states
// are searched; with none, the bound is that of computation.
Elsewhere bound_at_any_shares(const Theory& theory, const CostModel& model,
                              const SynthesisOptions& options, Seconds step, int64_t states);

// The same of every choice of devices of a cluster but `devices` and those that are like them.
// REQUIRES: one segment; `devices` ascending, at least one.
Elsewhere bound_elsewhere(const Theory& theory, const Cluster& cluster,
                          const std::vector<int>& devices, const Reductions& reductions,
                          const SynthesisOptions& options, Seconds step, int64_t states);

// The choices of devices of a cluster, of those that are alike one; empty if they are more than
// `most`.
std::vector<std::vector<int>> choices_of_devices(const Cluster& cluster, int most);

}  // namespace motley::spmd
