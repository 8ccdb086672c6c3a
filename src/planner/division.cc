#include "planner/division.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

namespace motley::planner {

namespace {

// [replica] Shares of something of `size` bytes such that the least room left is as large as it can
// be.
std::vector<double> shares_by_room(const std::vector<Bytes>& room, Bytes size) {
  std::vector<double> shares(room.size(), 1.0 / static_cast<double>(room.size()));
  if (size <= 0) return shares;
  const auto [least, most] = std::minmax_element(room.begin(), room.end());
  Bytes low = *least - size, high = *most;  // what is left
  for (int i = 0; i < 60; ++i) {
    const Bytes left = (low + high) / 2;
    Bytes sum = 0;
    for (Bytes r : room) sum += std::max(0.0, r - left);
    (sum > size ? low : high) = left;
  }
  double sum = 0;
  for (size_t r = 0; r < room.size(); ++r) sum += shares[r] = std::max(0.0, room[r] - low);
  for (double& share : shares) share /= sum;
  return shares;
}
}  // namespace

void divide_by_room(const Cluster& cluster, Optimizer optimizer, PipelinePlan* pipeline) {
  const auto replicas = pipeline->replicas.size();
  for (int s = 0; s < pipeline->stages(); ++s) {
    Division& division = pipeline->zero[s];
    const std::vector<int> devices = devices_of(*pipeline, s);
    if (std::all_of(devices.begin(), devices.end(), [&](int d) {
          return cluster.type_of(d).memory == cluster.type_of(devices[0]).memory;
        }))
      continue;
    // The memory of all but the first replica if that has everything, and the other way round.
    division.shares.assign(replicas, 0);
    division.shares[0] = 1;
    const std::vector<Bytes> first = pipeline_memory(*pipeline, cluster, optimizer);
    std::swap(division.shares[0], division.shares[1]);
    const std::vector<Bytes> second = pipeline_memory(*pipeline, cluster, optimizer);
    std::vector<Bytes> room(replicas, std::numeric_limits<double>::infinity());
    Bytes size = 0;
    for (size_t r = 0; r < replicas; ++r)
      for (int d : pipeline->replicas[r].stages[s].devices) {
        const Bytes without = r == 0 ? second[d] : first[d];
        room[r] = std::min(room[r], cluster.type_of(d).memory - without);
        if (r == 0) size = std::max(size, first[d] - without);
      }
    division.shares = shares_by_room(room, size);
  }
}
}  // namespace motley::planner
