// Which parameter a part of a forward pass belongs to: layers of a captured graph are told apart by
// the names of their parameters. And what belongs to whoever reads it.
#pragma once

#include <vector>

#include "graph/graph.h"

namespace motley {

// [node] The index in Graph::parameters of the parameter that a forward node makes, or is a view or
// conversion of, or else of the one that was read last, by it or before it. -1: nodes before the
// first such, other sources, and nodes of the backward pass.
std::vector<int> owners(const Graph& graph);

// [node] Whether what a node makes is a parameter, buffer or input, a view or conversion of one, or
// follows from constants alone: each stage of a pipeline that reads it makes it for itself.
std::vector<bool> made_by_readers(const Graph& graph);

}  // namespace motley
