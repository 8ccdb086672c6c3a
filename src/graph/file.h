// Graph files, as `motley capture` writes them: {"motley_graph": 1, "batch": N, "graph": "text
// form", "other": {"batch": M, "graph": "text form"}}.
//
// `other` is the step captured once more, with another batch: what differs tells how sizes depend
// on it, so that the step can be had at any batch (rebatch.h). A file without it has one.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "graph/graph.h"

namespace motley {

// MODEL on the command line is a file if it has a slash or ends in .json; otherwise a spec of the
// zoo.
bool is_graph_file(const std::string& model);

struct GraphFile {
  std::string path;
  int64_t batch = 0;
  Graph graph;
  int64_t other_batch = 0;  // 0: none
  Graph other;

  // Whether the step can be had at a number of samples: its own, or any that two captures give.
  bool has(int64_t samples) const { return samples == batch || other_batch > 0; }
  // Throws UserError if it cannot.
  Graph at(int64_t samples) const;
};

void save_graph(const GraphFile& file);  // to its path

// Throws UserError if the file is not one.
GraphFile load_graph_file(const std::string& path);
Graph load_graph_file(const std::string& path, int64_t batch);  // .at(batch)

}  // namespace motley
