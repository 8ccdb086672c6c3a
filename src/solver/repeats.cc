#include "solver/repeats.h"

#include <algorithm>
#include <limits>
#include <map>
#include <unordered_map>
#include <utility>

namespace motley::solver {

namespace {

constexpr int kMinRepeats = 3;
constexpr int kMinPeriod = 8;

}  // namespace

void find_repeats(const std::vector<int>& shape, const std::vector<double>& width, int from, int to,
                  std::vector<Repeat>* repeats) {
  if (to - from < 2 * kMinRepeats) return;
  std::map<int, int> votes;  // distance between consecutive equal shapes -> how often
  std::unordered_map<int, int> last;
  for (int k = from; k < to; ++k) {
    const auto [it, fresh] = last.try_emplace(shape[k], k);
    if (!fresh) {
      ++votes[k - it->second];
      it->second = k;
    }
  }
  std::vector<std::pair<int, int>> ranked;  // (-votes, period)
  for (const auto& [period, count] : votes) {
    if (period >= kMinPeriod) ranked.emplace_back(-count, period);
  }
  std::sort(ranked.begin(), ranked.end());
  if (ranked.size() > 8) ranked.resize(8);
  Repeat best{0, 1, 0};
  for (const auto& [unused, period] : ranked) {
    for (int k = from; k + period < to;) {
      int end = k;
      while (end + period < to && shape[end] == shape[end + period]) ++end;
      // Steps [k, end + period) repeat with the period.
      const int count = (end - k) / period + 1;
      const int gain = (count - 1) * period;
      if (count >= kMinRepeats && gain > (best.count - 1) * best.period) {
        int phase = 0;
        const int slack = (end + period - k) % period;
        const int reach = count > kMinRepeats ? period : slack + 1;
        double least = std::numeric_limits<double>::infinity();
        for (int p = 0; p < reach; ++p) {
          // Widths at the start of the second block: the first may still hold what preceded it.
          const double w = width[k + p + period - 1];
          if (w < least - 1e-9) {
            least = w;
            phase = p;
          }
        }
        best = {k + phase, period, (end + period - k - phase) / period};
      }
      k = end + 1;
    }
  }
  if (best.count < kMinRepeats) return;
  find_repeats(shape, width, from, best.begin, repeats);
  repeats->push_back(best);
  find_repeats(shape, width, best.begin + best.period * best.count, to, repeats);
}

}  // namespace motley::solver
