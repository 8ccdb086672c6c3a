// Uneven shares: how a dimension (an atomic factor of it) is divided among devices.
//
// A plan holds one ratio per device. The pieces of a factor of size n depend on n and the ratios
// only, so that every tensor indexed by the same factor is cut at the same places. Rounding is that
// of HAP section 5.1: nearest integers, then the pieces with the smallest rounding error give or
// take one until the sum is n. A piece may be empty.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

namespace motley {

// Integer pieces of n by ratios (non-negative, sum > 0). Deterministic: ties go to the lower
// device.
std::vector<int64_t> divide(int64_t n, const std::vector<double>& ratios);

// The pieces of every factor size under one vector of ratios, computed on first use.
class Shares {
 public:
  explicit Shares(std::vector<double> ratios) : ratios_(std::move(ratios)) {}

  int devices() const { return static_cast<int>(ratios_.size()); }
  const std::vector<double>& ratios() const { return ratios_; }
  const std::vector<int64_t>& of(int64_t n) const;
  int64_t begin(int64_t n, int device) const;  // first index of a device's piece

 private:
  std::vector<double> ratios_;
  mutable std::map<int64_t, std::vector<int64_t>> pieces_;
};

}  // namespace motley
