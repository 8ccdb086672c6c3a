// Segments (HAP section 5.2): parts of a model whose tensors are cut in shares of their own, as a
// rewrite of the graph. Every value lies in one segment; where a node of one segment reads a value
// of another, a boundary stands between:
//
//   %12 = motley::boundary(%7, 0, 1) : f32[8,64]      %7 of segment 0, as a value of segment 1
//
// A boundary changes nothing: whole and partial values pass for free, pieces of a cut dimension
// move between devices as far as the shares of the two segments differ. Which segment a value lies
// in follows from the boundaries: nodes without one between them share a segment; without any, all
// is segment 0. A parameter and its gradient (a buffer and its update) lie in one segment.
#pragma once

#include <string>
#include <vector>

#include "graph/graph.h"

namespace motley {

inline constexpr const char* kBoundary = "motley::boundary";
constexpr int kMaxSegments = 64;

bool is_boundary(const Node& node);

struct Segments {
  int count = 1;
  std::vector<int> of_value, of_node;  // a boundary is of the segment it leads to
};
// Of a graph in which check_segments finds nothing; of any other, some segments in range.
Segments segments_of(const Graph& graph);

// What is wrong with the boundaries of a graph: arguments, values in two segments. Empty if
// nothing.
std::vector<std::string> check_segments(const Graph& graph);

// The graph with boundaries. `segment_of` names a segment below kMaxSegments for every node; they
// are numbered anew, without gaps. The gradient of a parameter is brought to where the parameter
// is. Nodes keep their order. REQUIRES: no boundaries in `graph`.
Graph with_segments(const Graph& graph, const std::vector<int>& segment_of);

// The segments of the nodes that are no boundaries, in order: with_segments of the graph that
// `graph` was made of and these is `graph` again.
std::vector<int> original_segments(const Graph& graph);

// Completes segments of forward nodes (-1: unknown, as of all other nodes): sources go to their
// first reader, and a backward node belongs to the forward node it is of: to its parameter if it
// only leads to a gradient, else to the last forward value it reads, else on with the gradient.
std::vector<int> with_backward(const Graph& graph, std::vector<int> forward);

// Segments by module, the first parts of parameters' names: "features" or "blocks.3". Forward nodes
// belong to the module whose parameters were read last; what belongs to none of `modules` is a
// segment of its own, the first. Throws UserError that lists the modules if one does not exist.
std::vector<int> segments_by_module(const Graph& graph, const std::vector<std::string>& modules);

}  // namespace motley
