// Grouped collectives: their price against their messages, one by one.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "cluster/cluster.h"
#include "core/rng.h"
#include "net/collectives.h"

namespace motley::net {
namespace {

// Seconds of a grouped all-gather on links of one byte a second, message by message: every device
// sends its own piece, then its left neighbour's as it comes, and so on.
double ring_of_chunks(const std::vector<double>& pieces) {
  const size_t p = pieces.size();
  const double chunk = chunk_bytes(*std::max_element(pieces.begin(), pieces.end()));
  std::vector<double> free(p, 0);                     // [device] from when on its link is
  std::vector<std::vector<double>> here(p), next(p);  // [device] when the chunks of a piece came
  for (size_t k = 0; k + 1 < p; ++k) {
    for (size_t d = 0; d < p; ++d) {
      double left = pieces[(d + p - k) % p];
      next[d].clear();
      for (size_t c = 0; left > 0; ++c, left -= chunk) {
        const double ready = k == 0 ? 0 : here[(d + p - 1) % p][c];
        free[d] = std::max(free[d], ready) + std::min(left, chunk);
        next[d].push_back(free[d]);
      }
    }
    std::swap(here, next);
  }
  return *std::max_element(free.begin(), free.end());
}

TEST(Collectives, GroupedOnesFillTheirChainsWhereAPieceIsShort) {
  Rng rng(31);
  double off = 0;
  constexpr int kTrials = 2000;
  for (int trial = 0; trial < kTrials; ++trial) {
    const int p = static_cast<int>(rng.between(2, 9));
    const double bytes = std::pow(10., 4.5 + 3 * rng.uniform());
    std::vector<double> shares(static_cast<size_t>(p), 1);
    if (trial % 3 == 0) shares[0] += 30 * rng.uniform();
    if (trial % 3 == 1)
      for (double& share : shares) share = rng.uniform() + 1e-3;
    const double sum = std::accumulate(shares.begin(), shares.end(), 0.0);
    std::vector<double> pieces;
    for (double& share : shares) pieces.push_back(bytes * (share /= sum));
    const CollectiveModel model(
        flat_cluster({device_catalogue()[0]}, {p}, {LinkKind::switched, 1, 0}));
    const double priced = model.all_gather_grouped(bytes, model.profile(shares));
    const double exact = ring_of_chunks(pieces);
    EXPECT_GE(priced, exact * (1 - 1e-9)) << p << " devices, " << bytes << " bytes";
    if (trial % 3 == 2) {
      EXPECT_NEAR(priced, exact, 1e-9 * exact);
    }
    off += priced / exact - 1;
  }
  EXPECT_LT(off / kTrials, 0.06);
}

}  // namespace
}  // namespace motley::net
