#include "shard/shares.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/error.h"

namespace motley {

namespace {

constexpr double kExact = 1e-9;  // numbers this close are taken for equal
constexpr int kMostBreaks = 64;  // along a line that are looked at one by one

}  // namespace

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

PieceRange divide(int64_t n, const RatioRange& range) {
  const size_t devices = range.from.size();
  const auto size = static_cast<double>(n);
  using Line = std::pair<double, double>;
  std::vector<Line> lines;  // of different devices
  for (size_t d = 0; d < devices; ++d) lines.emplace_back(range.from[d], range.to[d]);
  std::sort(lines.begin(), lines.end());
  lines.erase(std::unique(lines.begin(), lines.end()), lines.end());
  double crossed = 0;
  for (const auto& [from, to] : lines) crossed += std::abs(to - from) * size + 1;
  PieceRange result;
  if (!range.line || crossed > kMostBreaks) {
    for (size_t d = 0; d < devices; ++d) {
      const auto [least, most] = std::minmax(range.from[d], range.to[d]);
      result.least.push_back(static_cast<int64_t>(std::floor(least * size + kExact)));
      result.most.push_back(std::min(n, static_cast<int64_t>(std::ceil(most * size - kExact))));
    }
    return result;
  }
  // Along the line pieces change where a share is half-way between two integers, and in between
  // where the rounding errors of two devices are equal.
  std::vector<double> breaks{0, 1};
  for (const auto& [from, to] : lines) {
    const double a = size * std::min(from, to) - 0.5, b = size * std::max(from, to) - 0.5;
    for (double k = std::ceil(a); k <= b && to != from; ++k)
      breaks.push_back(std::clamp((k + 0.5 - size * from) / (size * (to - from)), 0.0, 1.0));
  }
  std::sort(breaks.begin(), breaks.end());
  for (size_t i = 0, end = breaks.size(); i + 1 < end; ++i) {
    const double begin = breaks[i], length = breaks[i + 1] - begin;
    auto error = [&](const Line& line, double t) {
      const double middle = line.first + (begin + length / 2) * (line.second - line.first);
      return std::round(size * middle) - size * (line.first + t * (line.second - line.first));
    };
    for (size_t a = 0; a < lines.size() && length > kExact; ++a)
      for (size_t b = a + 1; b < lines.size(); ++b) {
        const double before = error(lines[a], begin) - error(lines[b], begin),
                     after = error(lines[a], begin + length) - error(lines[b], begin + length);
        if (before * after < 0) breaks.push_back(begin + length * before / (before - after));
      }
  }
  std::sort(breaks.begin(), breaks.end());
  result.least.assign(devices, n);
  result.most.assign(devices, 0);
  auto visit = [&](double t) {
    std::vector<double> ratios(devices);
    for (size_t d = 0; d < devices; ++d)
      ratios[d] = std::max(0.0, range.from[d] + t * (range.to[d] - range.from[d]));
    const std::vector<int64_t> pieces = divide(n, ratios);
    std::map<Line, int64_t> largest;
    for (size_t d = 0; d < devices; ++d) {
      int64_t& most = largest[{range.from[d], range.to[d]}];
      most = std::max(most, pieces[d]);
      result.most[d] = std::max(result.most[d], pieces[d]);
    }
    for (size_t d = 0; d < devices; ++d)
      result.least[d] = std::min(result.least[d], largest[{range.from[d], range.to[d]}]);
  };
  // Where they change they are as on one of both sides, or no less than that.
  for (size_t i = 0; i + 1 < breaks.size(); ++i)
    if (breaks[i + 1] - breaks[i] > kExact) visit((breaks[i] + breaks[i + 1]) / 2);
  return result;
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
