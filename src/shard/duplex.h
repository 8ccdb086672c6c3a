// A training step whose batch is taken in parts, side by side, so that the communication of one hides
// behind the computation of another (the duplex of HiDup).
//
//   one device, two parts     y = sum f(x)   becomes   y0 = sum f(x0), y1 = sum f(x1), y = y0 + y1
//
// The step in parts is a graph as any other: the nodes of every part, what follows from parameters
// alone once, and the sums of the parts' losses and gradients. That it is the step of the batch is
// proved as for micro-batches (micro_batch.h): the loss and gradients of a part are terms of sums.
// So its programs are checked, priced and run as those of any graph: a parameter is gathered once,
// and a gradient reduced once, behind the sum. Parts need not be equal; what depends on the batch
// alone, such as the count of targets that a mean divides by, is computed from all of it, before.
//
// One part is allowed: then parameters are gathered ahead of their use and gradients reduced while
// the backward pass goes on.
//
// A program of it is made of a program of one part and a division into stages (mirrored()):
//
//   stage k of every part in turn; behind it, the collectives that stage k + 1 of this part needs,
//   which travel while the next part computes
//
// A stage that communicates little may be taken by all parts at once: its nodes run in calls on the
// rows of all parts (shard/joined.h), which launches half as much, and hides nothing.
//
// Collectives of such a program are started where they stand, one after another, and waited for
// where what they make is read (runtime/executor.h).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "shard/micro_batch.h"
#include "shard/program.h"

namespace motley {

constexpr int kMaxParts = 16;

class Duplex {
 public:
  // Rows [begin, begin + length) of a cut of the whole step; length 0: all.
  struct Rows {
    PartCut cut;
    int64_t begin = 0, length = 0;
  };

  // Whether one call may make a node for all parts, on operands whose rows of all parts stand one
  // behind the other.
  struct Joining {
    bool possible = false;
    bool sums = false;          // its result is the sum of what the parts make
    std::vector<int> operands;  // the dimension of the rows; -1: the same in all parts
    std::vector<int> results;   // likewise, of rows; they are one run of elements
  };

  std::vector<int64_t> samples;  // of every part; their sum is the batch
  Graph graph;
  std::unique_ptr<Theory> theory;
  // What is computed from the whole batch, once per step (MicroBatch::before).
  Graph before;
  // [input of `graph`] What it is of: an input of the whole step, or, counted on, an output of
  // `before`.
  std::vector<int> input_of;
  std::vector<Rows> inputs;     // [input of `graph`]
  std::vector<NodeId> node_of;  // [node] of the whole step; invalid: made for the parts
  std::vector<Rows> random;     // [node] of random nodes: the part of the draws of the whole step
  std::vector<int> part_of;     // [node] -1: of all parts
  std::shared_ptr<const MicroBatch> first;  // the step of the first part
  // [part][node of a part's graph] in `graph`; of what comes behind the sum of a gradient the same
  // in all parts.
  std::vector<std::vector<NodeId>> nodes;
  std::vector<bool> late;        // [node of a part's graph] views of gradients, behind their sums
  std::vector<bool> shared;      // [node of a part's graph] the same in all parts
  std::vector<Joining> joining;  // [node of a part's graph]
  std::vector<ValueId> summed;   // [value of a part's graph] the sum of all; invalid: none
  std::vector<std::vector<NodeId>> sums;  // [value of a part's graph] the additions, in order

  int parts() const { return static_cast<int>(samples.size()); }
  // What a value of a part's graph is in part p: behind the sum of a gradient, the sum.
  ValueId value(int part, ValueId v) const;
};

// Parts that differ by at most one sample.
std::vector<int64_t> even_parts(int64_t samples, int parts);

// The step in parts of so many samples. Throws UserError that starts with `where` and says what keeps
// the batch from being taken in parts: in-batch negatives, batch normalisation. REQUIRES: one
// segment.
std::unique_ptr<Duplex> duplex_of(const Theory& whole, const std::vector<int64_t>& samples,
                                  const std::string& where);

// When the reductions of gradients stand in a program: as soon as their sums are there; while other
// communication leaves the network idle, as far as `slack` says; or behind everything else.
enum class Reduce : uint8_t { ready, slack, end };

// Where a program of one part is divided into stages.
struct StageDivision {
  std::vector<int> begin;  // steps of the part's program, ascending; the first stage begins at 0
  Reduce reduce = Reduce::ready;
  // A collective whose operand is there is started so many stages before the one in front of which
  // it has to be: parameters are gathered ahead of their use, and held for so long.
  int ahead = 0;
  // [stage * parts + part] Bytes of gradients that may travel beside it, for Reduce::slack.
  std::vector<double> slack;
  std::vector<bool> whole;  // [stage] taken by all parts at once; empty: none is
  // Steps, ascending, behind which gradients are reduced within such stages, for Reduce::ready.
  std::vector<int> reduce_at;
};

// The first stage, from which on a step may be (of a collective: from which on its result may be
// read), by steps of a part's program: one in front of which there has to be a boundary.
struct StepRole {
  bool communicates = false;  // it is a collective between stages
  bool late = false;          // behind the sum of a gradient
  bool source = false;
  int first_reader = 0;  // of a conversion: the first step that computes with it; the end: none
  int made = -1;         // of a collective: the step that makes its operand
};
std::vector<StepRole> roles_of(const Duplex& duplex, const Theory& part, const Program& program);

// The same program, which begins with what makes pieces of parameters for collectives out of others,
// such as their conversion to 16 bits: so these can be sent as far ahead as is wanted. No step of
// that kind is made again.
Program pieces_first(const Theory& part, const Program& program);

// The program of all parts. `part`: the theory of duplex.first->graph. Throws UserError if parts
// are so unlike that a step of one has no triple in another.
Program mirrored(const Duplex& duplex, const Theory& part, const Program& program,
                 const StageDivision& division, const std::string& where);

}  // namespace motley
