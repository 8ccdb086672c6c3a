// A training step taken in micro-batches.
//
// The step of the whole batch is cut into equal parts along the samples, and each part is computed
// by itself. That is one more distributed program of the theory (theory.h) in which micro-batches
// stand in the place of devices, with no communication between them: inputs are cut, parameters
// are whole, and the loss and all gradients come out as partial sums. Such a program is a proof
// that the sum over micro-batches is the step of the whole batch; it is searched for here, and what
// it computes for one micro-batch is the graph that pipelines run.
//
//   mean over samples            the sum over a micro-batch, times 1/n of the whole batch
//   mean over counted targets    likewise; the count depends on the batch alone, and is computed
//                                from the whole batch before the first micro-batch (`before`)
//   a term without samples       (weight decay in the loss) one part in so many of it each
//   in-batch negatives, batch    not proved: refused with the node that mixes samples
//   statistics in the loss
//
// Batch normalisation in training mode is the exception: it is let through, each micro-batch being
// normalised by itself, and listed in `by_part`, so that whoever plans can say so.
//
// Cost: linear in the nodes and their triples.
#pragma once

#include <string>
#include <vector>

#include "shard/theory.h"

namespace motley {

// The elements of one part of a value of [outer, size, inner] elements; size 0: all of it.
struct PartCut {
  int64_t outer = 1, size = 0, inner = 1;
  bool is_whole() const { return size == 0; }
};

struct MicroBatch {
  Graph graph;    // of one micro-batch; its loss and gradients are terms of sums over all
  int parts = 1;  // micro-batches
  // [node of `graph`] of the whole step; invalid: made for the micro-batch.
  std::vector<NodeId> node_of;
  std::vector<int> triples;  // [node of `graph`] of that node (Theory::triples()); -1: none
  // [input of `graph`] what a micro-batch gets of it. The inputs of the whole step come first;
  // those behind are the outputs of `before`, in order.
  std::vector<PartCut> inputs;
  // What is computed from the whole batch, once per step. No parameters, buffers or loss.
  Graph before;
  std::vector<PartCut> random;  // [node] of random nodes: the part of the draws of the whole step
  // [buffer] Updated by every micro-batch, in their order (running averages); the others' updates
  // are the same in all.
  std::vector<bool> updated_by_part;
  std::vector<NodeId> by_part;  // nodes of the whole step that normalise each part by itself

  // Whether it is the same as the whole step.
  bool exact() const { return by_part.empty(); }
};

// The step of one of `parts` equal parts of a batch of `samples`. Inputs with a dimension of
// `samples` are cut along the first such. Throws UserError that starts with `where` and names the
// node that keeps the batch from being taken in parts. REQUIRES: one segment; parts >= 1.
MicroBatch micro_batch_of(const Theory& whole, int64_t samples, int parts,
                          const std::string& where);

// The step of one of several parts of a batch, of so many samples each. Only parts of equal size have
// equal graphs; all have the same nodes. REQUIRES: sizes of at least 1 whose sum is the batch.
MicroBatch part_of_batch(const Theory& whole, const std::vector<int64_t>& sizes, size_t part,
                         const std::string& where);

// "4 batch normalisations see one of 8 micro-batches at a time", of a part that is not exact.
std::string normalised_by_part(const Graph& whole, const MicroBatch& part);

// "node 57, aten::mm(%12, %30) : f32[24,24]", for messages.
std::string describe_node(const Graph& graph, NodeId node);

}  // namespace motley
