#include "bounds/memory_problem.h"

#include <gtest/gtest.h>

#include "reference/memory_graphs.h"

namespace motley::bounds {

using namespace solver;
using namespace spmd;

namespace {

TEST(MemoryProblem, NoProgramIsBelow) {
  // Some come near it.
  EXPECT_LT(expect_no_program_below(layered_graph(4), 6, 60, 1), 0.2);
  EXPECT_LT(expect_no_program_below(load("mlp"), 6, 60, 2), 0.1);
  EXPECT_LT(expect_no_program_below(load("gpt1"), 2, 30, 3), 0.5);
}

// On one device all forms are as large and as fast, so its programs are one program: what the
// problem counts for no block that runs twice, or all that can, is what the cost model does, and
// its bytes are those that are there at the peak node.
TEST(MemoryProblem, IsExactOnOneDevice) {
  for (const int layers : {2, 6}) {
    const Graph graph = layered_graph(layers);
    const Theory theory(graph);
    const CostModel model(flat_cluster({device("d", 1e12)}, {1}, {LinkKind::switched, 1e9, 1e-5}));
    const Shares shares(std::vector<double>{1});
    const Fractions fractions(model.cluster(), shares);
    ProblemBuilder builder(theory, model, Optimizer::adamw);
    builder.price(fractions);
    const std::vector<int> block_of = blocks_of(graph);
    const NodeId peak_node = MemoryProblem::peak_node(theory, builder, fractions);
    MemoryProblem problem(theory, builder, block_of, fractions, peak_node);
    const Order order = make_order(problem.problem());
    ASSERT_FALSE(problem.kinds().empty());
    Seconds before = 0;
    Bytes held = 0;
    for (const bool twice : {false, true}) {
      const std::vector<Seconds> none(problem.kinds().size(), 0),
          never(problem.kinds().size(), 1e3);
      problem.price_modes(twice ? none : never, twice ? never : none);
      // A little for bytes, so that nothing runs twice that need not.
      const Weights weights{{1}, {1e-18}};
      const Solution solution = solve_folded(problem.problem(), order, weights);
      const std::vector<int> count = problem.twice(solution);
      for (size_t k = 0; k < count.size(); ++k)
        EXPECT_EQ(count[k], twice ? problem.kinds()[k] : 0) << layers;
      Seconds seconds = model.per_step(0, graph);
      Bytes bytes = problem.fixed_bytes()[0];
      for (size_t n = 0; n < problem.problem().nodes.size(); ++n) {
        const Option& o = problem.problem()
                              .option_tables[problem.problem().nodes[n].table]
                              .options[solution.option[n]];
        seconds += o.compute[0];
        bytes += o.memory[0];
      }
      EXPECT_TRUE(check(theory, builder.program(problem.plain(solution))).empty());
      const int blocks = 1 + *std::max_element(block_of.begin(), block_of.end());
      // The backward pass of the last block has begun at the peak node.
      std::vector<bool> chosen(blocks, twice);
      chosen.back() = false;
      const ProgramCost cost =
          cost_of(theory, recompute(theory, whole_program(theory), block_of, chosen), model,
                  fractions, Optimizer::adamw);
      EXPECT_NEAR(seconds, cost.step, 1e-9 * cost.step) << layers;
      EXPECT_NEAR(bytes, cost.memory.peak[0], graph.spec(graph.loss).bytes()) << layers;
      if (twice) {
        EXPECT_GT(seconds, before);
        EXPECT_LT(bytes, held);
      }
      before = seconds;
      held = bytes;
    }
  }
}

}  // namespace
}  // namespace motley::bounds
