// What one group of devices sends another so that a value, held in pieces by the first, is held in
// pieces by the second.
//
// A value is a list of elements. A layout cuts it as [outer, size, inner] along `size`, or not at
// all. Receiver r gets from every sender the elements of its own piece that the sender holds; from
// a group that holds the value whole it gets everything from one sender, receivers taking turns. A
// message holds its elements in the order of the receiver's piece.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "shard/theory.h"

namespace motley {

struct Layout {
  int64_t outer = 1, size = 1, inner = 1;
  std::vector<int64_t> pieces;  // [rank] of size; empty: every rank holds all
  int ranks = 1;

  int64_t numel() const { return outer * size * inner; }
  int64_t numel(int rank) const { return pieces.empty() ? numel() : outer * pieces[rank] * inner; }
  friend bool operator==(const Layout&, const Layout&) = default;
};
// REQUIRES: the placement is not partial.
Layout layout_of(const Theory& theory, ValueId value, Placement placement, const Shares& shares);

// Where one piece of a value lies in the whole, a list of [outer, size, inner] elements: `length`
// of size from `begin` on, and of these [outer, length, inner], in order, `count` from `first` on.
// `group` names the devices that hold all of it together, or each.
struct Part {
  int64_t outer = 1, size = 1, inner = 1, begin = 0, length = 1;
  int group = 0;
  int64_t first = 0, count = 1;
};
Part part_of(const Layout& layout, int rank, int group);

class Resharding {
 public:
  Resharding(const Layout& from, const Layout& to);

  // Elements that receiver r gets from sender s.
  int64_t count(int s, int r) const { return counts_[static_cast<size_t>(s) * to_.ranks + r]; }
  // Sender's side: the message, flat and contiguous.
  at::Tensor extract(int s, int r, const at::Tensor& local) const;
  // Receiver's side: puts a message into a flat piece.
  void insert(int s, int r, const at::Tensor& message, at::Tensor& flat) const;

 private:
  // A range of one axis of a piece, seen in some shape.
  struct Box {
    std::vector<int64_t> shape;
    int64_t axis = 0, begin = 0, length = 0;
  };
  at::Tensor indices(int s, int r, bool sender) const;
  bool box(int s, int r, bool sender, Box* out) const;

  Layout from_, to_;
  std::vector<int64_t> counts_;
};

}  // namespace motley
