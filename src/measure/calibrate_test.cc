#include <gtest/gtest.h>

#include <cmath>

#include "core/rng.h"
#include "measure/fit.h"

namespace motley {
namespace {

double error_of(const std::vector<Sample>& samples, double overhead, double per_flop,
                double per_byte) {
  double error = 0;
  for (const Sample& s : samples) {
    const double d = overhead + per_flop * s.flops + per_byte * s.bytes - s.seconds;
    error += d * d / s.seconds;
  }
  return error;
}

std::vector<Sample> samples_of(Rng& rng, double overhead, double per_flop, double per_byte,
                               double noise) {
  std::vector<Sample> samples;
  for (int i = 0; i < 12; ++i) {
    Sample s;
    s.flops = std::pow(10, 4 + 5 * rng.uniform());
    s.bytes = std::pow(10, 3 + 4 * rng.uniform());
    s.seconds = (overhead + per_flop * s.flops + per_byte * s.bytes) *
                (1 + noise * (2 * rng.uniform() - 1));
    samples.push_back(s);
  }
  return samples;
}

TEST(Fit, FindsWhatMadeTheSamples) {
  Rng rng(1);
  for (int i = 0; i < 50; ++i) {
    FitQuality quality;
    const OpRate rate = fit(samples_of(rng, 5e-6, 1e-10, 1e-9, 0), &quality);
    EXPECT_NEAR(rate.overhead, 5e-6, 1e-9);
    EXPECT_NEAR(rate.flops, 1e10, 1e7);
    EXPECT_NEAR(rate.memory_bandwidth, 1e9, 1e6);
    EXPECT_GT(quality.r2, 0.999999);
    EXPECT_EQ(quality.points.size(), 12U);
  }
}

TEST(Fit, TimesThatTookNothingHaveAFiniteError) {
  FitQuality quality;
  fit({{1e6, 0, 1e-5}, {1e7, 0, 0}, {1e8, 0, 1e-3}}, &quality);
  EXPECT_TRUE(std::isfinite(quality.error));
}

TEST(Fit, FindsTheCacheOfAnOptimizer) {
  Rng rng(3);
  for (int i = 0; i < 50; ++i) {
    std::vector<Sample> samples;
    for (int k = 12; k <= 28; k += 2) {
      Sample s;
      s.bytes = std::pow(2., k);
      samples.push_back(s);
    }
    const Bytes knee = samples[1 + rng.below(6)].bytes;
    const bool slower = i % 3 > 0;
    for (Sample& s : samples)
      s.seconds = 2e-5 + 1e-10 * s.bytes + (slower ? 2e-10 : 0) * std::max(0.0, s.bytes - knee);
    FitQuality quality;
    const OpRate rate = fit_with_cache(samples, &quality);
    EXPECT_NEAR(rate.overhead, 2e-5, 1e-8);
    EXPECT_NEAR(rate.memory_bandwidth, 1e10, 1e7);
    EXPECT_LT(quality.error, 1e-6);
    if (slower) {
      EXPECT_EQ(rate.cached, knee);
      EXPECT_NEAR(rate.uncached_bandwidth, 5e9, 5e6);
    }
  }
}

// Checked by trying: random steps away from the answer never do better.
TEST(Fit, IsTheBestWithoutNegativeCoefficients) {
  Rng rng(2);
  for (int i = 0; i < 200; ++i) {
    auto maybe = [&](double x) { return rng.uniform() < 0.4 ? 0 : x * rng.uniform(); };
    const auto samples = samples_of(rng, 1e-6 + maybe(1e-5), maybe(1e-10), maybe(1e-9), 0.5);
    FitQuality quality;
    const OpRate rate = fit(samples, &quality);
    const double x[] = {rate.overhead, rate.flops > 0 ? 1 / rate.flops : 0,
                        rate.memory_bandwidth > 0 ? 1 / rate.memory_bandwidth : 0};
    for (double v : x) EXPECT_GE(v, 0);
    const double best = error_of(samples, x[0], x[1], x[2]);
    const double scale[] = {1e-6, 1e-11, 1e-10};
    for (int k = 0; k < 100; ++k) {
      double y[3];
      for (int j = 0; j < 3; ++j)
        y[j] = std::max(0.0, x[j] + scale[j] * (2 * rng.uniform() - 1) * std::pow(0.1, k % 4));
      EXPECT_GE(error_of(samples, y[0], y[1], y[2]), best * (1 - 1e-9));
    }
  }
}

// All-reduces of four workers at two sites, 2 ms and 100 Mbps apart, as they were measured.
TEST(Fit, FindsWhatARoundTakesAtLeast) {
  const std::vector<std::pair<double, Seconds>> measured = {
      {4096, 25.63e-3},   {16384, 25.62e-3},    {65536, 25.73e-3},
      {262144, 38.63e-3}, {1048576, 133.25e-3}, {4194304, 520.72e-3}};
  std::vector<RoundsPoint> points;
  for (const auto& [bytes, seconds] : measured) points.push_back({6, 1.5 * bytes, seconds});
  const RoundsFit fit = fit_rounds(points, true), affine = fit_rounds(points, false);
  EXPECT_NEAR(fit.least, 25.66e-3 / 6, 1e-5);
  EXPECT_NEAR(1 / fit.per_byte, 12.5e6, 0.5e6);
  EXPECT_EQ(affine.least, 0);
  double worst = 0;
  for (const RoundsPoint& p : points) {
    EXPECT_NEAR(fit.seconds(p.rounds, p.traffic), p.seconds, 0.05 * p.seconds) << p.traffic;
    worst = std::max(worst, std::abs(affine.seconds(p.rounds, p.traffic) / p.seconds - 1));
  }
  EXPECT_GT(worst, 0.2);
}

TEST(Fit, FindsTheRoundsThatMadeTheTimes) {
  Rng rng(7);
  for (int trial = 0; trial < 200; ++trial) {
    const double latency = 1e-5 + 1e-3 * rng.uniform(), bandwidth = 1e7 + 1e9 * rng.uniform(),
                 least = trial % 2 ? latency * (1.5 + 2.5 * rng.uniform()) : 0;
    const int flat = static_cast<int>(rng.between(2, 4)), all = 8;
    std::vector<RoundsPoint> points;
    for (int i = 0; i < all; ++i) {
      // What is as fast as the least is small enough for it, and what is not is twice as large or more.
      const double knee = (least > 0 ? least - latency : latency) * bandwidth,
                   bytes = i < flat ? knee * 0.9 * (i + 1) / flat : knee * 2 * (i - flat + 1);
      points.push_back({3, 3 * bytes, 3 * std::max(least, latency + bytes / bandwidth)});
    }
    const RoundsFit fit = fit_rounds(points, true);
    for (const RoundsPoint& p : points)
      EXPECT_NEAR(fit.seconds(p.rounds, p.traffic), p.seconds, 1e-6 * p.seconds) << trial;
    EXPECT_NEAR(fit.latency, latency, 1e-6 * latency);
    EXPECT_EQ(fit.least > 0, least > 0) << trial;
  }
}

// Small products move their weights; what a large one takes, they do not show.
TEST(Fit, NothingIsFasterThanTheDevice) {
  FitQuality quality;
  const std::vector<Sample> small = {{9.4e6, 2.4e6, 6.3e-4}, {1.2e7, 3.1e6, 8.2e-4}};
  const OpRate alone = fit(small, &quality);
  EXPECT_EQ(alone.flops, 0);
  const OpRate rate = fit(small, &quality, 50e9);
  EXPECT_NEAR(rate.flops, 50e9, 1);
  EXPECT_LT(quality.error, 0.02);
  // A sample may be faster.
  EXPECT_NEAR(fit({{1e9, 1e3, 1e-2}}, &quality, 50e9).flops, 1e11, 1e3);
}

TEST(Fit, OfOneSampleIsThatSample) {
  FitQuality quality;
  const OpRate rate = fit({{100, 200, 3e-6}}, &quality);
  double seconds = rate.overhead;
  if (rate.flops > 0) seconds += 100 / rate.flops;
  if (rate.memory_bandwidth > 0) seconds += 200 / rate.memory_bandwidth;
  EXPECT_NEAR(seconds, 3e-6, 1e-12);
}

}  // namespace
}  // namespace motley
