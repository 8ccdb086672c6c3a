// Seeded random numbers that are the same on every platform and independent of evaluation order.
#pragma once

#include <cstdint>

namespace motley {

// One step of SplitMix64: a bijective mix of 64 bits.
constexpr uint64_t mix64(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// A small generator (SplitMix64): enough for sampling programs and test cases, not for
// cryptography.
class Rng {
 public:
  explicit Rng(uint64_t seed) : state_(mix64(seed)) {}

  uint64_t next() { return mix64(state_ += 0x9e3779b97f4a7c15ull); }
  // Uniform in [0, n). REQUIRES: n > 0.
  int64_t below(int64_t n) { return static_cast<int64_t>(next() % static_cast<uint64_t>(n)); }
  // Uniform in [lo, hi].
  int64_t between(int64_t lo, int64_t hi) { return lo + below(hi - lo + 1); }
  // Uniform in [0, 1).
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  bool chance(double p) { return uniform() < p; }

 private:
  uint64_t state_;
};

}  // namespace motley
