// What graphs are known by where names do not matter.
#pragma once

#include <string>

#include "graph/graph.h"

namespace motley::planner {

// The graph without the names of its model, parameters, buffers and inputs.
Graph anonymous(const Graph& graph);

// What calibrate and planning know a stage's graph by: 16 digits, equal where graphs are equal but
// for names and real numbers, which no time depends on (such as the scale of a mean).
std::string shape_of(const Graph& graph);

}  // namespace motley::planner
