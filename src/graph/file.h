// Graph files, as `motley capture` writes them: {"motley_graph": 1, "batch": N, "graph": "text
// form"}.
#pragma once

#include <cstdint>
#include <string>

#include "graph/graph.h"

namespace motley {

// MODEL on the command line is a file if it has a slash or ends in .json; otherwise a spec of the
// zoo.
bool is_graph_file(const std::string& model);

void save_graph(const Graph& graph, int64_t batch, const std::string& path);

// Throws UserError if the file is not one, or was captured with another batch.
Graph load_graph_file(const std::string& path, int64_t batch);

}  // namespace motley
