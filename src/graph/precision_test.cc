#include "graph/precision.h"

#include <gtest/gtest.h>

#include <map>
#include <string>

namespace motley {
namespace {

// A linear layer with a loss: its product is computed in 16 bits, everything from the log-softmax
// on is not, and the backward pass goes on in 16 bits from where it meets the product.
const char* kGraph = R"(model toy
%0 = motley::parameter("w") : f32[4,10]
%1 = motley::input("x") : f32[6,4]
%2 = motley::input("t") : i64[6]
%3 = aten::mm(%1, %0) : f32[6,10]
%4 = aten::relu(%3) : f32[6,10]
%5 = aten::_log_softmax(%4, 1, false) : f32[6,10]
%6, %7 = aten::nll_loss_forward(%5, %2, none, 2, -100) : f32[], f32[]
%8 = aten::full([], 1.0, f32, none, none, none) : f32[] backward
%9 = aten::nll_loss_backward(%8, %5, %2, none, 2, -100, %7) : f32[6,10] backward
%10 = aten::_log_softmax_backward_data(%9, %5, 1, f32) : f32[6,10] backward
%11 = aten::threshold_backward(%10, %4, 0) : f32[6,10] backward
%12 = aten::t(%1) : f32[4,6] backward
%13 = aten::mm(%12, %11) : f32[4,10] backward
loss %6
gradient "w" %13
)";

const char* kMixed = R"(model toy
%0 = motley::parameter("w") : f32[4,10]
%1 = motley::input("x") : f32[6,4]
%2 = motley::input("t") : i64[6]
%3 = aten::_to_copy(%1, bf16, none, none, none, false, none) : bf16[6,4]
%4 = aten::_to_copy(%0, bf16, none, none, none, false, none) : bf16[4,10]
%5 = aten::mm(%3, %4) : bf16[6,10]
%6 = aten::relu(%5) : bf16[6,10]
%7 = aten::_to_copy(%6, f32, none, none, none, false, none) : f32[6,10]
%8 = aten::_log_softmax(%7, 1, false) : f32[6,10]
%9, %10 = aten::nll_loss_forward(%8, %2, none, 2, -100) : f32[], f32[]
%11 = aten::full([], 1.0, f32, none, none, none) : f32[] backward
%12 = aten::nll_loss_backward(%11, %8, %2, none, 2, -100, %10) : f32[6,10] backward
%13 = aten::_log_softmax_backward_data(%12, %8, 1, f32) : f32[6,10] backward
%14 = aten::_to_copy(%13, bf16, none, none, none, false, none) : bf16[6,10] backward
%15 = aten::threshold_backward(%14, %6, 0) : bf16[6,10] backward
%16 = aten::t(%3) : bf16[4,6] backward
%17 = aten::mm(%16, %15) : bf16[4,10] backward
loss %9
gradient "w" %17
)";

TEST(Precision, ProductsAreIn16BitsAndTheLossIsNot) {
  EXPECT_EQ(to_text(with_precision(parse_graph(kGraph, "g"), DType::bf16)), kMixed);
}

TEST(Precision, TheTypeOfTheParametersGivesTheSameNodes) {
  const Graph same = with_precision(parse_graph(kGraph, "g"), DType::f32);
  const Graph mixed = parse_graph(kMixed, "m");
  ASSERT_EQ(same.nodes.size(), mixed.nodes.size());
  for (size_t n = 0; n < same.nodes.size(); ++n) EXPECT_EQ(same.nodes[n].op, mixed.nodes[n].op);
  for (const Value& value : same.values) EXPECT_NE(value.spec.dtype, DType::bf16);
}

// Masks and positions come of integers and stay exact; what they multiply does not become wider.
TEST(Precision, WhatComesOfIntegersStaysExact) {
  const Graph graph = with_precision(parse_graph(R"(model toy
%0 = motley::parameter("w") : f32[6,4]
%1 = motley::input("m") : b8[6,4]
%2 = aten::_to_copy(%1, f32, none, none, none, false, none) : f32[6,4]
%3 = aten::cumsum(%2, 0, none) : f32[6,4]
%4 = aten::mul.Tensor(%0, %3) : f32[6,4]
%5 = aten::sum(%4, none) : f32[]
loss %5
)",
                                                 "g"),
                                     DType::bf16);
  std::map<std::string, DType> type;
  for (const Node& node : graph.nodes) type[node.op] = graph.spec(node.outputs[0]).dtype;
  EXPECT_EQ(type["aten::cumsum"], DType::f32);
  EXPECT_EQ(type["aten::mul.Tensor"], DType::bf16);
  EXPECT_EQ(type["aten::sum"], DType::f32);
  EXPECT_TRUE(verify(graph).empty());
}

}  // namespace
}  // namespace motley
