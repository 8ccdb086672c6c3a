#include "spmd/exposure.h"

#include <algorithm>
#include <utility>

namespace motley::spmd {

using Kind = ExposureBound::Kind;

int stretch_of(const std::vector<int64_t>& from, int64_t node) {
  return static_cast<int>(std::upper_bound(from.begin(), from.end(), node) - from.begin());
}

const Decision* Exposure::decision(ValueId gradient) const {
  for (const Decision& d : decided)
    if (d.gradient == gradient) return &d;
  return nullptr;
}

std::vector<ExposureBound> exposure_bounds(int stretches, int types, int barrier) {
  std::vector<ExposureBound> bounds;
  for (int t = 0; t < types; ++t) {
    for (int s = 1; s < stretches; ++s) bounds.push_back({Kind::begin, s, t});
    bounds.push_back({Kind::never, stretches, t});
    if (barrier > 0) bounds.push_back({Kind::barrier, barrier, t});
  }
  return bounds;
}

namespace {

bool computes(const ExposureBound& bound, int stretch) { return stretch < bound.stretch; }

bool reduces(const ExposureBound& bound, int stretch) {
  return bound.kind == Kind::barrier || (bound.kind == Kind::begin && stretch >= bound.stretch);
}

}  // namespace

Exposure mixture(const std::vector<ExposureBound>& bounds, const std::vector<double>& weights,
                 std::vector<int64_t> from, int types) {
  Exposure result;
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

std::vector<double> exposed(const std::vector<ExposureBound>& bounds, const ExposedCost& cost) {
  std::vector<double> result;
  for (const ExposureBound& bound : bounds) {
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
