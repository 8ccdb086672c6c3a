// HAP's outer loop (section 3.1): program and ratios optimise each other until they repeat; the
// best pair is returned.
//
//     Q(s) = argmin over programs of t(Q, B(s-1))      folded search on prices weighted over device
//     types B(s) = argmin over ratios of t(Q(s), B)          load-balancing LP
//
// starting from ratios proportional to speed and, again, from equal ones; then, to an end of their
// own, from proportional ones without the devices of one type where communication leaves room, and
// at prices of the slowest type where types wait for one another in turn, and, where gradients are
// hidden and the lower bound is far, at shares between those with and without a type. The weights
// of the types are the duals of the LP's stage constraints. Per-device memory is a hard limit: a
// program that exceeds it is also tried with the cheapest blocks computed again, and programs are
// searched again with a price per byte, found by the secant method on the dual.
//
// A graph of several segments (graph/segment.h) has ratios for each of them. Its rounds first keep
// all segments to the same ratios, as if there were one; they go on from the best pair with ratios
// of their own, and from proportional ratios in one segment and equal ones in the others, and the
// reverse. So segments are no worse than one.
//
// Where gradients overlap with the backward pass (cost/overlap.h), pairs are compared by what is
// left of the step, a last round searches with gradients priced at what cannot be hidden, and the
// lower bound is the one of overlap_pricing.h.
#pragma once

#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "cost/cost.h"
#include "plan/plan.h"
#include "solver/problem.h"
#include "spmd/build.h"

namespace motley::solver {
class OrderMemo;
}

namespace motley::planner {

struct Alternation;
class AlternationSearch;

constexpr double kWorthOtherSizes = 1e-3;  // of the step: what messages of other sizes have to gain
constexpr double kNearly = 1.1;  // times the best step: what is within is improved and bounded too

struct AlternationOptions {
  Optimizer optimizer = Optimizer::adamw;
  spmd::Restriction restriction = spmd::Restriction::none;
  int redundancy = 0;  // 1: what is cut is kept twice (cluster/second_holders.h)
  bool memory_limit = true;
  bool recompute = true;       // where memory is short, blocks may be computed again (recompute.h)
  bool overlap = false;        // gradients overlap with the backward pass
  bool sizes = true;           // which may be in messages of other sizes then
  std::vector<double> ratios;  // fixed ratios, of all segments; empty: found
  bool polish = true;          // also try shares near those of the best pair
  const Alternation* known = nullptr;  // a pair that the answer must not be worse than
  bool certify = true;                 // false: lower bounds are what the search gives for nothing
  // What lower bounds may cost: states of their program searches, about; and work, in parts of what
  // the search took before them (but never less than a little).
  int64_t certify_states = 4'000'000;
  double certify_work = std::numeric_limits<double>::infinity();
  // An answer that takes longer than this is not certified, and one that takes much longer is not
  // looked for as hard.
  Seconds certify_below = std::numeric_limits<Seconds>::infinity();
  // Of one run: what takes longer at shares in proportion to speed is not searched for.
  Seconds worth = std::numeric_limits<Seconds>::infinity();
  std::function<void(Seconds)> found;   // told of steps of pairs that fit; empty: nobody is
  solver::OrderMemo* orders = nullptr;  // for searches of like programs; null: none
  // What a like search left (folded.h, WarmStart), in; what this one leaves, out; null: none. Where
  // limits of states are met, the answer may depend on it.
  std::vector<double>* warm = nullptr;
  int micro_batches = 1;    // the program runs that often in a step; costs are of one run
  double memory_price = 0;  // seconds per byte that a like problem needed: where to begin; 0: none
  // Of each program search. Where bounds are loose (experts on few devices), states are many; the
  // costliest are dropped, and the lower bound of the answer says what that may have lost.
  solver::Limits limits{.max_states = 2000};
};

struct Alternation {
  bool feasible = false;
  std::string reason;  // infeasible: which device type lacks how much; else why the search stopped
  // Infeasible: what the leanest program that was seen needs beyond the memory of the type that
  // lacks most; 0 if none was seen.
  Bytes excess = 0;
  bool slow = false;  // infeasible: any program takes longer than it is worth
  Program program;
  Ratios ratios;       // [segment][device], sum 1 each
  ProgramCost cost;    // of program at ratios, nothing hidden
  Seconds hidden = 0;  // of it behind the backward pass, if `overlap`
  // Of cost.step - hidden, of any program at these ratios; of any that fits, if bounds that know no
  // memory are loose.
  Seconds lower_bound = 0;
  // Of cost.step, of any program at these ratios, if the overlap leaves a gap of more than 1%; else
  // 0.
  Seconds synchronised_bound = 0;
  Seconds step() const { return cost.step - hidden; }
  double memory_price = 0;  // seconds per byte at which it was found; 0: without
  int rounds = 0;           // (Q, B) iterations
  int solves = 0;           // program searches
  int64_t states = 0;
  double seconds = 0;
};

// Throws TimeIsUp if the deadline of the limits passes before anything is found.
Alternation alternate(const Theory& theory, const CostModel& model,
                      const AlternationOptions& options);

// An alternation that goes on. Of what is handed to it, theory and model outlive it.
class Alternator {
 public:
  Alternator(const Theory& theory, const CostModel& model, const AlternationOptions& options);
  ~Alternator();
  Alternation run();
  // What run() leaves out where options do not `certify`: lower bounds, if the best pair takes no
  // longer than `below`; and rounds elsewhere, if it takes not much longer and bounds are far.
  // REQUIRES: run() found something.
  Alternation certify(Seconds below);

 private:
  std::unique_ptr<AlternationSearch> search_;
};

// Ratios proportional to the devices' speed at what the graph mostly does, and equal ones.
std::vector<double> proportional_ratios(const Cluster& cluster);
std::vector<double> even_ratios(const Cluster& cluster);

}  // namespace motley::planner
