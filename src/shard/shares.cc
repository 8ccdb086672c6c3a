#include "shard/shares.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/error.h"

namespace motley {

std::vector<int64_t> divide(int64_t n, const std::vector<double>& ratios) {
  MOTLEY_CHECK(!ratios.empty() && n >= 0);
  double total = std::accumulate(ratios.begin(), ratios.end(), 0.0);
  MOTLEY_CHECK(total > 0, "ratios sum to {}", total);
  std::vector<int64_t> pieces(ratios.size());
  std::vector<double> exact(ratios.size());
  int64_t sum = 0;
  for (size_t i = 0; i < ratios.size(); ++i) {
    exact[i] = static_cast<double>(n) * (ratios[i] / total);
    pieces[i] = std::llround(exact[i]);
    sum += pieces[i];
  }
  // The sum is off by at most half a unit a device. Taking one from (giving one to) the piece whose
  // error grows least is the same as going through the pieces in the order of that error once.
  if (sum != n) {
    int64_t step = sum > n ? -1 : 1;
    std::vector<size_t> order(ratios.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      return static_cast<double>(step) * (static_cast<double>(pieces[a]) - exact[a]) <
             static_cast<double>(step) * (static_cast<double>(pieces[b]) - exact[b]);
    });
    for (size_t k = 0; sum != n; k = (k + 1) % order.size()) {
      int64_t& piece = pieces[order[k]];
      if (step < 0 && piece == 0) continue;
      piece += step;
      sum += step;
    }
  }
  return pieces;
}

const std::vector<int64_t>& Shares::of(Cut cut) const {
  auto [it, fresh] = pieces_.try_emplace(cut);
  if (fresh) {
    MOTLEY_CHECK(cut.segment >= 0 && cut.segment < segments(), "segment {}", cut.segment);
    it->second = divide(cut.size, ratios_[cut.segment]);
  }
  return it->second;
}

int64_t Shares::begin(Cut cut, int device) const {
  const auto& pieces = of(cut);
  return std::accumulate(pieces.begin(), pieces.begin() + device, int64_t{0});
}

}  // namespace motley
