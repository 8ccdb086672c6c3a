// Layers (HAPT section 5.1): the captured step as a sequence of pieces that a pipeline may be cut
// between, structure kept.
//
// 1. The forward nodes, in order, are tokens: op, constants, shapes. Where a tensor comes from is
//    not part of a token, so that a mask shared by all blocks, or the embedding in front of the
//    first, does not tell blocks apart.
// 2. Modules: among the stretches that are not yet repeated modules, take the run (runs.h) whose
//    whole periods cover most heavy ops (matrix products, convolutions), the period being the least
//    multiple of the run's with at least z heavy ops; until there is none. A run may start anywhere
//    in its first incomplete period; the start with the least live bytes is taken.
// 3. Inside one period, and inside every other module, a DP cuts into layers of at most (1 + eps)
//    times the average FLOPs, and a tenth of it at least, with the least bytes across the cuts; eps
//    grows until such cuts exist.
//    The cuts of a period are copied to all its repeats; where that is more layers than anyone
//    wants, several repeats are one layer. Views and conversions of parameters
//    go to the layer that reads them first.
// 4. A backward node belongs to the layer of the forward values it reads (the deepest of them), or
//    of the gradient it continues, or, if it only leads to the gradient of a parameter, of that
//    parameter; so forward and backward of a layer end up on one stage. What follows from constants
//    alone has no layer, and what many layers read (a mask) stands for its last reader that the
//    gradient has come past. Views and copies of forward values are made where they are read.
//
// Layers with equal tokens and equal bytes share a class: stages of equal classes cost the same and
// are planned once.
//
// Time: O(n log^2 n) for the repeats; the DPs look at pairs of cuts within one layer's FLOPs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/deadline.h"
#include "core/units.h"
#include "graph/graph.h"

namespace motley::pipeline {

struct LayerOptions {
  // About how many; 0: one per heavy op, but at most 160. Repeats beyond these are put together.
  int layers = 0;
  int most = 0;   // of 0 layers: about so many where they would be more; 0: as many as they are
  int heavy = 2;  // z: heavy ops that a repeated module has at least
  double slack = 0.1;  // eps
  // Instead: layers that begin at these forward nodes, ascending; what is in front is of the first.
  std::vector<NodeId> begin;
  Deadline deadline;  // TimeIsUp is thrown once it is over
};

struct Layer {
  std::vector<NodeId> forward, backward;  // in order, without sources
  int module = 0;
  int layer_class = 0;
  Flops forward_flops = 0, backward_flops = 0;
  Bytes parameters = 0;  // read first in this layer
  Bytes boundary = 0;    // values live in front of it: what a link in front of it carries
  Bytes gradients = 0;   // what that link carries in the backward pass
  Bytes saved = 0;       // forward values made here that backward nodes read
};

struct Module {
  int first = 0, end = 0;  // among the forward nodes
  int repeats = 1;
};

struct Layers {
  std::vector<Layer> layers;
  std::vector<Module> modules;
  bool coarser = false;               // than the finest, as they were to be at most so many
  std::vector<int> class_of() const;  // [layer]
};

// Throws UserError if the graph has no forward nodes.
Layers find_layers(const Graph& graph, const LayerOptions& options);

// One line per layer: nodes, class, FLOPs, bytes.
std::string to_text(const Layers& layers);

}  // namespace motley::pipeline
