// Activation recomputation (checkpointing) of a program, block by block (Chen et al. 2016).
//
// A block is a layer of the model: the forward nodes from one that reads a parameter named after it
// ("block3.up.weight") to the next such, and what is made of its parameters (their gathered copies,
// which are then freed after the forward pass too). Of a recomputed block only what other blocks
// read stays; what its own backward pass reads of it is made again, by the same steps with the same
// collectives inside, right before the first backward step that needs it. Random elements do not
// depend on when they are drawn (runtime/executor.h), so the result is the same to the last bit.
//
// Stages of pipelines do so too. Where that does not fit, a stage keeps only what came in, and its
// runtime runs the whole forward phase again (plan/pipeline.h, StagePlan::recompute).
#pragma once

#include <functional>
#include <vector>

#include "cost/cost.h"

namespace motley::spmd {

// [node] The number of its block, -1: none. Nodes of the backward pass are in none, nor is what
// follows parameters without a number in their name, such as the head and the loss.
std::vector<int> blocks_of(const Graph& graph);

// A program with whichever of its blocks computed again. What stays of a block does not depend on
// what is chosen, so it is found once: O(steps) each.
class Recomputation {
 public:
  // `block_of` as by blocks_of(). REQUIRES: `program` passes check() and makes nothing again, and
  // outlives this.
  Recomputation(const Theory& theory, const Program& program, const std::vector<int>& block_of);
  // With those for which `chosen` says so, [block]; it passes check() too. A block of which nothing
  // would be freed is left alone.
  Program with(const std::vector<bool>& chosen) const;
  // [block] The first block whose forward steps are the same.
  std::vector<int> like() const;

 private:
  struct Read {
    int step, maker;
  };
  const Graph& graph_;
  const Program& program_;
  int backward_;            // its first step of the backward pass
  std::vector<int> block_;  // [step] of the forward pass; -1: of none
  // Makers of what is freed of a block, as each step reads it: [first_[step], first_[step + 1])
  std::vector<int> makers_, first_;
  std::vector<std::vector<Read>> later_;  // [block] the same by the backward pass, in order
};

// One such program.
Program recompute(const Theory& theory, const Program& program, const std::vector<int>& block_of,
                  const std::vector<bool>& chosen);

// The program with what is gathered or converted of parameters freed after the forward pass and made
// again in front of the backward steps that read it (ZeRO stage 3, Rajbhandari et al. 2020): more
// communication for less memory. Blocks may be computed again. REQUIRES: the forward pass comes first.
Program gathered_again(const Theory& theory, const Program& program);
// The program with parameters kept in the pieces that their gradients come in. A gradient that is
// scattered, and then gathered for a whole parameter, is not gathered: the parameter is, right before
// it is read. So is one whose all-reduce takes about as long as scattering and gathering. The same
// bytes travel, part of them in the forward pass, where they may hide, and less memory is kept.
// `price`: seconds of a collective from or to these pieces. REQUIRES: nothing is made again.
using PiecePrice = std::function<Seconds(ValueId, Collective, Placement)>;
Program stored_in_pieces(const Theory& theory, const Program& program, const PiecePrice& price);
// A phase-ordered program that holds parameters and gradients whole no longer than it uses them: the
// same, and gradients are scattered in every backward pass.
Program hold_pieces(const Theory& theory, const Program& program);

// Without what is made again.
Program once(const Program& program);

// What a choice of blocks costs: seconds, and bytes over the memory of the device type that lacks
// most (0 or less: it fits, with so much room).
struct RecomputeCost {
  Seconds seconds = 0;
  Bytes excess = 0;
};

// The blocks to compute again so that the program fits, as cheap as found; empty: neither all do
// nor all but the last. Blocks are taken in the order of bytes saved per second until the program
// fits, given back, the most expensive first, where it still does, and exchanged for cheaper ones; the same
// with the first blocks of the model first, which are held longest. O(blocks) prices where blocks
// are equal, O(blocks^2) where they are not. `like`: as of Recomputation; such blocks are priced
// once. Empty: all are different.
std::vector<bool> choose_blocks(int blocks,
                                const std::function<RecomputeCost(const std::vector<bool>&)>& cost,
                                const std::vector<int>& like = {});

}  // namespace motley::spmd
