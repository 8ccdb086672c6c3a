// Graph files, as `motley capture` writes them: {"motley_graph": 1, "batch": N, "graph": "text
// form", "other": {"batch": M, "graph": "text form", "from": A, "to": Z}}.
//
// `other` is the step captured once more, with another batch: what differs tells how sizes depend
// on it, so that the step can be had at other batches (rebatch.h), from A to Z samples: what two
// captures tell was compared with captures at these and some between. A file without it has one.
#pragma once

#include <cstdint>
#include <functional>
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
  int64_t from = 0, to = 0;  // samples at which the two captures tell the step
  bool differs = false;  // add_other: there are captures at other batches, and two do not tell it

  // Throws UserError if the step cannot be had at a number of samples.
  Graph at(int64_t samples) const;
  // Finds `other`: captures the step at another batch, and at some more, small, odd and large, to
  // see that the two tell it. capture(samples) is nothing where the model does not take so many.
  // Returns why there is none, if so.
  std::string add_other(const std::function<std::optional<Graph>(int64_t samples)>& capture);
};

void save_graph(const GraphFile& file);  // to its path

// Throws UserError if the file is not one; `path` is what errors call it.
GraphFile parse_graph_file(const std::string& text, const std::string& path);
GraphFile load_graph_file(const std::string& path);
Graph load_graph_file(const std::string& path, int64_t batch);  // .at(batch)

}  // namespace motley
