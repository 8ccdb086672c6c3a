// What pipeline/search.h describes, for one family of meshes and some orders of sub-clusters.
#pragma once

#include <map>
#include <utility>
#include <vector>

#include "pipeline/cost_table.h"

namespace motley::pipeline {

constexpr Seconds kLongest = 1e30;  // a period that bounds nothing

// Plans met, best first, and the incumbent.
struct Pool {
  size_t capacity = 8;
  Seconds worth = kInfinity;  // of the worst
  std::vector<PipelinePlan> plans;
  Seconds best() const { return plans.empty() ? worth : plans[0].objective; }
  void offer(PipelinePlan plan);
};

struct Move {
  int mesh;
  int behind;  // device
};

struct Cell {
  Seconds latency = kInfinity;
  int move = -1;  // of the position; behind a sub-cluster, into Block::next
  int next = 0;   // layer behind
};

using Orders = std::vector<std::vector<int>>;  // of sub-clusters

// What the chains of one table of costs know of each other, and memory that they use in turn.
struct Shared {
  std::map<std::pair<Shapes, int>, std::vector<std::vector<Move>>> moves;  // [device of a cluster]
  Seconds reach = 0;        // a period that some chain can have; 0: none yet
  bool incumbents = false;  // some chain has looked for them
  std::vector<std::vector<Cell>> suffix;
  std::vector<std::vector<Seconds>> prefix;
};

// Some orders of sub-clusters, with one family of meshes.
struct ChainProblem {
  const SearchProblem& problem;
  const SearchOptions& options;
  // With two orders that use the same sub-clusters first and the same one next, the beginning of
  // either in front of the rest of the other; with a tied parameter, one last sub-cluster.
  const Orders& orders;
  Shapes shapes;
  int64_t micro_batch;
  int micro_batches, pipelines;
};

// Every plan with an objective below the pool's best has been seen when this returns true; false:
// time ran out, and the result's lower bound says what may have been missed.
bool search_chain(const ChainProblem& chain, CostTable* table, Shared* shared, Pool* pool,
                  SearchResult* result);

}  // namespace motley::pipeline
