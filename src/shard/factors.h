// Factors of one dimension of a value, outermost first: what placements may cut it into.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "graph/op.h"
#include "graph/placement.h"

namespace motley {

using Factors = std::vector<int64_t>;

inline int64_t product(const Factors& f, size_t begin, size_t end) {
  int64_t p = 1;
  for (size_t i = begin; i < end; ++i) p *= f[i];
  return p;
}

// Where a label's factors lie in the factor list of a dimension: [begin, end), or false if its
// bounds fall inside a factor.
inline bool locate(const Factors& factors, const std::vector<int>& labels,
                   const std::vector<Label>& info, size_t which, size_t* begin, size_t* end) {
  size_t at = 0;
  for (size_t l = 0; l <= which; ++l) {
    *begin = at;
    int64_t p = 1;
    while (p < info[labels[l]].size && at < factors.size()) p *= factors[at++];
    if (p != info[labels[l]].size) return false;
  }
  *end = at;
  return true;
}

// A factor of a label. A cut is one digit of an index: (index / inner) % size. Where a tensor has a
// factor of this size with this much behind it, it is the same digit, whatever its others are.
struct Digit {
  int64_t size, inner;
  bool operator==(const Digit&) const = default;
};

// Where a label occurs in a tensor: its digits are factors `begin` and on of dimension `dim`.
struct LabelPlace {
  int dim = -1;
  size_t begin = 0;
  std::vector<Digit> digits;
  Placement cut(Digit digit) const {
    const auto it = std::find(digits.begin(), digits.end(), digit);
    return Placement::shard(dim, static_cast<int>(begin + (it - digits.begin())));
  }
};

}  // namespace motley
