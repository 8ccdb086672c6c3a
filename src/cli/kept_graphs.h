// Graphs of zoo models, kept from run to run: planning that finds its graphs here does without
// libtorch, which takes 0.4 s to load.
//
//   ~/.cache/motley/<program>/gpt:layers=4@32.txt    a line, and the text of a graph of 32 samples
//   ~/.cache/motley/<program>/libtorch               which libtorch captured them
//
// $XDG_CACHE_HOME, where it is set, takes the place of ~/.cache; with MOTLEY_CACHE=off nothing is
// kept or read. <program> tells motley-torch's size and time: graphs of another build, or of
// another libtorch, are not read.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "graph/graph.h"

namespace motley {

class KeptGraphs {
 public:
  // `program`: path of motley-torch.
  KeptGraphs(const std::string& program, const std::string& model);

  // Nothing where it is not there, or is not what was written.
  std::optional<Graph> find(int64_t samples) const;
  // For the program that captured it. Whether it was kept: what cannot be written is not; the
  // oldest make room.
  bool keep(int64_t samples, const Graph& graph) const;

 private:
  std::string file(int64_t samples) const;

  std::string folder_, model_;  // empty folder: nothing is kept
};

}  // namespace motley
