#include <gtest/gtest.h>

#include <numeric>
#include <set>

#include "core/rng.h"
#include "planner/sub_clusters.h"

namespace motley::planner {
namespace {

Part part_of(int nodes, int devices) {
  Part part;
  part.shape.nodes = nodes;
  part.shape.devices = devices;
  part.devices.resize(nodes * devices);
  std::iota(part.devices.begin(), part.devices.end(), 100);
  return part;
}

pipeline::PipelinePlan plan_of(const std::vector<int>& sizes, int pipelines = 1) {
  pipeline::PipelinePlan plan;
  plan.pipelines = pipelines;
  for (int size : sizes) {
    pipeline::Stage stage;
    stage.mesh = {0, 1, size};
    plan.stages.push_back(stage);
  }
  return plan;
}

int nodes_of(const std::vector<int>& seat, int devices) {
  std::set<int> nodes;
  for (int d : seat) nodes.insert((d - 100) / devices);
  return static_cast<int>(nodes.size());
}

TEST(Seats, StagesFollowOneAnotherWhereTheyFit) {
  const auto seats = seats_of({part_of(2, 4)}, plan_of({2, 2, 4}), 0);
  EXPECT_EQ(seats, (std::vector<std::vector<int>>{{100, 101}, {102, 103}, {104, 105, 106, 107}}));
}

TEST(Seats, WholeNodesAreNotDivided) {
  const auto seats = seats_of({part_of(2, 8)}, plan_of({4, 8, 4}), 0);
  EXPECT_EQ(seats[0], (std::vector<int>{108, 109, 110, 111}));
  EXPECT_EQ(seats[1], (std::vector<int>{100, 101, 102, 103, 104, 105, 106, 107}));
  EXPECT_EQ(seats[2], (std::vector<int>{112, 113, 114, 115}));
}

// Powers of two in any order: no stage lies in more nodes than it has to, every device has one.
TEST(Seats, PowersOfTwoAlwaysPack) {
  Rng rng(5);
  for (int trial = 0; trial < 300; ++trial) {
    const int devices = 1 << rng.between(1, 3), nodes = static_cast<int>(rng.between(1, 4));
    const int pipelines = static_cast<int>(rng.between(1, 2)), share = nodes * devices;
    const Part part = part_of(pipelines * nodes, devices);
    std::vector<int> sizes;
    for (int left = share; left > 0; left -= sizes.back()) {
      int size = 1 << rng.between(0, 4);
      while (size > left || (size > devices && size % devices != 0)) size /= 2;
      sizes.push_back(size);
    }
    std::set<int> taken;
    for (int k = 0; k < pipelines; ++k) {
      const auto seats = seats_of({part}, plan_of(sizes, pipelines), k);
      for (size_t s = 0; s < sizes.size(); ++s) {
        EXPECT_EQ(static_cast<int>(seats[s].size()), sizes[s]);
        EXPECT_EQ(nodes_of(seats[s], devices), (sizes[s] + devices - 1) / devices);
        taken.insert(seats[s].begin(), seats[s].end());
      }
    }
    EXPECT_EQ(taken.size(), part.devices.size());
  }
}

}  // namespace
}  // namespace motley::planner
