// MODEL on the command line: a zoo spec ("gpt:layers=2") or a file that `motley capture` wrote. No
// libtorch in this header.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "graph/graph.h"

namespace motley {

struct GraphSource {
  Graph graph;  // canonical
  double capture_s = 0;
  std::vector<std::string> unknown_ops;
};

// Captures a zoo model for a global batch, or reads a graph file (whose batch is what it was
// captured with).
GraphSource load_graph(const std::string& model, int64_t batch, DType dtype = DType::f32);

// Graph files are JSON: {"motley_graph": 1, "batch": N, "graph": [lines]}.
void save_graph(const Graph& graph, int64_t batch, const std::string& path);
bool is_graph_file(const std::string& model);

}  // namespace motley
