#include "shard/theory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <utility>

#include "core/error.h"
#include "core/rng.h"
#include "shard/program.h"

namespace motley {
namespace {

using ::testing::Contains;
using ::testing::IsSupersetOf;
using ::testing::Not;
using ::testing::UnorderedElementsAre;

// The triples of the last node of a graph, as text.
std::vector<std::string> triples_of(const std::string& text, int back = 1) {
  Graph graph = parse_graph(text, "test");
  Theory theory(graph);
  std::vector<std::string> list;
  for (const Triple& t : theory.triples(NodeId(static_cast<int>(graph.nodes.size()) - back)))
    list.push_back(to_string(t));
  return list;
}

const char* kTwo = R"(%0 = motley::input("x") : f32[6,4]
%1 = motley::parameter("w") : f32[4,10]
)";

// All of Figure 9 of HAP, the replicated rule of section 4.4, and the partial sums.
TEST(Theory, MatrixProduct) {
  EXPECT_THAT(triples_of(std::string(kTwo) + "%2 = aten::mm(%0, %1) : f32[6,10]\n"),
              UnorderedElementsAre("R, R -> R", "S(0), R -> S(0)", "R, S(1) -> S(1)",
                                   "S(1), S(0) -> P", "P, R -> P", "R, P -> P"));
}

TEST(Theory, BiasOfACutSumIsPartial) {
  EXPECT_THAT(triples_of(std::string(kTwo) + "%2 = motley::parameter(\"b\") : f32[10]\n"
                                             "%3 = aten::addmm(%2, %0, %1, 1, 1) : f32[6,10]\n"),
              UnorderedElementsAre("R, R, R -> R", "R, S(0), R -> S(0)", "S(0), R, S(1) -> S(1)",
                                   "P, S(1), S(0) -> P", "P, P, R -> P", "P, R, P -> P"));
}

TEST(Theory, AddingANumberIsNotLinear) {
  auto with_number =
      triples_of(std::string(kTwo) + "%2 = aten::add.Tensor(%0, 0.5, 1) : f32[6,4]\n");
  EXPECT_THAT(with_number, UnorderedElementsAre("R -> R", "S(0) -> S(0)", "S(1) -> S(1)"));
  auto with_tensor =
      triples_of(std::string(kTwo) + "%2 = aten::add.Tensor(%0, %0, 1) : f32[6,4]\n");
  EXPECT_THAT(with_tensor, Contains("P, P -> P"));
  EXPECT_THAT(with_tensor, Not(Contains("P, R -> P")));
}

TEST(Theory, BroadcastOperandsStayWhole) {
  EXPECT_THAT(
      triples_of(std::string(kTwo) + "%2 = motley::parameter(\"b\") : f32[4]\n"
                                     "%3 = aten::add.Tensor(%0, %2, 1) : f32[6,4]\n"),
      UnorderedElementsAre("R, R -> R", "S(0), R -> S(0)", "S(1), S(0) -> S(1)", "P, P -> P"));
}

TEST(Theory, RelusAreNotLinear) {
  EXPECT_THAT(triples_of(std::string(kTwo) + "%2 = aten::relu(%0) : f32[6,4]\n"),
              Not(Contains("P -> P")));
}

// Heads survive the views between [b, s, 3*h*d] and [b, h, s, d].
TEST(Theory, HeadsThroughViews) {
  Graph graph = parse_graph(R"(%0 = motley::input("x") : f32[2,5,8]
%1 = motley::parameter("w") : f32[8,24]
%2 = aten::view(%0, [10, 8]) : f32[10,8]
%3 = aten::mm(%2, %1) : f32[10,24]
%4 = aten::view(%3, [2, 5, 24]) : f32[2,5,24]
%5, %6, %7 = aten::split.Tensor(%4, 8, 2) : f32[2,5,8], f32[2,5,8], f32[2,5,8]
%8 = aten::view(%5, [2, 5, 4, 2]) : f32[2,5,4,2]
%9 = aten::transpose.int(%8, 1, 2) : f32[2,4,5,2]
)",
                            "heads");
  Theory theory(graph);
  using F = std::vector<std::vector<int64_t>>;
  EXPECT_EQ(theory.factors(ValueId(1)), (F{{8}, {3, 4, 2}}));  // the weight knows the heads
  EXPECT_EQ(theory.factors(ValueId(3)),
            (F{{2, 5}, {3, 4, 2}}));  // batch and sequence in one dimension
  EXPECT_EQ(theory.factors(ValueId(9)), (F{{2}, {4}, {5}, {2}}));
  std::vector<std::string> mm, split;
  for (const Triple& t : theory.triples(graph.value(ValueId(3)).producer))
    mm.push_back(to_string(t));
  for (const Triple& t : theory.triples(graph.value(ValueId(5)).producer))
    split.push_back(to_string(t));
  EXPECT_THAT(mm, IsSupersetOf({"R, S(1.1) -> S(1.1)", "S(0), R -> S(0)", "S(0.1), R -> S(0.1)"}));
  EXPECT_THAT(split, IsSupersetOf({"S(2.1) -> S(2), S(2), S(2)", "S(0) -> S(0), S(0), S(0)"}));
  EXPECT_THAT(split, Not(Contains("S(2) -> S(2), S(2), S(2)")));  // the three blocks are not cut
  // A cut of the heads leaves [10, 3 * local heads * 2].
  Shares shares({0.5, 0.25, 0.25});
  EXPECT_EQ(theory.local_shape(ValueId(3), Placement::shard(1, 1), shares, 0), (Shape{10, 12}));
  EXPECT_EQ(theory.local_shape(ValueId(9), Placement::shard(1), shares, 2), (Shape{2, 1, 5, 2}));
}

