#include "shard/micro_batch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "core/error.h"

namespace motley {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// A linear layer on 12 samples, `loss` of its result %2, and the gradient of the weight, for which
// `backward` makes %20 of the shape of %2.
std::string step(const std::string& loss, const std::string& backward) {
  return R"(model toy
%0 = motley::input("x") : f32[12,6]
%1 = motley::parameter("w") : f32[6,4]
%2 = aten::mm(%0, %1) : f32[12,4]
)" + loss +
         backward + R"(%21 = aten::t(%0) : f32[6,12] backward
%22 = aten::mm(%21, %20) : f32[6,4] backward
gradient "w" %22
)";
}

const char* kSum = "%3 = aten::sum(%2, none) : f32[]\n";
const char* kOnes = "%20 = aten::full([12, 4], 1.0, f32, none, none, none) : f32[12,4] backward\n";

// Values are renumbered in the order in which they are made.
Graph graph(const std::string& text, const std::string& loss) {
  std::string dense;
  std::map<std::string, size_t> number;
  const std::string all = text + "loss " + loss + "\n";
  for (size_t at = 0; at < all.size(); ++at) {
    dense += all[at];
    if (all[at] != '%') continue;
    const size_t end = all.find_first_not_of("0123456789", at + 1);
    const std::string old = all.substr(at + 1, end - at - 1);
    dense += std::to_string(number.try_emplace(old, number.size()).first->second);
    at = end - 1;
  }
  return parse_graph(dense, "toy");
}

std::string refusal(const Graph& whole, int parts) {
  const Theory theory(whole);
  try {
    micro_batch_of(theory, 12, parts, "toy");
  } catch (const UserError& e) {
    return e.what();
  }
  return "taken";
}

MicroBatch part(const Graph& whole, int parts) {
  const Theory theory(whole);
  MicroBatch result = micro_batch_of(theory, 12, parts, "toy");
  EXPECT_TRUE(verify(result.graph).empty()) << verify(result.graph)[0];
  EXPECT_TRUE(verify(result.before).empty() || result.before.nodes.empty());
  EXPECT_EQ(result.graph.nodes.size(), result.node_of.size());
  EXPECT_EQ(result.graph.nodes.size(), result.random.size());
  EXPECT_EQ(result.graph.inputs.size(), result.inputs.size());
  return result;
}

TEST(MicroBatch, ASumIsCut) {
  const MicroBatch third = part(graph(step(kSum, kOnes), "%3"), 3);
  EXPECT_TRUE(third.exact());
  const std::string text = to_text(third.graph);
  EXPECT_THAT(text, HasSubstr("motley::input(\"x\") : f32[4,6]"));
  EXPECT_THAT(text, HasSubstr("aten::full([4, 4], 1.0"));
  EXPECT_EQ(third.inputs[0].size, 12);
  EXPECT_TRUE(third.before.nodes.empty());
  EXPECT_THAT(text, Not(HasSubstr("aten::mul")));
}

// The scale of a mean is that of the whole batch, whatever the number of micro-batches.
TEST(MicroBatch, AMeanKeepsItsScale) {
  const std::string mean = std::string(kSum) + "%4 = aten::mul.Tensor(%3, 0.25) : f32[]\n";
  for (int parts : {2, 4, 12})
    EXPECT_THAT(to_text(part(graph(step(mean, kOnes), "%4"), parts).graph), HasSubstr(", 0.25)"));
}

// A count that follows from the batch alone is taken of all of it, before.
TEST(MicroBatch, ACountIsComputedBefore) {
  const std::string counted = std::string(R"(%5 = motley::input("y") : f32[12,4]
%6 = aten::sum(%5, none) : f32[]
)") + kSum + "%7 = aten::div.Tensor(%3, %6) : f32[]\n";
  const MicroBatch half = part(graph(step(counted, kOnes), "%7"), 2);
  ASSERT_EQ(half.inputs.size(), 3U);
  EXPECT_TRUE(half.inputs[2].is_whole());
  EXPECT_THAT(to_text(half.before), HasSubstr("motley::input(\"y\") : f32[12,4]"));
  EXPECT_EQ(half.before.outputs.size(), 1U);
  // One that follows from parameters cannot be.
  const std::string own = std::string(kSum) + R"(%6 = aten::relu(%2) : f32[12,4]
%8 = aten::sum(%6, none) : f32[]
%7 = aten::div.Tensor(%3, %8) : f32[]
)";
  EXPECT_THAT(refusal(graph(step(own, kOnes), "%7"), 2), HasSubstr("aten::div.Tensor"));
}

