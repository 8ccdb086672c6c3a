// Steps of the parts of a batch that run as one call (shard/duplex.h):
//
//   node 12 aten::mm S(0), R -> S(0)             of part 0: rows of x0, all of w
//   joined node 13 aten::mm S(0), R -> S(0)      of part 1: rows of x1, all of w
//
// The rows of all parts stand one behind the other, and the results' rows are those of the parts.
// Where a call sums over rows (a gradient of a weight), it makes the sum at once, and the additions
// are joined too:
//
//   node 40 aten::mm S(1), S(0) -> P
//   joined node 41 aten::mm S(1), S(0) -> P
//   joined node 42 aten::add.Tensor P, P -> P
//
// That a call on all rows makes these values is what the triple of the whole batch's node says, by
// which it is divided into parts (Duplex::joining). Each step is valid by itself, and a device that
// has no rows of some part runs them one by one.
#pragma once

#include <string>
#include <vector>

#include "shard/duplex.h"

namespace motley {

// Of node n of the first part's graph. REQUIRES: `duplex` has everything but this.
Duplex::Joining joining_of(const Theory& whole, const MicroBatch& part, const Duplex& duplex,
                           size_t n);

// Whether a node may run so under a triple: it is one call, without communication.
bool may_join(const Duplex::Joining& joining, const Triple& triple);

struct JoinedCall {
  int begin = 0, parts = 0, end = 0;  // steps: those of the parts, and additions up to `end`
  std::vector<bool> own;              // [operand] every part has rows of its own
  // [operand] These rows are not one behind the other yet, and are copied. They are where a joined
  // call made them.
  std::vector<bool> copied;
  bool sums() const { return end > begin + parts; }
};

// The calls of a program, in order. REQUIRES: the numbers of its nodes and triples are in range.
std::vector<JoinedCall> joined_calls(const Theory& theory, const Program& program);

// What is wrong with the steps of a program of all parts that say joined; empty if nothing is. Trusts
// nothing but the duplex. REQUIRES: check(*duplex.theory, program) finds nothing.
std::vector<std::string> check_joined(const Duplex& duplex, const Program& program);

}  // namespace motley
