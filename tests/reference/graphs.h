// Captured graphs that several tests share.
#pragma once

#include <string>

#include "core/file.h"
#include "graph/graph.h"

namespace motley {

inline const char* const kGraphs[] = {"gpt1", "convnet", "mlp"};

inline std::string graph_text(const std::string& name) {
  return read_file(std::string(MOTLEY_SOURCE_DIR) + "/tests/data/graphs/" + name + ".txt");
}

inline Graph load(const std::string& name) { return parse_graph(graph_text(name), name); }

}  // namespace motley
