#include "reduce/explain.h"

#include <gtest/gtest.h>

namespace motley::reduce {
namespace {

TEST(Explain, WordsAndDrawing) {
  Hierarchy h = parse_hierarchy("node:2,gpu:4");
  SynthesisHierarchy s = synthesis_hierarchy(h, placements(h, {8})[0], {0});
  Program program = {{{Shape::inside, 1, 0}, Collective::reduce},
                     {{Shape::master, 1, 0}, Collective::all_reduce},
                     {{Shape::inside, 1, 0}, Collective::broadcast}};
  EXPECT_TRUE(verify(program, s.levels));
  EXPECT_EQ(in_words(program[0], s, h), "reduce inside each node");
  EXPECT_EQ(in_words(program[1], s, h), "all-reduce between the first devices of the nodes");
  EXPECT_EQ(in_words({{Shape::parallel, 1, 0}, Collective::all_gather}, s, h),
            "all-gather across the nodes");
  EXPECT_EQ(in_words({{Shape::inside, 0, 0}, Collective::all_reduce}, s, h),
            "all-reduce over the whole group");
  EXPECT_EQ(to_string(program[1], level_names(s, h)), "(node, Master(root), AllReduce)");
  EXPECT_EQ(draw(program, s, h),
            "               0123 4567\n"
            "  1 reduce     Aaaa Bbbb\n"
            "  2 all-reduce a... a...\n"
            "  3 broadcast  Aaaa Bbbb\n");
  EXPECT_EQ(draw({program[0]}, s, h, 5),
            "           0123 4 ..\n"
            "  1 reduce Aaaa B ..\n");
}

}  // namespace
}  // namespace motley::reduce
