// The sizes of a transformer, read off its captured step: what a framework has to be told to build
// the same model. Embedding first, blocks of attention and a feed-forward half, a head that may share
// the embedding's table.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/file.h"
#include "graph/graph.h"

namespace motley {

struct Sizes {
  int64_t layers = 0, hidden = 0, heads = 0, kv_heads = 0, ffn = 0, seq = 0, vocab = 0;
  int64_t positions = 0;         // of a learned table; 0: rotary or none
  int64_t experts = 0, top = 0;  // of the layers that have them; 0: none
  std::vector<bool> routed;      // [layer] has experts
  bool causal = false, rms_norm = false, gated = false, bias = false, tied = false;
  std::string activation;  // "gelu", "relu", "silu"
  double dropout = 0;
  friend bool operator==(const Sizes&, const Sizes&) = default;
};

// Nothing and the reason, a sentence, where the graph is not such a model.
std::optional<Sizes> sizes_of(const Graph& graph, std::string* reason);
std::optional<Sizes> sizes_of(const Graph& graph);

Json to_json(const Sizes& sizes);

}  // namespace motley
