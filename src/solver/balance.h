// Load balancing (HAP section 5.1): the sharding ratios that make a fixed program fastest.
//
// A program is a list of stages, each a communication followed by computation on every device
// (section 3.2). Devices come in types: type j has n_j identical devices, each of which gets the
// share b_j of whatever is sharded. A stage computes for a_j b_j + r_j seconds on type j (sharded
// and replicated work), and communicates for comm_fixed + comm_padded * M seconds, M being the
// largest share (collectives pad shards to the largest). So
//
//     minimise   sum_i ( comm_fixed_i + comm_padded_i M + t_i )
//     subject to t_i >= a_ij b_j + r_ij,   sum_j n_j b_j = 1,   0 <= b_j <= M,
//                sharded_j b_j + fixed_j <= capacity_j        bytes on each device of type j.
//
// Section 5.2 gives each segment of the model ratios of its own. HAP puts an all-to-all at every
// boundary and solves segments one by one; here segments are solved in one program, coupled by
// memory, by stages that lie in several, and by what boundaries move: with A and B the shares of
// two segments below device i (prefix sums), a port over devices [f, e) sends
//
//     (A_e - B_e)^+ + (B_f - A_f)^+
//
// of the tensor and receives the same with A and B exchanged, which is exact where what the port
// held and what it needs meet, more where they do not, and convex: t >= it for every port.
//
// The dual of t_i >= a_ij b_j + r_ij is the weight of type j in stage i: how much of the stage type
// j decides. Summed over stages and normalised, these are the weights with which the next program
// search should price compute; the duals of the memory rows are its prices of bytes.
//
// Stages equal up to a factor are merged first: the linear program has one row per type for each
// different one, not for each layer. It is solved by CLP, in well under a millisecond.
#pragma once

#include <vector>

#include "solver/problem.h"

namespace motley::solver {

struct BalanceStage {
  double comm_fixed = 0, comm_padded = 0;  // seconds; seconds per unit of the largest share
  // a_j: seconds if one device did all of the sharded work, [type] of the stage's segment or
  // [segment * types + type] of all.
  std::vector<double> sharded;
  std::vector<double> replicated;  // [type] r_j: seconds
  int segment = 0;                 // of M, and of `sharded` where that is of one segment
};

// What crosses a port between devices in one direction of an exchange between segments.
struct BalancePort {
  std::vector<double> before, until;  // [type] devices below the first, and below the end, of it
  double seconds_per_byte = 0;
};

// Bytes of the tensors that boundaries between two segments pass, either way.
struct BalanceExchange {
  int a = 0, b = 0;
  double bytes = 0;
};

struct BalanceProblem {
  std::vector<int> devices;  // [type] n_j >= 1
  std::vector<BalanceStage> stages;
  std::vector<std::vector<double>> sharded;  // [segment][type] bytes of a device holding all shards
  std::vector<double> fixed;                 // [type] bytes on every device
  std::vector<double> capacity;              // [type] bytes; may be infinite
  std::vector<BalanceExchange> exchanges;
  std::vector<BalancePort> ports;
};

struct Balance {
  bool feasible = false;
  std::vector<std::vector<double>> ratio;  // [segment][type] b_j
  double seconds = 0;                      // of the step under these ratios
  Weights weights;                         // for the next program search
  // When infeasible: the bytes each device of a type lacks, chosen so that the total over all
  // devices is least.
  std::vector<double> lacking_bytes;  // [type]
  int rows = 0;                       // stages after merging
};

// Of one type of devices, that fits, without a linear program.
Balance balance(const BalanceProblem& problem);
// The same always by a linear program.
Balance balance_by_linear_program(const BalanceProblem& problem);

// What a program costs under fixed ratios if the device types took turns: under weights w it is
// priced comm + sum_j w_j compute_j, at most the time of its step. With limits that it has to keep,
// and multipliers m of them, sum_k m_k excess_k is added: no more than 0 if it keeps them.
struct PriceLine {
  double comm = 0;                  // seconds
  std::vector<double> compute;      // [type] seconds
  std::vector<double> excess = {};  // [limit] over it, seconds
};

// The weights (>= 0, sum 1) and multipliers of limits (between 0 and `most`) under which the
// cheapest of the lines costs most. Searching programs there and adding what is found raises the
// least price to its greatest (Kelley's cutting planes on the Lagrangian dual): the best bound that
// one vector of weights can prove. `price` is what no bound of this kind exceeds.
// REQUIRES: at least one line; all of one length.
struct MaxMin {
  std::vector<double> weights;      // [type]
  std::vector<double> multipliers;  // [limit]
  std::vector<double> mix;          // [line] sum 1: the mixture of lines that costs as little under
                                    // any weights and multipliers
  double price = 0;                 // of the cheapest line
};
MaxMin max_min(const std::vector<PriceLine>& lines, double most = 0);
double price(const PriceLine& line, const MaxMin& at);

// The time of the step under given ratios.
double step_seconds(const BalanceProblem& problem, const std::vector<std::vector<double>>& ratio);

}  // namespace motley::solver
