#include "graph/segment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "core/error.h"
#include "core/rng.h"
#include "reference/graphs.h"

namespace motley {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Two linear layers; the second weight's gradient reads what the first layer makes.
const char* kGraph = R"(model toy
%0 = motley::parameter("a.weight") : f32[4,10]
%1 = motley::parameter("b.weight") : f32[10,3]
%2 = motley::input("x") : f32[6,4]
%3 = aten::mm(%2, %0) : f32[6,10]
%4 = aten::relu(%3) : f32[6,10]
%5 = aten::mm(%4, %1) : f32[6,3]
%6 = aten::sum(%5, none) : f32[]
%7 = aten::ones([6, 3], f32, none, none, none) : f32[6,3] backward
%8 = aten::t(%4) : f32[10,6] backward
%9 = aten::mm(%8, %7) : f32[10,3] backward
%10 = aten::t(%1) : f32[3,10] backward
%11 = aten::mm(%7, %10) : f32[6,10] backward
%12 = aten::threshold_backward(%11, %4, 0) : f32[6,10] backward
%13 = aten::t(%2) : f32[4,6] backward
%14 = aten::mm(%13, %12) : f32[4,10] backward
loss %6
gradient "a.weight" %14
gradient "b.weight" %9
)";

// One boundary forward, whose value the backward pass reads too, and one back.
const char* kCut = R"(model toy
%0 = motley::parameter("a.weight") : f32[4,10]
%1 = motley::parameter("b.weight") : f32[10,3]
%2 = motley::input("x") : f32[6,4]
%3 = aten::mm(%2, %0) : f32[6,10]
%4 = aten::relu(%3) : f32[6,10]
%5 = motley::boundary(%4, 0, 1) : f32[6,10]
%6 = aten::mm(%5, %1) : f32[6,3]
%7 = aten::sum(%6, none) : f32[]
%8 = aten::ones([6, 3], f32, none, none, none) : f32[6,3] backward
%9 = aten::t(%5) : f32[10,6] backward
%10 = aten::mm(%9, %8) : f32[10,3] backward
%11 = aten::t(%1) : f32[3,10] backward
%12 = aten::mm(%8, %11) : f32[6,10] backward
%13 = motley::boundary(%12, 1, 0) : f32[6,10] backward
%14 = aten::threshold_backward(%13, %4, 0) : f32[6,10] backward
%15 = aten::t(%2) : f32[4,6] backward
%16 = aten::mm(%15, %14) : f32[4,10] backward
loss %7
gradient "a.weight" %16
gradient "b.weight" %10
)";

std::string failure(const std::vector<std::string>& modules) {
  try {
    segments_by_module(parse_graph(kGraph, "g"), modules);
  } catch (const UserError& e) {
    return e.what();
  }
  return {};
}

TEST(Segments, BoundariesStandWhereModulesMeet) {
  const Graph graph = parse_graph(kGraph, "g");
  const Graph cut = with_segments(graph, segments_by_module(graph, {"b"}));
  EXPECT_EQ(to_text(cut), kCut);
  EXPECT_THAT(verify(cut), IsEmpty());
  EXPECT_EQ(to_text(parse_graph(kCut, "c")), kCut);
  EXPECT_EQ(segments_of(cut).count, 2);
  // Of both named nothing is left over; the other way round the numbers are the same.
  EXPECT_EQ(to_text(with_segments(graph, segments_by_module(graph, {"a", "b"}))), kCut);
  EXPECT_EQ(segments_of(graph).count, 1);
  EXPECT_EQ(to_text(with_segments(graph, std::vector<int>(graph.nodes.size(), 7))), kGraph);
}

TEST(Segments, UnknownModulesListTheKnownOnes) {
  EXPECT_THAT(failure({"b", "c"}),
              HasSubstr("names 'c', which is no module of toy; give some of a, b"));
  EXPECT_THAT(failure({"a.weight"}), HasSubstr("names 'a.weight'"));
  EXPECT_EQ(failure({"a"}), "");
}

