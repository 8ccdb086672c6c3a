#include "cluster/second_holders.h"

#include <algorithm>

#include "cluster/part.h"

namespace motley {

namespace {

// By how many devices the copies lie further on.
int distance(const Cluster& cluster) {
  std::vector<int> machine(cluster.size(), 0);
  int largest = 1;
  const std::vector<GroupId> machines = machines_of(cluster);
  for (size_t m = 0; m < machines.size(); ++m) {
    const Group& group = cluster.groups[machines[m].index];
    largest = std::max(largest, group.device_count);
    for (int i = 0; i < group.device_count; ++i)
      machine[group.first_device + i] = static_cast<int>(m);
  }
  int best = cluster.size() > 1 ? 1 : 0, most = -1;
  for (int by = 1; by <= std::min(largest, cluster.size() - 1) && most < cluster.size(); ++by) {
    int apart = 0;
    for (int d = 0; d < cluster.size(); ++d)
      apart += machine[d] != machine[(d + by) % cluster.size()];
    if (apart > most) best = by, most = apart;
  }
  return best;
}

}  // namespace

std::vector<int> second_holders(const Cluster& cluster) {
  const int by = distance(cluster);
  std::vector<int> holders;
  for (int d = 0; d < cluster.size(); ++d) holders.push_back((d + by) % cluster.size());
  return holders;
}

std::vector<int> first_holders(const Cluster& cluster) {
  const std::vector<int> second = second_holders(cluster);
  std::vector<int> first(second.size());
  for (size_t d = 0; d < second.size(); ++d) first[second[d]] = static_cast<int>(d);
  return first;
}

}  // namespace motley
