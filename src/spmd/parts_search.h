// Which program is best where the batch is taken in parts (shard/duplex.h), and how it is divided.
//
// A division into stages is found for a given program (stage_division.h). Programs are looked for at
// prices w * computation + (1 - w) * communication: for every w the least price bounds
//
//     t >= max(sum of computation, sum of communication) >= w computation + (1 - w) communication
//
// of all programs, as in a Lagrangian dual. The programs found so are then polished: node by node the
// option that makes the divided program fastest, until none does.
#pragma once

#include <vector>

#include "solver/order.h"
#include "solver/problem.h"
#include "spmd/stage_division.h"

namespace motley::spmd {

struct PartsSearch {
  int parts = 2;
  std::vector<double> interference;  // [type]
  solver::Limits limits;
  int weights = 7;      // that are tried
  int polish = 20'000;  // divisions that polishing may take, about
};

struct PartsProgram {
  solver::Solution solution;  // no options: there is none
  Divided divided;
  Seconds lower_bound = 0;  // of every program in parts, divided as it may be
};

// The steps of a solution: nodes in order, every conversion in front of its first reader.
DivisionProblem division_of(const solver::Problem& problem, const solver::Solution& solution,
                            const PartsSearch& search);

PartsProgram search_in_parts(const solver::Problem& problem, const solver::Order& order,
                             const PartsSearch& search);

}  // namespace motley::spmd
