// Whether the gradients of a graph are the derivative of its loss.
//
// A graph holds forward pass and backward pass as two lists of calls, so that one changed in an
// editor could hold any. Here libtorch differentiates the forward nodes once more: both are run in
// double precision on random numbers and every gradient is compared. Nothing of the theory or of a
// search is involved.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "interpret/interpret.h"

namespace motley {

// The graph with all real numbers of one type.
Graph in_type(const Graph& graph, DType type);

// Random numbers for the sources of a graph: 0 normal numbers and integers of 0 and 1; 1 and 2
// numbers in [0.1, 1) and integers 1 or 0, for what others cannot be given to.
constexpr int kDraws = 3;
Feeds drawn(const Graph& graph, uint64_t seed, int kind);
// Of the first kind that the graph makes finite numbers of. Throws UserError if there is none.
Feeds drawn(const Graph& graph, uint64_t seed);

struct Derivative {
  // What is wrong, empty if nothing.
  std::vector<std::string> problems;
  // Why not all could be compared: too large to run here, no numbers that it takes, or gradients
  // that are custom (Parameter::custom). Empty if all were.
  std::string unchecked;
};
// Of graphs that compute too much to be run at once (a few seconds) only the structure.
Derivative check_derivative(const Graph& graph, uint64_t seed = 0);

}  // namespace motley
