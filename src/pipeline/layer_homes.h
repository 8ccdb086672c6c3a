// The layer that every node of a step belongs to, the backward ones too (layers.h, 4).
#pragma once

#include <vector>

#include "core/units.h"
#include "graph/graph.h"

namespace motley::pipeline {

struct LayerHomes {
  std::vector<int> layer_of;  // [node] -1: a source
  // [layer] Of parameters that it reads first; of forward values it makes that backward nodes read;
  // of gradients that go over the cut in front of it.
  std::vector<Bytes> parameters, saved, gradients;
};

// `forward`: the forward nodes, ascending, and in `layer_of` the layer of each, of so many.
LayerHomes find_homes(const Graph& graph, const std::vector<NodeId>& forward,
                      const std::vector<int>& layer_of, int layers);

}  // namespace motley::pipeline
