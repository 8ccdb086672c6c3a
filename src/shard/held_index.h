// Finds what a program holds of a value in a placement, without allocating per value.
#pragma once

#include <vector>

#include "shard/program.h"

namespace motley {

class HeldIndex {
 public:
  HeldIndex(size_t values, const std::vector<Held>& held) : held_(held), first_(values, -1) {}

  // Enters held[h]; entries are made in order.
  void add(int h) {
    next_.push_back(first_[held_[h].value.index]);
    first_[held_[h].value.index] = h;
  }
  // The latest entry of a value in a placement, or -1.
  int find(ValueId value, Placement placement) const {
    int h = first_[value.index];
    while (h >= 0 && held_[h].placement != placement) h = next_[h];
    return h;
  }

 private:
  const std::vector<Held>& held_;
  std::vector<int> first_, next_;
};

}  // namespace motley
