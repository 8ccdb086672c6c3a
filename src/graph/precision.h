// Mixed precision: a graph computed in a 16-bit type with parameters in their own (the master
// weights), as a rewrite of the graph, so that searches, prices, memory and executor need no notion
// of it.
//
//   16 bits    matrix products, convolutions and whatever reads one of their results, gradients of
//              parameters included
//   as it was  the loss and scalars, log-softmax, batch norm and its statistics, cumsum and top-k,
//              and what is computed of constants, buffers, integers and masks alone
//
// A parameter is converted where it is first read; conversions of floats are linear, so a cut
// parameter may be gathered, and a gradient summed, at half the bytes. What reads both types takes
// the 16-bit one. A value that the backward pass needs again in more bits is converted again.
#pragma once

#include "graph/graph.h"

namespace motley {

// REQUIRES: all parameters of `graph` that are floats have one type. The nodes of the result do not
// depend on `type`; with that of the parameters nothing is rounded.
Graph with_precision(const Graph& graph, DType type);

// Throws UserError unless all parameters of `graph` that are floats have one type, of more bits
// than `type`.
void check_precision(const Graph& graph, DType type);

}  // namespace motley
