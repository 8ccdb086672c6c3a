#include "measure/fit.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace motley {

namespace {

constexpr size_t kMaxPoints = 40;  // of an operator, kept in the profile

// Solves the normal equations of the features in `set`; false if they are singular.
bool solve(const std::array<Features, 3>& a, const Features& b, int set, Features* x) {
  std::vector<int> index;
  for (int i = 0; i < 3; ++i)
    if (set & (1 << i)) index.push_back(i);
  const size_t n = index.size();
  std::vector<std::vector<double>> m(n, std::vector<double>(n + 1));
  for (size_t i = 0; i < n; ++i) {
    for (size_t j = 0; j < n; ++j) m[i][j] = a[index[i]][index[j]];
    m[i][n] = b[index[i]];
  }
  for (size_t k = 0; k < n; ++k) {
    if (!(std::abs(m[k][k]) > 1e-12 * a[index[k]][index[k]])) return false;
    for (size_t i = 0; i < n; ++i) {
      if (i == k) continue;
      const double factor = m[i][k] / m[k][k];
      for (size_t j = k; j <= n; ++j) m[i][j] -= factor * m[k][j];
    }
  }
  x->fill(0);
  for (size_t i = 0; i < n; ++i) (*x)[index[i]] = m[i][n] / m[i][i];
  return true;
}

}  // namespace

Features least_squares(const std::vector<Features>& features, const std::vector<double>& seconds,
                       const Features& least) {
  // Columns are scaled to the same size.
  Features scale{};
  for (const auto& f : features)
    for (int i = 0; i < 3; ++i) scale[i] = std::max(scale[i], std::abs(f[i]));
  std::array<Features, 3> a{};
  Features b{}, best{};
  std::vector<double> rest = seconds;  // beside the least
  for (size_t s = 0; s < features.size(); ++s) {
    const double weight = 1 / std::max(seconds[s], kShortest);
    for (int i = 0; i < 3; ++i) rest[s] -= least[i] * features[s][i];
    for (int i = 0; i < 3; ++i) {
      if (scale[i] == 0) continue;
      const double fi = features[s][i] / scale[i];
      b[i] += weight * fi * rest[s];
      for (int j = 0; j < 3; ++j)
        if (scale[j] > 0) a[i][j] += weight * fi * features[s][j] / scale[j];
    }
  }
  double least_error = std::numeric_limits<double>::infinity();
  for (int set = 0; set < 8; ++set) {
    Features x{};
    bool possible = true;
    for (int i = 0; i < 3; ++i) possible = possible && (!(set & (1 << i)) || scale[i] > 0);
    if (!possible || !solve(a, b, set, &x)) continue;
    if (std::any_of(x.begin(), x.end(), [](double v) { return v < 0; })) continue;
    double error = 0;
    for (size_t s = 0; s < features.size(); ++s) {
      double predicted = 0;
      for (int i = 0; i < 3; ++i)
        if (scale[i] > 0) predicted += x[i] * features[s][i] / scale[i];
      error += (predicted - rest[s]) * (predicted - rest[s]) / std::max(seconds[s], kShortest);
    }
    if (error < least_error * (1 - 1e-9)) least_error = error, best = x;
  }
  for (int i = 0; i < 3; ++i) best[i] = scale[i] > 0 ? least[i] + best[i] / scale[i] : 0;
  return best;
}

RoundsFit fit_rounds(const std::vector<RoundsPoint>& points, bool with_least) {
  constexpr size_t kFlat = 2, kRising = 2;  // points, or more
  constexpr double kBetter = 0.7;           // of the error without
  // The first `flat` points alone show the least.
  const auto fit = [&](size_t flat) {
    RoundsFit result;
    std::vector<Features> features;
    std::vector<double> seconds;
    for (size_t i = 0; i < points.size(); ++i) {
      if (i < flat) {
        result.least += points[i].seconds / points[i].rounds / static_cast<double>(flat);
        continue;
      }
      features.push_back({points[i].rounds, points[i].traffic, 0});
      seconds.push_back(points[i].seconds);
    }
    const Features x = least_squares(features, seconds);
    result.latency = x[0];
    // Where no size took time that grows, the largest size is a bound.
    result.per_byte = x[1] > 0 ? x[1] : seconds.back() / features.back()[1];
    return result;
  };
  const auto error = [&](const RoundsFit& x) {
    double sum = 0;
    for (const RoundsPoint& p : points) {
      const double off = x.seconds(p.rounds, p.traffic) / std::max(p.seconds, kShortest) - 1;
      sum += off * off;
    }
    return sum;
  };
  RoundsFit best = fit(0);
  double least = kBetter * error(best);
  for (size_t flat = kFlat; with_least && flat + kRising <= points.size(); ++flat)
    if (const RoundsFit x = fit(flat); error(x) < least) best = x, least = error(x);
  return best;
}

