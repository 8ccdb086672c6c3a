#include "graph/graph.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "graph/op.h"
#include "graph/placement.h"
#include "graph/rebatch.h"

namespace motley {
namespace {

using ::testing::HasSubstr;

const char* kText = R"(model toy
%0 = motley::input("x \"quoted\"") : f32[8,4]
%1 = motley::parameter("w") : f32[4,4]
%2 = motley::buffer("running") : f64[]
%3 = motley::constant([1.0, -inf., 3.25e-09]) : f32[3]
%4 = aten::mm(%0, %1) : f32[8,4]
%5, none, %6 = aten::odd(%4, [none, %1], [], [%], [.], none, true, 3, -2.5, "a\nb", bf16) : f32[8,4], none, i64[]
%7 = aten::sum(%5) : f32[]
%8 = aten::mm(%1, %1) : f32[4,4] backward
loss %7
gradient "w" %8
update "running" %6
)";

std::string failure(const std::string& text) {
  try {
    parse_graph(text, "g.txt");
  } catch (const UserError& e) {
    return e.what();
  }
  return "no error";
}

TEST(GraphText, RoundTrips) {
  Graph graph = parse_graph(kText, "kText");
  EXPECT_EQ(to_text(graph), kText);
  EXPECT_EQ(graph.parameters[0].gradient, ValueId(8));
  EXPECT_EQ(graph.buffers[0].update, ValueId(6));
  EXPECT_EQ(std::vector<ValueId>(graph.inputs_of(graph.nodes[5])),
            (std::vector<ValueId>{ValueId(4), ValueId(1)}));
  EXPECT_EQ(graph.nodes[8 - 1].phase, Phase::backward);
}

TEST(GraphText, NamesTheLine) {
  EXPECT_THAT(failure("%0 = motley::input(\"x\") : f31[2]\n"),
              HasSubstr("line 1, column 30: unknown dtype 'f31'"));
  EXPECT_THAT(failure("%0 = motley::input(\"x\") : f32[2]\n%1 = aten::neg(%4) : f32[2]\n"),
              HasSubstr("line 2, column"));
  EXPECT_THAT(failure("%1 = motley::input(\"x\") : f32[2]\n"), HasSubstr("expected %0"));
  EXPECT_THAT(failure("%0 = aten::neg(none : f32[2]\n"), HasSubstr("expected ','"));
  EXPECT_THAT(failure("%0 = motley::input(\"x) : f32[2]\n"), HasSubstr("no closing quote"));
  EXPECT_THAT(failure("%0 = motley::input(\"x\") : f32[99999999,99999999,99999999]\n"),
              HasSubstr("1e15"));
  EXPECT_THAT(failure("gradient \"w\" %0\n"), HasSubstr("there is no parameter 'w'"));
  EXPECT_THAT(failure("%0 = motley::input(\"x\") : f32[2]\nloss %0\n"), HasSubstr("not a scalar"));
}

TEST(GraphText, OperatorsMayBeUnknownButNotSources) {
  const std::string text =
      "model m\n%0 = motley::input(\"x\") : f32[2]\n%1 = my::own(%0) : f32[2]\n";
  EXPECT_EQ(to_text(parse_graph(text, "g.txt")), text);
  EXPECT_THAT(failure("%0 = motley::tensor(\"x\") : f32[2]\n"),
              HasSubstr("unknown source motley::tensor"));
}

TEST(OpName, IsItsText) {
  const std::vector<std::string> names = {
      "",        "aten::mm", "aten::add.Tensor", "motley::input", "motley::boundary",
      "my::own", "my::other"};
  for (const std::string& a : names) {
    const OpName name(a), copy = name;
    EXPECT_EQ(copy.str(), a);
    EXPECT_EQ(fmt::format("{}", name), a);
    EXPECT_EQ(name.is_source(), a == "motley::input");
    EXPECT_EQ(name.def() != nullptr, a.starts_with("aten::") || a == "motley::boundary");
    for (const std::string& b : names) {
      EXPECT_EQ(name == OpName(b), a == b);
      EXPECT_EQ(name == b, a == b);
      EXPECT_EQ(name != b.c_str(), a != b);
    }
  }
}

TEST(ValueList, HoldsAnyNumber) {
  for (int count : {0, 1, 5, 6, 7, 100}) {
    ValueList list;
    std::vector<ValueId> expected;
    for (int i = 0; i < count; ++i) {
      list.push_back(ValueId(i));
      expected.emplace_back(i);
    }
    const ValueList copy = list;
    for (ValueId& v : list) v = ValueId(7);
    EXPECT_EQ(std::vector<ValueId>(copy), expected);
    EXPECT_EQ(std::count(list.begin(), list.end(), ValueId(7)), count);
    ASSERT_EQ(copy.size(), expected.size());
    for (int i = 0; i < count; ++i) EXPECT_EQ(copy[i], ValueId(i));
    if (count > 0) {
      EXPECT_EQ(copy.back(), ValueId(count - 1));
    }
  }
}

TEST(Graph, RemovesDeadNodes) {
  Graph graph = parse_graph(kText, "kText");
  graph.add("aten::neg", {ValueId(4)}, {graph.spec(ValueId(4))});
  size_t before = graph.nodes.size();
  remove_dead(&graph);
  EXPECT_EQ(graph.nodes.size(), before - 2);  // the new node and the unused constant
  EXPECT_TRUE(verify(graph).empty());
}

TEST(Graph, SavedActivationsCrossTheLoss) {
  Graph graph = parse_graph(R"(%0 = motley::input("x") : f32[2,2]
%1 = aten::relu(%0) : f32[2,2]
%2 = aten::exp(%1) : f32[2,2]
%3 = aten::sum(%2, none) : f32[]
%4 = aten::mm(%0, %1) : f32[2,2] backward
%5 = aten::mm(%4, %1) : f32[2,2] backward
loss %3
)",
                            "saved");
  EXPECT_EQ(saved_activations(graph), (std::vector<ValueId>{ValueId(1)}));
}

