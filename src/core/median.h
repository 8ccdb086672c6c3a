#pragma once

#include <algorithm>
#include <vector>

namespace motley {

// Of an even number the mean of the two in the middle. REQUIRES: not empty.
inline double median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return (x[(x.size() - 1) / 2] + x[x.size() / 2]) / 2;
}

}  // namespace motley