TEST(Theory, ViewsThatMixFactorsAreNotCut) {
  EXPECT_THAT(
      triples_of("%0 = motley::input(\"x\") : f32[4,3]\n%1 = aten::view(%0, [6, 2]) : f32[6,2]\n"),
      UnorderedElementsAre("R -> R", "P -> P"));
}

// Rows are 2 windows of 7 to one reader and 7 pairs to another. Neither can have the factors of the
// other; the samples before them are the same digit of both.
TEST(Theory, FactorsThatAllPlacesShareAreCut) {
  const std::string text = R"(%0 = motley::input("x") : f32[4,14]
%1 = aten::view(%0, [4, 2, 7]) : f32[4,2,7]
%2 = motley::input("y") : f32[4,14]
%3 = aten::view(%2, [4, 7, 2]) : f32[4,7,2]
%4 = aten::view(%1, [56]) : f32[56]
%5 = aten::view(%3, [56]) : f32[56]
)";
  Graph graph = parse_graph(text + "%6 = aten::add.Tensor(%4, %5, 1) : f32[56]\n", "windows");
  Theory theory(graph);
  using F = std::vector<std::vector<int64_t>>;
  EXPECT_EQ(theory.factors(ValueId(4)), (F{{4, 2, 7}}));
  EXPECT_EQ(theory.factors(ValueId(5)), (F{{4, 7, 2}}));
  EXPECT_THAT(triples_of(text + "%6 = aten::add.Tensor(%4, %5, 1) : f32[56]\n"),
              UnorderedElementsAre("R, R -> R", "S(0), S(0) -> S(0)", "P, P -> P"));
}

// 12 = 4 x 3 to one reader, 2 x 6 to another: [2, 2, 3] to both. Then 3 x 4 comes: it may have no more
// than these bounds leave it.
TEST(Theory, BoundsThatFitAreTaken) {
  Graph graph = parse_graph(R"(%0 = motley::input("x") : f32[5,12]
%1 = aten::view(%0, [5, 4, 3]) : f32[5,4,3]
%2 = aten::view(%0, [5, 2, 6]) : f32[5,2,6]
%3 = aten::view(%0, [5, 3, 4]) : f32[5,3,4]
)",
                            "bounds");
  Theory theory(graph);
  using F = std::vector<std::vector<int64_t>>;
  EXPECT_EQ(theory.factors(ValueId(0)), (F{{5}, {2, 2, 3}}));
  EXPECT_EQ(theory.factors(ValueId(1)), (F{{5}, {2, 2}, {3}}));
  EXPECT_EQ(theory.factors(ValueId(2)), (F{{5}, {2}, {2, 3}}));
  EXPECT_EQ(theory.factors(ValueId(3)), (F{{5}, {3}, {4}}));
}

