// Least squares of what calibration measures (calibrate.h).
#pragma once

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "cluster/profile.h"

namespace motley {

constexpr Seconds kShortest = 1e-9;  // that clocks tell

using Features = std::array<double, 3>;

// The x of at least `least` with the least sum of (seconds - x f)^2 / seconds.
Features least_squares(const std::vector<Features>& features, const std::vector<double>& seconds,
                       const Features& least = {0, 0, 0});

// Of collectives by size, ascending: seconds = max(rounds * least, rounds * latency + traffic *
// per_byte). Several small ones that take the same time show the least; 0: they do not.
struct RoundsFit {
  Seconds latency = 0, per_byte = 0, least = 0;
  Seconds seconds(double rounds, double traffic) const {
    return std::max(rounds * least, rounds * latency + traffic * per_byte);
  }
};
struct RoundsPoint {
  double rounds = 0;
  Bytes traffic = 0;
  Seconds seconds = 0;
};
RoundsFit fit_rounds(const std::vector<RoundsPoint>& points, bool with_least);

// How well `predicted` explains points of (size, seconds), and some of those.
FitQuality quality_of(const std::vector<std::pair<double, Seconds>>& points,
                      const std::vector<double>& predicted);

// One measured call and what the cost model knows of it.
struct Sample {
  Flops flops = 0;
  Bytes bytes = 0;
  Seconds seconds = 0;
};
// The coefficients of `seconds = overhead + flops / rate + bytes / bandwidth` (see above) and how
// well they explain the samples. REQUIRES: at least one sample.
// `fastest`, if given: flops per second that no larger call is taken to be faster than, unless a
// sample is. Samples of small calls alone, which move bytes, say nothing of what flops take.
OpRate fit(const std::vector<Sample>& samples, FitQuality* quality, Flops fastest = 0);
// The same by bytes alone, of which those beyond what a cache holds (the size of one of the
// samples) move more slowly.
OpRate fit_with_cache(const std::vector<Sample>& samples, FitQuality* quality);

}  // namespace motley
