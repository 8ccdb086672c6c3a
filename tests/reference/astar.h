// The paper's engine: A* over partial programs (HAP section 4.3, Figure 10; notation of the paper
// in brackets).
//
// A partial program [Q] is a list of instructions, known by its set of properties [P(Q)]: which
// forms of which values are available, and which nodes have been executed. Any instruction [Hoare
// triple] whose precondition holds and which adds a property may come next: an option of a node,
// once per node, or a conversion of an available value. A program is complete when all nodes are
// executed. Of two programs that executed the same nodes, one is dropped if the other has all its
// properties and costs no more.
//
// ecost: every remaining node at its cheapest option, conversions free.
//
// Costs, by choice:
//  - additive: the price of problem.h; the optimum is that of the folded search.
//  - stage-synchronised (section 3.2): instructions that communicate (a conversion that is not
//  free, an option with
//    comm > 0) end a stage; a stage costs its communication and the longest compute of any device
//    type. The cost of a partial program counts to its last synchronisation point; what the open
//    stage has computed so far is kept per type and compared per type.
//
// The optimisations of section 4.5, each a switch:
//  - fuse_sources: a node without inputs is executed right before the first instruction that uses
//  it. It moves compute
//    of sources between stages, so under stage-synchronised cost it is exact if sources compute
//    nothing.
//  - communicate_once: at most one communication per value, none of a source's. Loses optimality;
//  off by default.
//  - drop_redundant: forms that no remaining node can use, directly or converted, leave the
//  property set.
//
// Cost: exponential in the width of the graph. For graphs of tens of nodes, and as a reference of
// the folded search.
#pragma once

#include <vector>

#include "solver/problem.h"

namespace motley::solver {

struct AStarOptions {
  bool stages = false;
  bool fuse_sources = true;
  bool communicate_once = false;
  bool drop_redundant = true;
};

struct Instruction {
  int node = -1;  // -1: a conversion
  int option = 0;
  Conversion conversion{};
};

struct AStarResult {
  Solution solution;                 // price and bound are of the chosen cost
  std::vector<Instruction> program;  // in order of execution
};

AStarResult solve_astar(const Problem& problem, const Weights& weights,
                        const AStarOptions& options = {}, const Limits& limits = {});

// The stage-synchronised time of a program.
double stage_seconds(const Problem& problem, const std::vector<Instruction>& program);

}  // namespace motley::solver