FitQuality quality_of(const std::vector<std::pair<double, Seconds>>& points,
                      const std::vector<double>& predicted) {
  FitQuality q;
  double mean = 0, total = 0, residual = 0;
  for (const auto& [x, y] : points) mean += y / static_cast<double>(points.size());
  for (size_t i = 0; i < points.size(); ++i) {
    const double y = points[i].second;
    total += (y - mean) * (y - mean);
    residual += (y - predicted[i]) * (y - predicted[i]);
    q.error +=
        std::abs(predicted[i] - y) / std::max(y, kShortest) / static_cast<double>(points.size());
  }
  q.r2 = total > 0 ? 1 - residual / total : 1;
  // Evenly spread over the sizes, the ends included.
  std::vector<std::pair<double, Seconds>> sorted = points;
  std::sort(sorted.begin(), sorted.end());
  const size_t n = sorted.size(), kept = std::min(n, kMaxPoints);
  for (size_t i = 0; i < kept; ++i)
    q.points.push_back(sorted[kept > 1 ? i * (n - 1) / (kept - 1) : 0]);
  return q;
}

OpRate fit(const std::vector<Sample>& samples, FitQuality* quality, Flops fastest) {
  std::vector<Features> features;
  std::vector<double> seconds, predicted;
  for (const Sample& s : samples) {
    features.push_back({1, s.flops, s.bytes});
    seconds.push_back(s.seconds);
    if (fastest > 0) fastest = std::max(fastest, s.flops / std::max(s.seconds, kShortest));
  }
  const Features x = least_squares(features, seconds, {0, fastest > 0 ? 1 / fastest : 0, 0});
  std::vector<std::pair<double, Seconds>> points;
  for (size_t i = 0; i < samples.size(); ++i) {
    predicted.push_back(x[0] + x[1] * samples[i].flops + x[2] * samples[i].bytes);
    points.emplace_back(predicted.back(), seconds[i]);
  }
  *quality = quality_of(points, predicted);
  OpRate rate;
  rate.overhead = x[0];
  rate.flops = x[1] > 0 ? 1 / x[1] : 0;
  rate.memory_bandwidth = x[2] > 0 ? 1 / x[2] : 0;
  return rate;
}

OpRate fit_with_cache(const std::vector<Sample>& samples, FitQuality* quality) {
  std::vector<double> seconds;
  for (const Sample& s : samples) seconds.push_back(s.seconds);
  OpRate best;
  quality->error = std::numeric_limits<double>::infinity();
  for (const Sample& knee : samples) {
    std::vector<Features> features;
    for (const Sample& s : samples)
      features.push_back({1, s.bytes, std::max(0.0, s.bytes - knee.bytes)});
    const Features x = least_squares(features, seconds);
    std::vector<double> predicted;
    std::vector<std::pair<double, Seconds>> points;
    for (size_t i = 0; i < samples.size(); ++i) {
      predicted.push_back(x[0] + x[1] * features[i][1] + x[2] * features[i][2]);
      points.emplace_back(predicted.back(), seconds[i]);
    }
    const FitQuality now = quality_of(points, predicted);
    if (now.error >= quality->error) continue;
    *quality = now;
    best.overhead = x[0];
    best.memory_bandwidth = x[1] > 0 ? 1 / x[1] : 0;
    best.cached = x[2] > 0 ? knee.bytes : 0;
    best.uncached_bandwidth = x[2] > 0 ? 1 / x[2] : 0;
  }
  return best;
}

}  // namespace motley