TEST(Theory, LayerNormGradients) {
  EXPECT_THAT(triples_of(R"(%0 = motley::input("x") : f32[6,4]
%1 = motley::parameter("w") : f32[4]
%2, %3, %4 = aten::native_layer_norm(%0, [4], %1, %1, 1e-05) : f32[6,4], f32[6,1], f32[6,1]
%5, %6, %7 = aten::native_layer_norm_backward(%2, %0, [4], %3, %4, %1, %1, [1, 1, 1]) : f32[6,4], f32[4], f32[4] backward
)"),
              UnorderedElementsAre("R, R, R, R, R, R -> R, R, R",
                                   "S(0), S(0), S(0), S(0), R, R -> S(0), P, P",
                                   "P, R, R, R, R, R -> P, P, P"));
}

TEST(Theory, VocabularyCutEmbeddingAndCrossEntropy) {
  EXPECT_THAT(triples_of(R"(%0 = motley::input("i") : i64[6]
%1 = motley::parameter("w") : f32[10,4]
%2 = aten::embedding(%1, %0, -1, false, false) : f32[6,4]
)"),
              UnorderedElementsAre("R, R -> R", "S(1), R -> S(1)", "R, S(0) -> S(0)", "P, R -> P",
                                   "S(0), R -> P [embedding.vocab]"));
  EXPECT_THAT(triples_of("%0 = motley::input(\"x\") : f32[6,10]\n%1 = aten::_log_softmax(%0, 1, "
                         "false) : f32[6,10]\n"),
              UnorderedElementsAre("R -> R", "S(0) -> S(0)", "S(1) -> S(1) [log_softmax.class]"));
}

TEST(Theory, BatchNormHasTheSemanticsOfOneDevice) {
  EXPECT_THAT(triples_of(R"(%0 = motley::input("x") : f32[6,4,3,3]
%1 = motley::parameter("w") : f32[4]
%2, %3, %4 = aten::native_batch_norm(%0, %1, %1, none, none, true, 0.1, 1e-05) : f32[6,4,3,3], f32[4], f32[4]
)"),
              UnorderedElementsAre("R, R, R -> R, R, R", "S(1), S(0), S(0) -> S(1), S(0), S(0)",
                                   "S(0), R, R -> S(0), R, R [batch_norm.batch]"));
}

TEST(Theory, UnknownOpsRunReplicatedAndAreNamed) {
  Graph graph = parse_graph(
      "%0 = motley::input(\"x\") : f32[6,4]\n%1 = aten::frobnicate(%0) : f32[6,4]\n", "t");
  Theory theory(graph);
  EXPECT_EQ(theory.triples(NodeId(1)).size(), 1u);
  EXPECT_THAT(theory.unknown_ops(), UnorderedElementsAre("aten::frobnicate"));
}

TEST(Theory, IntegersAreNeverPartial) {
  Graph graph = parse_graph("%0 = motley::input(\"x\") : i64[6,4]\n", "t");
  Theory theory(graph);
  EXPECT_THAT(theory.placements(ValueId(0)), Not(Contains(Placement::partial())));
}

TEST(Shares, RoundAsThePaperDoes) {
  EXPECT_EQ(divide(10, {0.5, 0.3, 0.2}), (std::vector<int64_t>{5, 3, 2}));
  EXPECT_EQ(divide(4, {1, 1, 1}), (std::vector<int64_t>{2, 1, 1}));  // ties go to the lower device
  EXPECT_EQ(divide(3, {0.5, 0.5}),
            (std::vector<int64_t>{1, 2}));  // 1.5 rounds up twice; the first gives one back
  EXPECT_EQ(divide(8, {0.999, 0.001}), (std::vector<int64_t>{8, 0}));
  EXPECT_EQ(divide(0, {0.5, 0.5}), (std::vector<int64_t>{0, 0}));
}

