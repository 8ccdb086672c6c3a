// MODEL on the command line: a zoo spec ("gpt:layers=2") or a graph file. No libtorch in this
// header.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "graph/file.h"
#include "graph/graph.h"

namespace motley {

struct GraphSource {
  Graph graph;  // canonical
  double capture_s = 0;
  std::vector<std::string> unknown_ops;  // they will run replicated
};

// Captures a zoo model for a global batch, whose parameters `look` sees first (capture.h), or reads a
// graph file.
GraphSource load_graph(const std::string& model, int64_t batch, DType dtype = DType::f32,
                       const std::function<void(const Graph&)>& look = {});

}  // namespace motley
