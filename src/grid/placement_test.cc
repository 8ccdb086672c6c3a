#include "grid/placement.h"

#include <gtest/gtest.h>

#include <set>
#include <utility>

#include "core/error.h"

namespace motley::grid {
namespace {

Cluster two_kinds(int count, int per_node) {
  return parse_cluster(
      fmt::format("name: two\nlink: {{bandwidth: 10 Gbps, latency: 30 us}}\ngroups:\n"
                  "  - {{count: {0}, link: {{bandwidth: 170 Gbps}}, devices: [{{type: V100-16GB, "
                  "count: {1}}}]}}\n"
                  "  - {{count: {0}, link: {{bandwidth: 50 Gbps}}, devices: [{{type: T4, count: "
                  "{1}}}]}}\n",
                  count, per_node),
      "two");
}

// Groups on nodes, the first stage's in order: all of them, one after the other.
std::vector<std::vector<int>> all_placements(const Nodes& nodes, int pp, int dp, int size) {
  std::vector<std::vector<int>> found;
  std::vector<int> used(nodes.devices.size(), 0), at, devices;
  const auto place = [&](auto&& self) -> void {
    const int group = static_cast<int>(at.size());
    if (group == pp * dp) {
      found.push_back(devices);
      return;
    }
    std::set<std::pair<int, int>> untouched;
    for (int n = group > 0 && group < dp ? at.back() : 0; n < static_cast<int>(used.size()); ++n) {
      if (used[n] + size > static_cast<int>(nodes.devices[n].size())) continue;
      if (used[n] == 0 && !untouched.insert({nodes.kind[n], nodes.parent[n]}).second) continue;
      for (int k = 0; k < size; ++k) devices.push_back(nodes.devices[n][used[n] + k]);
      used[n] += size;
      at.push_back(n);
      self(self);
      at.pop_back();
      used[n] -= size;
      devices.resize(devices.size() - size);
    }
  };
  place(place);
  return found;
}

// Looks into no placement that cannot be completed: there are too many of them.
TEST(Placement, EnumerationHasNoDeadEnds) {
  for (int pp = 1; pp <= 3; ++pp)
    for (int dp = 1; dp <= 4; ++dp)
      for (int size = 1; size <= 3; ++size) {
        const Cluster cluster = two_kinds(2, 1 + (pp + dp) % 4);
        std::vector<std::vector<int>> found;
        EXPECT_TRUE(enumerate_placements(cluster, pp, dp, size, 1 << 20,
                                         [&](const auto& devices) { found.push_back(devices); }));
        EXPECT_EQ(found, all_placements(nodes_of(cluster), pp, dp, size));
      }
  const Cluster large = two_kinds(16, 8);
  int visited = 0;
  const auto count = [&](const std::vector<int>&) { ++visited; };
  EXPECT_TRUE(enumerate_placements(large, 1, 256, 1, 10, count));
  EXPECT_EQ(visited, 1);
  EXPECT_FALSE(enumerate_placements(large, 1, 250, 1, 10, count));
  EXPECT_TRUE(enumerate_placements(large, 2, 43, 3, 10, count));  // 64 groups of 3, no 86
  EXPECT_EQ(visited, 11);
}

}  // namespace
}  // namespace motley::grid
