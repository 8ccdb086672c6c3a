#include "spmd/overlap_pricing.h"

#include <algorithm>
#include <utility>

namespace motley::spmd {

using Kind = OverlapBound::Kind;

int stretch_of(const std::vector<int64_t>& from, int64_t node) {
  return static_cast<int>(std::upper_bound(from.begin(), from.end(), node) - from.begin());
}

const Decision* OverlapPricing::decision(ValueId gradient) const {
  for (const Decision& d : decided)
    if (d.gradient == gradient) return &d;
  return nullptr;
}

std::vector<OverlapBound> overlap_bounds(int stretches, int types, int barrier) {
  std::vector<OverlapBound> bounds;
  for (int t = 0; t < types; ++t) {
    for (int s = 1; s < stretches; ++s) bounds.push_back({Kind::begin, s, t});
    bounds.push_back({Kind::never, stretches, t});
    if (barrier > 0) bounds.push_back({Kind::barrier, barrier, t});
  }
  return bounds;
}

namespace {

bool computes(const OverlapBound& bound, int stretch) { return stretch < bound.stretch; }

bool reduces(const OverlapBound& bound, int stretch) {
  return bound.kind == Kind::barrier || (bound.kind == Kind::begin && stretch >= bound.stretch);
}

}  // namespace

OverlapPricing mixture(const std::vector<OverlapBound>& bounds, const std::vector<double>& weights,
                       std::vector<int64_t> from, int types) {
  OverlapPricing result;
  const int stretches = static_cast<int>(from.size()) + 1;
  result.from = std::move(from);
  result.compute.assign(stretches, std::vector<double>(types, 0));
  result.gradients.assign(stretches, 0);
  for (size_t b = 0; b < bounds.size(); ++b)
    for (int s = 0; s < stretches; ++s) {
      if (computes(bounds[b], s)) result.compute[s][bounds[b].type] += weights[b];
      if (reduces(bounds[b], s)) result.gradients[s] += weights[b];
    }
  return result;
}

std::vector<double> overlap_values(const std::vector<OverlapBound>& bounds,
                                   const OverlapCost& cost) {
  std::vector<double> result;
  for (const OverlapBound& bound : bounds) {
    Seconds seconds = cost.comm;
    for (int s = 0; s < static_cast<int>(cost.gradients.size()); ++s) {
      if (computes(bound, s)) seconds += cost.compute[s][bound.type];
      if (reduces(bound, s)) seconds += cost.gradients[s];
    }
    result.push_back(seconds);
  }
  return result;
}

}  // namespace motley::spmd
