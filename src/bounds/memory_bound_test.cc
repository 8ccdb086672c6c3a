#include "bounds/memory_bound.h"

#include <gtest/gtest.h>

#include "planner/alternation.h"
#include "reference/memory_graphs.h"
#include "spmd/recompute.h"

namespace motley::bounds {

using namespace planner;
using namespace solver;
using namespace spmd;

namespace {

// With less and less memory plans get slower, and so does the bound, which no plan is below.
TEST(MemoryBound, RisesAsMemoryFalls) {
  const Graph graph = layered_graph(8, 4096, 256);
  const Theory theory(graph);
  auto synthesis_with = [&](double memory) {
    const DeviceType type{"d", 1e12, 4e12, memory, 5e10, 1e-6, 0};
    const CostModel model(flat_cluster({type}, {2}, {LinkKind::switched, 1e9, 1e-5}));
    return alternate(theory, model, {});
  };
  const Alternation free = synthesis_with(1e12);
  ASSERT_TRUE(free.feasible);
  int slower = 0;
  Seconds before = 0;
  for (double part = 1; part > 0.3; part -= 0.04) {
    const Alternation s = synthesis_with(part * free.cost.memory.peak[0]);
    if (!s.feasible) break;
    EXPECT_LE(s.lower_bound, s.step());
    // Less memory is no help, whatever was found with more.
    EXPECT_GE(s.lower_bound, 0.98 * before) << part;
    if (s.step() < 1.02 * free.step()) continue;
    ++slower;
    // Bounds that know no memory say the same as ever.
    EXPECT_GE(s.lower_bound, 0.92 * s.step()) << part;
    before = std::max(before, s.lower_bound);
  }
  EXPECT_GT(slower, 1);
}

}  // namespace
}  // namespace motley::bounds
