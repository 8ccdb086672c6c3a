// What an executor has compiled a program to (executor.h); for executor.cc and compile.cc alone.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "interpret/dispatch.h"
#include "runtime/executor.h"
#include "runtime/kernels.h"

namespace motley {

struct Executor::Instruction {
  enum class Kind : uint8_t {
    source,
    call,
    joined,  // of all parts of a batch (shard/joined.h)
    rule,    // of the theory: kernels.cc
    random,
    empty,     // this device's piece is
    boundary,  // between segments
    convert,
    keep,   // an all-reduce that is left out
    send,   // a message of gradients starts
    bucket  // and is waited for
  } kind = Kind::call;
  const Node* node = nullptr;
  NodeId id;
  const Operator* op = nullptr;
  RuleKernel rule = nullptr;
  std::vector<Arg> args;
  std::vector<int> operands, results;  // slots in order; -1: an undefined output
  std::vector<Shape> result_shapes;
  std::vector<bool> wanted;  // empty piece: results that must be computed all the same
  // Empty piece: shapes of operands to call with (empty: the operand itself).
  std::vector<Shape> stand_in;
  std::vector<Placement> placements;  // of the results
  std::vector<ValueId> made;          // the results; not valid: an undefined output
  // Joined: [operand] the dimension of the rows of all parts, -1: the same in all; [result of a part]
  // likewise. Operands are listed part by part, and results, unless they are sums.
  std::vector<int> operand_rows, result_rows;
  // Joined: [operand], [result of a part] the rows of all parts are passed on as one tensor, in the
  // slot of the first part.
  std::vector<bool> whole_operand, whole_result;
  // Whether it reads the slots of all parts in one operand, if it reads any.
  bool reads_together(const std::vector<int>& rows, int dim) const;
  void take_whole(int slot);      // of the first part
  Placement given;                // boundary: of the operand
  int64_t begin = 0, length = 0;  // of this device's piece of the cut dimension
  std::vector<Step> steps;        // conversions: one, or a bucket of all-reduces
  int message = -1;               // send, bucket: which message of gradients
  bool last = false;              // one conversion: its operand is not read again
  bool passes = false;            // boundary: nothing moves
  bool beside = false;            // conversion: travels beside computation
  bool meets = false;             // a collective inside
  std::vector<int> free;          // slots dead after this instruction
  std::vector<int> sums;          // slots added to the sums of micro-batches after it
};

// Of a clock that runs evenly.
double now_seconds();

// The elements in one run that may be overwritten: those of the tensor itself if `last` says that
// its value is not read again and nothing else holds them.
at::Tensor own_elements(const at::Tensor& tensor, bool last);

}  // namespace motley
