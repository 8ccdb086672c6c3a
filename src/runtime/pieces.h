// Pieces of tensors by name, and whole tensors put together from them: what checkpoints hold, and
// what workers hand on when others take over.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "comm/reshard.h"
#include "graph/graph.h"

namespace motley {

struct HeldPiece {
  std::string name;   // "parameter/fc.weight", "exp_avg/fc.weight", "buffer/bn.running_mean"
  Part part;          // where it lies in the whole
  at::Tensor tensor;  // its elements, part.count of them in order, of any shape
};

// All of a tensor of so many elements.
Part whole_part(int64_t numel);

// What is wrong with a part of a tensor of `numel` elements that a file or a message names; empty:
// nothing.
std::string problem_of(const Part& part, int64_t numel);

// The elements of a part in the whole, which is flat: indices, ascending within each row.
at::Tensor elements_of(const Part& part);

// Copies a piece into a flat whole tensor. REQUIRES: problem_of finds nothing.
void put_piece(const Part& part, const at::Tensor& piece, at::Tensor& whole);
// The piece of a flat whole tensor, flat.
at::Tensor take_piece(const Part& part, const at::Tensor& whole);

// Whole tensors of known names and types.
class Assembly {
 public:
  explicit Assembly(std::map<std::string, TensorSpec> specs) : specs_(std::move(specs)) {}

  // Where pieces overlap the last one stays. Throws std::runtime_error where a piece is of no known
  // tensor, of another type, or does not lie in it.
  void add(const HeldPiece& piece);
  // Whether every element of it is there.
  bool complete(const std::string& name) const;
  // Throws std::runtime_error if it is not complete.
  at::Tensor whole(const std::string& name) const;

 private:
  struct Partial {
    at::Tensor whole, there;  // flat; bool
  };
  std::map<std::string, TensorSpec> specs_;
  std::map<std::string, Partial> partial_;
};

}  // namespace motley