// Against the rounding spelled out: nearest integers, then one unit at a time where the error stays
// smallest.
TEST(Shares, EqualsOneUnitAtATime) {
  Rng rng(3);
  for (int trial = 0; trial < 2000; ++trial) {
    std::vector<double> ratios(static_cast<size_t>(rng.between(1, 9)));
    for (double& r : ratios) r = rng.chance(0.2) ? 0 : rng.uniform();
    ratios[0] += 0.01;
    int64_t n = rng.between(0, 40);
    auto pieces = divide(n, ratios);
    int64_t sum = 0;
    double total = 0;
    for (double r : ratios) total += r;
    for (size_t i = 0; i < pieces.size(); ++i) {
      sum += pieces[i];
      EXPECT_GE(pieces[i], 0);
      EXPECT_LT(
          std::abs(static_cast<double>(pieces[i]) - static_cast<double>(n) * ratios[i] / total),
          1.0 + 1e-9);
    }
    EXPECT_EQ(sum, n);
  }
}

// Programs written by hand.
const char* kStep = R"(%0 = motley::input("x") : f32[6,4]
%1 = motley::parameter("w") : f32[4,10]
%2 = aten::mm(%0, %1) : f32[6,10]
%3 = aten::sum(%2, none) : f32[]
%4 = aten::full([6, 10], 1.0, f32, none, none, none) : f32[6,10] backward
%5 = aten::t(%0) : f32[4,6] backward
%6 = aten::mm(%5, %4) : f32[4,10] backward
loss %3
gradient "w" %6
)";

std::vector<std::string> problems(const std::vector<std::string>& lines) {
  Graph graph = parse_graph(kStep, "step");
  Theory theory(graph);
  std::vector<Step> steps;
  for (const std::string& line : lines) steps.push_back(parse_step(theory, line, "p"));
  const Program program{std::move(steps)};
  for (const Step& step : program.steps)
    EXPECT_EQ(parse_step(theory, to_text(theory, step), "again"), step);
  return check(theory, program);
}

const std::vector<std::string> kDataParallel = {
    "node 0 motley::input  -> S(0)",   "node 1 motley::parameter  -> R",
    "node 2 aten::mm S(0), R -> S(0)", "node 3 aten::sum S(0) -> P",
    "node 4 aten::full  -> S(0)",      "node 5 aten::t S(0) -> S(1)",
    "node 6 aten::mm S(1), S(0) -> P", "all_reduce %6 P -> R"};

TEST(Program, AcceptsDataParallelism) { EXPECT_THAT(problems(kDataParallel), testing::IsEmpty()); }

TEST(Program, NamesWhatIsWrong) {
  auto without = kDataParallel;
  without.pop_back();
  EXPECT_THAT(problems(without),
              Contains(testing::HasSubstr("the gradient of w is not placed R as it is")));
  auto early = kDataParallel;
  std::swap(early[1], early[2]);
  EXPECT_THAT(problems(early),
              Contains(testing::HasSubstr("step 1: needs %1 as R, which no earlier step makes")));
  auto twice = kDataParallel;
  twice.push_back("all_reduce %6 P -> R");
  EXPECT_THAT(problems(twice), Contains(testing::HasSubstr("a second time")));
  EXPECT_THROW(problems({"node 2 aten::mm S(1), R -> S(0)"}), UserError);
  EXPECT_THROW(problems({"node 99 aten::mm S(1), R -> S(0)"}), UserError);
  EXPECT_THROW(problems({"all_gather %6 P -> R"}), UserError);
  EXPECT_THROW(problems({"make it so"}), UserError);
}

TEST(Program, GathersAndScattersHaveForms) {
  auto sharded = kDataParallel;
  sharded[1] = "node 1 motley::parameter  -> S(0)";
  sharded.insert(sharded.begin() + 2, "all_gather %1 S(0) -> R grouped");
  sharded.back() = "reduce_scatter %6 P -> S(0) grouped";
  EXPECT_THAT(problems(sharded), testing::IsEmpty());
  for (const char* line :
       {"all_reduce %6 P -> R grouped", "all_to_all %1 S(0) -> S(1) grouped",
        "all_gather %1 S(0) -> R padded", "all_gather %1 S(0) -> R grouped twice"})
    EXPECT_THROW(problems({line}), UserError) << line;
  Graph graph = parse_graph(kStep, "step");
  Theory theory(graph);
  std::vector<Step> steps;
  for (const std::string& line : kDataParallel) steps.push_back(parse_step(theory, line, "p"));
  steps.back().form = PieceForm::grouped;
  EXPECT_THAT(check(theory, {std::move(steps)}),
              Contains(testing::HasSubstr("has no grouped form")));
}

}  // namespace
}  // namespace motley
