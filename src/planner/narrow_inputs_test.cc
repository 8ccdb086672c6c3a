#include "planner/narrow_inputs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "core/rng.h"

namespace motley::planner {
namespace {

// Sums of an input and of views of it. All are held whole and sliced where they are read.
const char* kGraph = R"(%0 = motley::input("x") : f32[8,6]
%1 = aten::slice.Tensor(%0, 1, 0, 5, 1) : f32[8,5]
%2 = aten::sum(%1, none) : f32[]
%3 = aten::t(%0) : f32[6,8]
%4 = aten::sum(%3, none) : f32[]
%5 = aten::sum(%0, none) : f32[]
%6 = aten::add.Tensor(%2, %4, 1) : f32[]
%7 = aten::add.Tensor(%6, %5, 1) : f32[]
loss %7
)";

Plan plan_of(const std::vector<std::string>& lines) {
  Plan plan;
  plan.set_graph(parse_graph(kGraph, "graph"));
  std::vector<Step> steps;
  for (const std::string& line : lines) steps.push_back(parse_step(*plan.theory, line, "program"));
  plan.program.steps = std::move(steps);
  return plan;
}

TEST(NarrowInputs, AnyOrderOfWholeUsesAndSlices) {
  Rng rng(5);
  bool narrowed = false;
  for (int round = 0; round < 300; ++round) {
    // Each chain keeps its order; the chains are mixed.
    const auto cut = [&](int axes) { return rng.between(0, axes); };
    const int64_t a = cut(2), b = cut(2), c = cut(2);
    std::vector<std::vector<std::string>> chains(3);
    if (a == 2)
      chains[0] = {"node 1 aten::slice.Tensor R -> R", "node 2 aten::sum R -> R"};
    else
      chains[0] = {"node 1 aten::slice.Tensor R -> R", fmt::format("slice %1 R -> S({})", a),
                   fmt::format("node 2 aten::sum S({}) -> P", a), "all_reduce %2 P -> R"};
    if (b == 2)
      chains[1] = {"node 3 aten::t R -> R", "node 4 aten::sum R -> R"};
    else
      chains[1] = {"node 3 aten::t R -> R", fmt::format("slice %3 R -> S({})", b),
                   fmt::format("node 4 aten::sum S({}) -> P", b), "all_reduce %4 P -> R"};
    if (c == 2)
      chains[2] = {"node 5 aten::sum R -> R"};
    else
      chains[2] = {fmt::format("slice %0 R -> S({})", c),
                   fmt::format("node 5 aten::sum S({}) -> P", c), "all_reduce %5 P -> R"};
    std::vector<std::string> lines = {"node 0 motley::input  -> R"};
    for (size_t left = 9; left > 0;) {
      const auto k = rng.between(0, 2);
      if (!chains[k].empty()) {
        lines.push_back(chains[k].front());
        chains[k].erase(chains[k].begin());
      }
      left = chains[0].size() + chains[1].size() + chains[2].size();
    }
    lines.push_back("node 6 aten::add.Tensor R, R -> R");
    lines.push_back("node 7 aten::add.Tensor R, R -> R");
    Plan plan = plan_of(lines);
    ASSERT_EQ(check(*plan.theory, plan.program), std::vector<std::string>());
    const Program before = plan.program;
    narrow_inputs(&plan);
    ASSERT_EQ(check(*plan.theory, plan.program), std::vector<std::string>())
        << fmt::format("{}", fmt::join(lines, "\n"));
    narrowed = narrowed || before.steps != plan.program.steps;
  }
  EXPECT_TRUE(narrowed);
}

}  // namespace
}  // namespace motley::planner
