// Uneven shares: how a dimension (an atomic factor of it) is divided among devices.
//
// A plan holds one ratio per device, or one per device and segment (graph/segment.h). The pieces of
// a factor of size n depend on n and the ratios only, so that every tensor of a segment that is
// indexed by the same factor is cut at the same places. Rounding is that of HAP section 5.1:
// nearest integers, then the pieces with the smallest rounding error give or take one until the sum
// is n. A piece may be empty.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <vector>

namespace motley {

// Integer pieces of n by ratios (non-negative, sum > 0), each its share of n rounded down or up.
// Deterministic: ties go to the lower device.
std::vector<int64_t> divide(int64_t n, const std::vector<double>& ratios);

// A factor that is cut, in the shares of a segment.
struct Cut {
  Cut(int64_t n = 0, int of = 0) : size(n), segment(of) {}  // a size is a cut of the first segment
  int64_t size;                                             // 0: nothing is cut
  int segment;
  friend auto operator<=>(const Cut&, const Cut&) = default;
};

using Ratios = std::vector<std::vector<double>>;  // [segment][device]

// The pieces of every cut under the ratios of the segments, computed on first use.
class Shares {
 public:
  explicit Shares(std::vector<double> ratios) : ratios_{std::move(ratios)} {}
  explicit Shares(Ratios ratios) : ratios_(std::move(ratios)) {}

  int devices() const { return static_cast<int>(ratios_[0].size()); }
  int segments() const { return static_cast<int>(ratios_.size()); }
  const std::vector<double>& ratios(int segment = 0) const { return ratios_[segment]; }
  // REQUIRES: a segment that has ratios.
  const std::vector<int64_t>& of(Cut cut) const;
  int64_t begin(Cut cut, int device) const;  // first index of a device's piece

 private:
  Ratios ratios_;
  mutable std::map<Cut, std::vector<int64_t>> pieces_;
};

}  // namespace motley