TEST(Graph, FingerprintSeesEveryChange) {
  Graph a = parse_graph(kText, "kText"), b = a;
  EXPECT_EQ(fingerprint(a), fingerprint(b));
  std::get<int64_t>(b.nodes[5].args[7])++;
  EXPECT_NE(fingerprint(a), fingerprint(b));
}

TEST(Placement, TextRoundTrips) {
  for (Placement p : {Placement::replicated(), Placement::partial(), Placement::shard(1),
                      Placement::shard(2, 3)}) {
    Placement q = Placement::shard(7);
    EXPECT_TRUE(parse_placement(to_string(p), &q));
    EXPECT_EQ(p, q);
  }
  Placement q;
  for (const char* bad : {"", "S", "S(", "S(1", "S(1.)", "S(-1)", "S(1) ", "Q"})
    EXPECT_FALSE(parse_placement(bad, &q)) << bad;
}

TEST(Rebatch, WhatGrowsOtherwiseIsRefused) {
  auto mean = [](const char* rows, const char* scale) {
    return parse_graph(fmt::format("%0 = motley::input(\"x\") : f32[{0},4]\n"
                                   "%1 = aten::view(%0, [{0}, 2, 2]) : f32[{0},2,2]\n"
                                   "%2 = aten::sum(%1, none) : f32[]\n"
                                   "%3 = aten::mul.Tensor(%2, {1}) : f32[]\n"
                                   "loss %3\n",
                                   rows, scale),
                       "g.txt");
  };
  EXPECT_EQ(to_text(at_batch(mean("2", "0.5"), 2, mean("4", "0.25"), 4, 10, "g")),
            to_text(mean("10", "0.1")));
  auto why = [&](const Graph& a, const Graph& b, int64_t samples) -> std::string {
    try {
      at_batch(a, 2, b, 4, samples, "g.json");
    } catch (const UserError& e) {
      return e.what();
    }
    return "no error";
  };
  EXPECT_THAT(why(mean("2", "0.5"), mean("4", "0.3"), 10),
              HasSubstr("g.json: node 3 (aten::mul.Tensor) has 0.5 and 0.3 at batches 2 and 4; "
                        "capture with --batch 10"));
  EXPECT_THAT(why(mean("2", "0.5"), mean("5", "0.25"), 3), HasSubstr("has 2 and 5"));
  Graph other = mean("4", "0.25");
  other.nodes[2].op = "aten::mean";
  EXPECT_THAT(why(mean("2", "0.5"), other, 10), HasSubstr("is not the same call"));
  other = mean("4", "0.25");
  other.inputs[0].name = "y";
  EXPECT_THAT(why(mean("2", "0.5"), other, 10), HasSubstr("differ in their roles"));
}

}  // namespace
}  // namespace motley
