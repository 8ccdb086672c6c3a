// Replicas that hold a gradient alike, which first add it up among themselves; then classes exchange
// their sums.
//
//   pieces of replicas 0..4:  A A B A B   ->   classes {0, 1, 3} and {2, 4}
//
// Member i of a class of n meets member i mod m of a class of m: it takes that one's sum.
#pragma once

#include <vector>

namespace motley {

using Classes = std::vector<std::vector<int>>;

// 0..count-1 in classes of equal ones; classes, and what is in each, in ascending order of the first.
// `alike(a, b)`: an equivalence.
template <typename Alike>
Classes classes_of(int count, Alike alike) {
  Classes classes;
  for (int i = 0; i < count; ++i) {
    size_t c = 0;
    while (c < classes.size() && !alike(classes[c].front(), i)) ++c;
    if (c == classes.size()) classes.emplace_back();
    classes[c].push_back(i);
  }
  return classes;
}

// Whose sum the i-th of a class takes from another class.
inline int met_by(size_t i, const std::vector<int>& other) { return other[i % other.size()]; }

}  // namespace motley
