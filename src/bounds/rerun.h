// What of a graph runs again where blocks are computed again (recompute.h), whatever the program,
// in terms of a builder's problem: memory_problem.h chooses what does.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "spmd/build.h"

namespace motley::bounds {

struct Rerun {
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

  // A use of a value.
  struct Read {
    int node = -1, slot = 0;  // of the problem, and of its inputs
    int64_t at = 0;           // node of the graph
    ValueId view;             // what it reads: the value or a view of it
  };
  struct Value {
    NodeId maker;
    int block = -1;
    bool made_forward = false, source = false;
    bool inner = false;                   // nothing but its own block reads it forward
    int64_t last = -1;                    // node that reads it last
    std::vector<Read> forward, backward;  // in order
  };
  std::vector<Value> values;    // [value of the builder]
  std::vector<bool> must, may;  // [graph node] runs again if its block does; may do so then
  // [block] First node that reads what only the block reads forward; kNever: there is none.
  std::vector<int64_t> begin;
  std::vector<bool> alone;  // [block] nothing reads that and the same of another block

  // `block_of` as by blocks_of().
  Rerun(const Theory& theory, const spmd::ProblemBuilder& builder,
        const std::vector<int>& block_of);

  bool is_inner(int value) const {
    return value < static_cast<int>(values.size()) && values[value].inner && !values[value].source;
  }

 private:
  void find_readers(const Graph& graph, const spmd::ProblemBuilder& builder,
                    const std::vector<int>& block_of);
  void find_twice(const Graph& graph, const spmd::ProblemBuilder& builder);
};

}  // namespace motley::bounds