// A term of parameters alone counts once: one part in so many of it in every micro-batch, as early
// as it is small.
TEST(MicroBatch, ATermOfParametersIsShared) {
  const std::string decayed = std::string(kSum) + R"(%4 = aten::mul.Tensor(%1, %1) : f32[6,4]
%5 = aten::sum(%4, none) : f32[]
%6 = aten::add.Tensor(%3, %5, 1) : f32[]
)";
  const std::string text = to_text(part(graph(step(decayed, kOnes), "%6"), 4).graph);
  EXPECT_THAT(text, HasSubstr(", 0.25) : f32[]"));
  EXPECT_THAT(text, Not(HasSubstr(", 0.25) : f32[6,4]")));
}

// What is made for each sample, of parameters or of nothing: as often as a micro-batch has samples.
TEST(MicroBatch, WhatIsRepeatedForEachSampleIsOfSamples) {
  for (const std::string own : {"%30 = aten::select.int(%1, 0, 0) : f32[4]\n",
                                "%30 = aten::full([4], 2.0, f32, none, none, none) : f32[4]\n"}) {
    const std::string repeated = own + R"(%31 = aten::repeat(%30, [12]) : f32[48]
%32 = aten::view(%2, [48]) : f32[48]
%33 = aten::mul.Tensor(%31, %32) : f32[48]
%34 = aten::sum(%33, none) : f32[]
)";
    const std::string text = to_text(part(graph(step(repeated, kOnes), "%34"), 3).graph);
    EXPECT_THAT(text, HasSubstr(", [4]) : f32[16]")) << text;
  }
}

TEST(MicroBatch, WhatMixesSamplesIsNamed) {
  // Samples against samples.
  const std::string pairs = R"(%3 = aten::t(%2) : f32[4,12]
%4 = aten::mm(%2, %3) : f32[12,12]
%5 = aten::sum(%4, none) : f32[]
)";
  EXPECT_THAT(refusal(graph(step(pairs, kOnes), "%5"), 3),
              HasSubstr("samples are mixed by node 4, aten::mm(f32[12,4], f32[4,12]) : f32[12,12]; "
                        "use one program"));
  EXPECT_EQ(refusal(graph(step(pairs, kOnes), "%5"), 1), "taken");
  // What is not linear in the sum over samples.
  const std::string root = std::string(kSum) + "%4 = aten::sqrt(%3) : f32[]\n";
  EXPECT_THAT(refusal(graph(step(root, kOnes), "%4"), 2), HasSubstr("aten::sqrt(f32[]) : f32[]"));
  // Nobody knows.
  const std::string unknown =
      std::string("%3 = other::op(%2) : f32[12,4]\n") + "%4 = aten::sum(%3, none) : f32[]\n";
  EXPECT_THAT(refusal(graph(step(unknown, kOnes), "%4"), 2),
              HasSubstr("other::op(f32[12,4]) : f32[12,4] is not known to treat samples one by"));
}

TEST(MicroBatch, BatchesHaveToBeDivisible) {
  EXPECT_THAT(refusal(graph(step(kSum, kOnes), "%3"), 5), HasSubstr("no 5 equal micro-batches"));
  // Rows that are taken in pairs: 6 groups.
  const std::string pairs = R"(%3 = aten::view(%2, [6, 2, 4]) : f32[6,2,4]
%4 = aten::sum(%3, none) : f32[]
)";
  EXPECT_EQ(refusal(graph(step(pairs, kOnes), "%4"), 6), "taken");
  EXPECT_THAT(refusal(graph(step(pairs, kOnes), "%4"), 12), HasSubstr("rows"));
}

}  // namespace
}  // namespace motley
