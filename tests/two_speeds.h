// Models on a few devices of two speeds, for tests of whole plans.
#pragma once

#include <string>

#include "capture/capture.h"
#include "cluster/cluster.h"
#include "graph/canonical.h"

namespace motley {

inline Graph captured(const std::string& model, int64_t batch) {
  return canonicalize(capture(model, batch).graph);
}

// The slow ones have a third of the speed.
inline Cluster cluster_of(int fast, int slow, double bandwidth) {
  DeviceType a = device_catalogue().back(), b = a;
  a.name = "fast";
  b.name = "slow";
  b.flops /= 3;
  return flat_cluster({a, b}, {fast, slow}, {LinkKind::switched, bandwidth, 1e-5});
}

}  // namespace motley
