// What stage_programs.cc takes for granted.
#include <gtest/gtest.h>

#include "core/rng.h"
#include "planner/alternation.h"
#include "reference/sample.h"
#include "reference/spmd_graphs.h"

namespace motley::planner {

using namespace spmd;

namespace {

// Where the leanest program lacks some bytes, nothing fits into a little less than so many more:
// on equal devices, whose shares stay the same.
TEST(StagePrograms, WhatLacksBytesLacksThemInFewerMore) {
  Rng rng(4);
  int lacking = 0, found_later = 0;
  for (const char* name : kGraphs) {
    const Graph graph = load(name);
    const Theory theory(graph);
    AlternationOptions options;
    options.recompute = options.certify = false;
    Cluster cluster =
        flat_cluster({device("fast", 4e12, 16e9)}, {3}, {LinkKind::switched, 1e9, 1e-5});
    Bytes& memory = cluster.types[0].memory;
    const Bytes most = alternate(theory, CostModel(cluster), options).cost.memory.peak[0];
    for (int trial = 0; trial < 40; ++trial) {
      memory = (0.2 + 0.8 * rng.uniform()) * most;
      const Alternation found = alternate(theory, CostModel(cluster), options);
      EXPECT_TRUE(!found.feasible || found.excess == 0);
      if (found.excess == 0) continue;
      ++lacking;
      memory += 0.99 * rng.uniform() * found.excess;
      found_later += alternate(theory, CostModel(cluster), options).feasible;
    }
  }
  EXPECT_GT(lacking, 20);
  EXPECT_EQ(found_later, 0) << "of " << lacking;
}

}  // namespace
}  // namespace motley::planner
