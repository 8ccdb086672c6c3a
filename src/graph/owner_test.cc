#include "graph/owner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace motley {
namespace {

// Views and conversions of a parameter are its own wherever they stand; other forward nodes are
// those of what was read last.
TEST(Owner, IsTheParameterReadLast) {
  const Graph graph = parse_graph(R"(model toy
%0 = motley::input("x") : f32[6,4]
%1 = motley::parameter("a.weight") : f32[10,4]
%2 = motley::parameter("b.weight") : f32[10,3]
%3 = aten::relu(%0) : f32[6,4]
%4 = aten::t(%1) : f32[4,10]
%5 = aten::mm(%3, %4) : f32[6,10]
%6 = aten::t(%2) : f32[3,10]
%7 = aten::relu(%5) : f32[6,10]
%8 = aten::mm(%7, %2) : f32[6,3]
%9 = aten::sum(%8, none) : f32[]
%10 = aten::ones([6, 3], f32, none, none, none) : f32[6,3] backward
%11 = aten::mm(%10, %6) : f32[6,10] backward
loss %9
)",
                                  "toy");
  EXPECT_THAT(owners(graph), testing::ElementsAre(-1, 0, 1, -1, 0, 0, 1, 0, 1, 1, -1, -1));
}

}  // namespace
}  // namespace motley
