// What programs cost on a network, and the fastest one.
//
// Steps run one after another; in a step all groups start together and share the links
// (net/fluid.h). The time of a program is the sum of its steps, and a step depends on the form, the
// collective and how much of the buffer is held, so that few different steps are ever simulated.
// `Algorithm::tree` means what it means in NCCL: all_reduce runs on trees, everything else on
// rings.
//
// best_program searches the graph of states best first (branch and bound) instead of listing
// programs, and simulates a step only when nothing with a lower bound is left. Both bounds look at
// what enters the devices below one unit of a hierarchy level, through that unit's port:
//
//   a state   if the unit's devices together lack contributions from outside to a share of the
//   chunks,
//             those chunks must still come in, each at least once, for every reduction group there
//   a step    a group that crosses the unit's boundary brings in at least S (reduce_scatter: the
//   unit's
//             share of S; all_gather: all but that; reduce, broadcast: S into units with a root, or
//             without)
//
// and the time is at least those bytes over the port's bandwidth, plus the launch. The shares of a
// state come from ProgramState::lack, worked out on levels of size 2: a unit lacks none of the
// chunks, all, or all but those it has scattered to itself, 1 - 1/n of them for a product n of
// scattered sizes, which is least for the smallest scattered level.
//
// place_jointly chooses one placement for several reductions, weighted by their bytes, with a
// program for each: the least sum of times. Placements are taken in order of their bounds, and one
// is left as soon as what it has cost and the bounds of its remaining reductions reach the best sum
// known.
//
// Cost: a simulation of O(devices * depth) per different step; the search itself is small.
#pragma once

#include <limits>
#include <map>
#include <optional>
#include <tuple>
#include <vector>

#include "core/deadline.h"
#include "net/topology.h"
#include "net/traffic.h"
#include "reduce/synthesis.h"

namespace motley::reduce {

struct CostModel {
  const net::Topology* network = nullptr;  // its devices are those of the hierarchy, in order
  net::Algorithm algorithm = net::Algorithm::ring;
  net::Tuning tuning;
};

// The costs of one reduction in one placement.
class PlacementCost {
 public:
  PlacementCost(const CostModel& model, Bytes bytes, const Hierarchy& hierarchy,
                const Matrix& matrix, const std::vector<int>& reduce_axes,
                Numbering numbering = Numbering::level_major);

  const SynthesisHierarchy& hierarchy() const { return synthesis_; }
  int levels() const { return static_cast<int>(synthesis_.levels.size()) - 1; }

  // A step taken where the levels in `scattered` are scattered.
  Seconds step(const Step& step, uint32_t scattered);
  Seconds program(const Program& program);
  Seconds all_reduce();  // the single all_reduce over each reduction group
  // Lower bounds: on the time from a state to the goal, and of a step.
  Seconds at_least(const ProgramState& state) const;
  Seconds at_least(const Step& step, uint32_t scattered) const;

  int64_t steps_simulated() const { return static_cast<int64_t>(known_.size()); }

 private:
  // The devices below one unit of the system's level; without a bound, infinitely fast.
  struct Unit {
    int devices = 1;
    int copies = 1;  // reduction groups present
    BytesPerSecond slowest = std::numeric_limits<double>::infinity();
    BytesPerSecond fastest = std::numeric_limits<double>::infinity();
  };
  // S of the step: what all_gather makes, what the others start from.
  Bytes buffer(const Step& step, uint32_t scattered) const;

  CostModel model_;
  Bytes bytes_;
  SynthesisHierarchy synthesis_;
  std::vector<Unit> units_;  // [level of the synthesis hierarchy]
  std::map<std::tuple<int, int, int, int, uint32_t>, Seconds> known_;
};

struct BestProgram {
  Program program;
  Seconds seconds = 0;
  int64_t states_expanded = 0;
};

// The fastest program of the space; of equally fast ones, one with the fewest steps. Throws TimeIsUp
// once the deadline is over.
BestProgram best_program(const ProgramSpace& space, PlacementCost* cost,
                         const Deadline& deadline = {});

// The program spaces of one size limit, by number of levels, each explored once.
class ProgramSpaces {
 public:
  explicit ProgramSpaces(int size_limit) : size_limit_(size_limit) {}
  const ProgramSpace& of(int levels);

 private:
  int size_limit_;
  std::map<int, ProgramSpace> spaces_;
};

struct Reduction {
  std::vector<int> axes;
  Bytes bytes = 0;
};

struct JointPlacement {
  Matrix matrix;
  std::vector<BestProgram> programs;  // one per reduction
  Seconds seconds = 0;                // their sum
  int placements = 0;                 // considered
  int64_t searches = 0;               // reductions priced; the rest were cut by bounds
};

// The best of those that were priced when the deadline was over; throws TimeIsUp if none was.
JointPlacement place_jointly(const CostModel& model, const Hierarchy& hierarchy,
                             const std::vector<int>& axes, const std::vector<Reduction>& reductions,
                             int size_limit = 5, const Deadline& deadline = {});

}  // namespace motley::reduce