TEST(Segments, WrongBoundariesAreFound) {
  auto broken = [](const std::string& from, const std::string& to) {
    std::string text = kCut;
    text.replace(text.find(from), from.size(), to);
    try {
      parse_graph(text, "c");
    } catch (const UserError& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  EXPECT_THAT(broken("%4, 0, 1", "%4, 0, 0"), HasSubstr("two different segments"));
  EXPECT_THAT(broken("%4, 0, 1", "%4, 0, 99"), HasSubstr("below 64"));
  EXPECT_THAT(broken("%4, 0, 1) : f32[6,10]", "%4, 0, 1) : f32[6,11]"),
              HasSubstr("changes its shape"));
  EXPECT_THAT(broken("%12, 1, 0", "%12, 1, 2"), HasSubstr("in segment 2"));
  // A node that reads both sides.
  EXPECT_THAT(broken("threshold_backward(%13", "threshold_backward(%12"),
              HasSubstr("is in segment"));
  // The segments of what is wrong are in range all the same.
  Graph graph = parse_graph(kCut, "c");
  graph.nodes[5].args[1] = int64_t{-1};
  graph.nodes[13].args[2] = int64_t{70};
  const Segments segments = segments_of(graph);
  for (int s : segments.of_value) EXPECT_TRUE(s >= 0 && s < segments.count);
}

// Any assignment of nodes gives a sound graph, from which the assignment can be read again; without
// its boundaries it is the graph it was made of.
TEST(Segments, AnyAssignmentIsSoundAndCanBeReadBack) {
  for (const char* name : kGraphs) {
    const Graph graph = load(name);
    Rng rng(3);
    for (int trial = 0; trial < 50; ++trial) {
      std::vector<int> segment_of(graph.nodes.size());
      const int64_t segments = rng.between(1, 5);
      for (int& s : segment_of) s = static_cast<int>(rng.below(segments));
      const Graph cut = with_segments(graph, segment_of);
      ASSERT_THAT(verify(cut), IsEmpty());
      EXPECT_LE(segments_of(cut).count, segments);
      const std::vector<int> again = original_segments(cut);
      ASSERT_EQ(again.size(), graph.nodes.size());
      EXPECT_EQ(to_text(with_segments(graph, again)), to_text(cut));
      // Every boundary is needed: it is read, or is a gradient or an update.
      const auto consumers = cut.consumers();
      std::set<ValueId> results;
      for (const Parameter& p : cut.parameters) results.insert(p.gradient);
      for (const Buffer& b : cut.buffers) results.insert(b.update);
      for (const Node& node : cut.nodes) {
        if (!is_boundary(node)) continue;
        EXPECT_TRUE(!consumers[node.outputs[0].index].empty() || results.count(node.outputs[0]));
      }
      std::vector<ValueId> root(cut.values.size());
      size_t n = 0;
      for (const Node& node : cut.nodes) {
        for (ValueId v : node.outputs)
          if (v.valid()) root[v.index] = v;
        if (is_boundary(node)) {
          root[node.outputs[0].index] = root[std::get<ValueId>(node.args[0]).index];
          continue;
        }
        EXPECT_EQ(node.op, graph.nodes[n].op);
        const auto reads = cut.inputs_of(node), read = graph.inputs_of(graph.nodes[n]);
        ASSERT_EQ(reads.size(), read.size());
        for (size_t i = 0; i < reads.size(); ++i)
          EXPECT_EQ(cut.value(root[reads[i].index]).output, graph.value(read[i]).output);
        ++n;
      }
      EXPECT_EQ(n, graph.nodes.size());
    }
  }
}

// Forward segments alone: gradients of parameters come out where the parameters are, and no value
// crosses back but gradients.
TEST(Segments, BackwardNodesFollowTheirForwardNodes) {
  for (const char* name : {"convnet", "mlp"}) {
    const Graph graph = load(name);
    std::vector<int> forward(graph.nodes.size(), -1);
    int64_t seen = 0, all = 0;
    for (const Node& node : graph.nodes) all += !is_source(node) && node.phase == Phase::forward;
    for (size_t n = 0; n < graph.nodes.size(); ++n)
      if (!is_source(graph.nodes[n]) && graph.nodes[n].phase == Phase::forward)
        forward[n] = 2 * seen++ < all ? 0 : 1;
    const Graph cut = with_segments(graph, with_backward(graph, forward));
    int backward = 0;
    for (const Node& node : cut.nodes)
      if (is_boundary(node) && node.phase == Phase::backward) {
        ++backward;
        EXPECT_EQ(std::get<int64_t>(node.args[1]), 1);
      }
    EXPECT_GE(backward, 1) << name;
    EXPECT_LE(backward, 2) << name;
    for (const Parameter& p : cut.parameters)
      EXPECT_FALSE(p.gradient.valid() && is_boundary(cut.node(cut.value(p.gradient).producer)))
          << p.name;
  }
}

}  // namespace
}  // namespace motley
