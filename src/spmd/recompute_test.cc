#include "spmd/recompute.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "core/rng.h"
#include "planner/program_plan.h"
#include "reference/memory_graphs.h"
#include "reference/sample.h"
#include "reference/spmd_graphs.h"

namespace motley::spmd {

using namespace solver;
using namespace planner;

namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Two layers, each a product and an activation whose input its gradient reads.
const char* kGraph = R"(model toy
%0 = motley::parameter("layer0.w") : f32[4,4]
%1 = motley::parameter("layer1.w") : f32[4,4]
%2 = motley::input("x") : f32[8,4]
%3 = aten::mm(%2, %0) : f32[8,4]
%4 = aten::tanh(%3) : f32[8,4]
%5 = aten::relu(%4) : f32[8,4]
%6 = aten::mm(%5, %1) : f32[8,4]
%7 = aten::tanh(%6) : f32[8,4]
%8 = aten::sum(%7, none) : f32[]
%9 = aten::full([8, 4], 1.0, f32, none, none, none) : f32[8,4] backward
%10 = aten::tanh_backward(%9, %7) : f32[8,4] backward
%11 = aten::t(%5) : f32[4,8] backward
%12 = aten::mm(%11, %10) : f32[4,4] backward
%13 = aten::t(%1) : f32[4,4] backward
%14 = aten::mm(%10, %13) : f32[8,4] backward
%15 = aten::threshold_backward(%14, %5, 0) : f32[8,4] backward
%16 = aten::tanh_backward(%15, %4) : f32[8,4] backward
%17 = aten::t(%2) : f32[4,8] backward
%18 = aten::mm(%17, %16) : f32[4,4] backward
loss %8
gradient "layer0.w" %18
gradient "layer1.w" %12
)";

std::vector<std::string> lines_again(const Theory& theory, const Program& program) {
  std::vector<std::string> lines;
  for (const Step& step : program.steps)
    if (step.again) lines.push_back(to_text(theory, step));
  return lines;
}

TEST(Recompute, BlocksAreLayers) {
  const Graph graph = parse_graph(kGraph, "g");
  EXPECT_THAT(blocks_of(graph),
              ElementsAre(0, 1, -1, 0, 0, 0, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1));
}

// In front of what reads a layer's first parameter two tensors live, in front of the relu before it
// one: there the layer begins.
TEST(Recompute, BlocksBeginWhereTheLeastIsHandedOn) {
  const Graph graph = parse_graph(R"(model toy
%0 = motley::parameter("layer0.w") : f32[4,4]
%1 = motley::parameter("layer1.scale") : f32[4]
%2 = motley::input("x") : f32[8,4]
%3 = aten::mm(%2, %0) : f32[8,4]
%4 = aten::tanh(%3) : f32[8,4]
%5 = aten::relu(%4) : f32[8,4]
%6 = aten::mul(%5, %1) : f32[8,4]
%7 = aten::add(%6, %4, 1) : f32[8,4]
%8 = aten::sum(%7, none) : f32[]
loss %8
)",
                                  "g");
  EXPECT_THAT(blocks_of(graph), ElementsAre(0, 1, -1, 0, 0, 1, 1, 1, 1));
}

TEST(Recompute, MakesAgainWhatOnlyItsBackwardPassReads) {
  const Graph graph = parse_graph(kGraph, "g");
  const Theory theory(graph);
  const Program program = whole_program(theory);
  ASSERT_THAT(check(theory, program), IsEmpty());
  // Of layer 0, the second layer reads the relu's result, which stays; tanh's is made again.
  const Program lean = recompute(theory, program, blocks_of(graph), {true, false});
  EXPECT_THAT(check(theory, lean), IsEmpty());
  EXPECT_THAT(lines_again(theory, lean),
              ElementsAre("again node 3 aten::mm R, R -> R", "again node 4 aten::tanh R -> R"));
  // Right before the step that reads it.
  for (size_t s = 1; s < lean.steps.size(); ++s)
    if (lean.steps[s - 1].again && !lean.steps[s].again) {
      EXPECT_EQ(lean.steps[s].node.index, 16);
    }
  for (const Step& step : lean.steps)
    EXPECT_EQ(parse_step(theory, to_text(theory, step), "step"), step);
  // Between its two lifetimes it is not there.
  int lives = 0;
  for (const Held& h : lifetimes(theory, lean))
    if (h.value == ValueId(4)) {
      ++lives;
      if (lives == 1) {
        EXPECT_EQ(lean.steps[h.last].node.index, 5);
      }
    }
  EXPECT_EQ(lives, 2);
}

// One gradient is scattered and gathered, the other all-reduced: both parameters may come in pieces.
TEST(StoredInPieces, GathersParametersInThePlaceOfGradients) {
  const Graph graph = parse_graph(kGraph, "toy");
  const Theory theory(graph);
  const char* lines[] = {"node 0 motley::parameter  -> R",
                         "node 1 motley::parameter  -> R",
                         "node 2 motley::input  -> S(0)",
                         "node 3 aten::mm S(0), R -> S(0)",
                         "node 4 aten::tanh S(0) -> S(0)",
                         "node 5 aten::relu S(0) -> S(0)",
                         "node 6 aten::mm S(0), R -> S(0)",
                         "node 7 aten::tanh S(0) -> S(0)",
                         "node 8 aten::sum S(0) -> P",
                         "node 9 aten::full  -> S(0)",
                         "node 10 aten::tanh_backward S(0), S(0) -> S(0)",
                         "node 11 aten::t S(0) -> S(1)",
                         "node 12 aten::mm S(1), S(0) -> P",
                         "reduce_scatter %12 P -> S(1)",
                         "all_gather %12 S(1) -> R",
                         "node 13 aten::t R -> R",
                         "node 14 aten::mm S(0), R -> S(0)",
                         "node 15 aten::threshold_backward S(0), S(0) -> S(0)",
                         "node 16 aten::tanh_backward S(0), S(0) -> S(0)",
                         "node 17 aten::t S(0) -> S(1)",
                         "node 18 aten::mm S(1), S(0) -> P",
                         "all_reduce %18 P -> R"};
  std::vector<Step> steps;
  for (const char* line : lines) steps.push_back(parse_step(theory, line, "test"));
  const Program program{std::move(steps)};
  ASSERT_THAT(check(theory, program), IsEmpty());
  const auto changed = [&](Seconds of_rows, Seconds of_columns) {
    const Program pieces =
        stored_in_pieces(theory, program, [&](ValueId, Collective kind, const Placement& cut) {
          return kind == Collective::all_reduce ? 2 : cut.dim == 0 ? of_rows : of_columns;
        });
    EXPECT_THAT(check(theory, pieces), IsEmpty());
    std::vector<std::string> list;
    for (const Step& step : pieces.steps)
      if (std::find(program.steps.begin(), program.steps.end(), step) == program.steps.end())
        list.push_back(to_text(theory, step));
    return list;
  };
  // What is scattered already is gathered elsewhere whatever it costs.
  EXPECT_THAT(changed(2, 2),
              ElementsAre("node 1 motley::parameter  -> S(1)", "all_gather %1 S(1) -> R"));
  EXPECT_THAT(changed(1, 2),
              ElementsAre("node 0 motley::parameter  -> S(0)", "node 1 motley::parameter  -> S(1)",
                          "all_gather %0 S(0) -> R", "all_gather %1 S(1) -> R",
                          "reduce_scatter %18 P -> S(0)"));
  EXPECT_THAT(changed(1, 0.5),
              ElementsAre("node 0 motley::parameter  -> S(1)", "node 1 motley::parameter  -> S(1)",
                          "all_gather %0 S(1) -> R", "all_gather %1 S(1) -> R",
                          "reduce_scatter %18 P -> S(1)"));
}

TEST(Recompute, TheCheckerSeesStepsThatNeverRan) {
  const Graph graph = parse_graph(kGraph, "g");
  const Theory theory(graph);
  Program program = whole_program(theory);
  program.steps.change([](std::vector<Step>& steps) { steps[3].again = true; });
  EXPECT_THAT(check(theory, program), testing::Contains(HasSubstr("what no earlier step ran")));
  program = whole_program(theory);
  program.steps.change([](std::vector<Step>& steps) {
    steps.push_back(steps[0]);
    steps.back().again = true;
  });
  EXPECT_THAT(check(theory, program), testing::Contains(HasSubstr("a source, again")));
}

// A model of memory: what blocks hold, freed in the order of the backward pass; the peak is over
// the backward passes of blocks. Against all subsets.
TEST(ChooseBlocks, AgainstAllSubsets) {
  Rng rng(7);
  int trials = 0, worse = 0;
  double worst = 1;
  for (int trial = 0; trial < 400; ++trial) {
    const int n = 1 + static_cast<int>(rng.below(9));
    std::vector<double> seconds(n), bytes(n);
    const bool equal = rng.chance(0.3);
    for (int b = 0; b < n; ++b) {
      seconds[b] = equal && b ? seconds[0] : 0.1 + rng.uniform();
      bytes[b] = equal && b ? bytes[0] : 0.1 + rng.uniform();
    }
    double all = 0;
    for (double x : bytes) all += x;
    const double memory = all * rng.uniform();
    auto cost = [&](const std::vector<bool>& chosen) {
      RecomputeCost c;
      c.seconds = 1;
      double peak = 0;
      for (int now = 0; now < n; ++now) {
        double held = bytes[now];
        for (int b = 0; b < now; ++b) held += chosen[b] ? 0.05 * bytes[b] : bytes[b];
        peak = std::max(peak, held);
        if (chosen[now]) c.seconds += seconds[now];
      }
      c.excess = std::max(0.0, peak - memory);
      return c;
    };
    double best = 1e300;
    for (int set = 0; set < 1 << n; ++set) {
      std::vector<bool> chosen(n);
      for (int b = 0; b < n; ++b) chosen[b] = set >> b & 1;
      const RecomputeCost c = cost(chosen);
      if (c.excess <= 0) best = std::min(best, c.seconds);
    }
    const std::vector<bool> chosen = choose_blocks(n, cost);
    if (best > 1e200) {
      EXPECT_TRUE(chosen.empty());
      continue;
    }
    ASSERT_FALSE(chosen.empty());
    const RecomputeCost c = cost(chosen);
    EXPECT_LE(c.excess, 0);
    EXPECT_GE(c.seconds, best * (1 - 1e-12));
    if (equal) {
      EXPECT_NEAR(c.seconds, best, 1e-12);
    }
    ++trials;
    worse += c.seconds > best * (1 + 1e-9);
    worst = std::max(worst, c.seconds / best);
  }
  EXPECT_GT(trials, 100);
  EXPECT_LT(worse, trials / 10);
  EXPECT_LT(worst, 1.15);
}

// The same on real programs: all subsets of the blocks of a small model, priced by the cost model.
TEST(ChooseBlocks, AgainstAllSubsetsOfARealModel) {
  const Graph graph = load("mlp");
  const Theory theory(graph);
  const std::vector<int> block = blocks_of(graph);
  const int blocks = 1 + *std::max_element(block.begin(), block.end());
  ASSERT_GE(blocks, 2);
  ASSERT_LE(blocks, 12);
  const DeviceType type{"d", 1e12, 4e12, 16e9, 5e10, 1e-6, 0};
  const CostModel model(flat_cluster({type}, {3}, {LinkKind::switched, 1e9, 1e-5}));
  const Shares shares({0.5, 0.3, 0.2});
  const Fractions fractions(model.cluster(), shares);
  ProblemBuilder builder(theory, model, Optimizer::sgd);
  builder.price(fractions);
  Rng rng(3);
  int needed = 0;
  for (int trial = 0; trial < 40; ++trial) {
    const Program program = random_program(builder, &rng);
    auto price = [&](const std::vector<bool>& chosen) {
      return cost_of(theory, recompute(theory, program, block, chosen), model, fractions,
                     Optimizer::sgd);
    };
    const double most = price(std::vector<bool>(blocks, false)).memory.peak[0],
                 least = price(std::vector<bool>(blocks, true)).memory.peak[0];
    const double memory = least + (most - least) * rng.uniform();
    auto cost = [&](const std::vector<bool>& chosen) {
      const ProgramCost c = price(chosen);
      return RecomputeCost{c.step, std::max(0.0, c.memory.peak[0] - memory)};
    };
    double best = 1e300;
    for (int set = 0; set < 1 << blocks; ++set) {
      std::vector<bool> chosen(blocks);
      for (int b = 0; b < blocks; ++b) chosen[b] = set >> b & 1;
      if (const RecomputeCost c = cost(chosen); c.excess <= 0) best = std::min(best, c.seconds);
    }
    if (best > 1e200) continue;
    const std::vector<bool> chosen = choose_blocks(blocks, cost);
    ASSERT_FALSE(chosen.empty());
    EXPECT_LE(cost(chosen).excess, 0);
    EXPECT_NEAR(cost(chosen).seconds, best, 1e-2 * best);
    needed += cost(chosen).seconds > price(std::vector<bool>(blocks, false)).step * (1 + 1e-9);
  }
  EXPECT_GT(needed, 3);
}

using Made = std::pair<ValueId, Placement>;

void made_by(const Theory& theory, const Step& step, std::vector<Made>* out) {
  out->clear();
  if (!step.is_compute()) {
    out->push_back({step.value, step.to});
    return;
  }
  const auto& outputs = theory.graph().node(step.node).outputs;
  const Triple& triple = theory.triples(step.node)[step.triple];
  for (size_t o = 0; o < outputs.size(); ++o)
    if (outputs[o].valid()) out->push_back({outputs[o], triple.out[o]});
}

void read_by(const Theory& theory, const Step& step, std::vector<Made>* out) {
  out->clear();
  if (!step.is_compute()) {
    out->push_back({step.value, step.from});
    return;
  }
  const Triple& triple = theory.triples(step.node)[step.triple];
  size_t i = 0;
  for (ValueId v : theory.graph().inputs_of(theory.graph().node(step.node)))
    out->push_back({v, triple.in[i++]});
}

// recompute() as its header says it, step by step.
Program recompute_slowly(const Theory& theory, const Program& program,
                         const std::vector<int>& block_of, const std::vector<bool>& chosen) {
  const Graph& graph = theory.graph();
  const int steps = static_cast<int>(program.steps.size());
  auto block_of_step = [&](const Step& step) {
    const NodeId node = step.is_compute() ? step.node : graph.value(step.value).producer;
    const int b = block_of[node.index];
    return b >= 0 && chosen[b] ? b : -1;
  };
  const int backward = phases_of(theory, program).backward;
  // Who made what in the forward pass, and which of it stays: what the rest of the forward pass
  // reads of a block, outputs of the graph, and what is needed at the end of the step.
  std::vector<bool> needed(graph.values.size());
  for (ValueId v : graph.outputs) needed[v.index] = true;
  for (const Buffer& b : graph.buffers)
    if (b.update.valid()) needed[b.update.index] = true;
  if (graph.loss.valid()) needed[graph.loss.index] = true;
  std::map<Made, int> maker;
  std::set<Made> stays;
  std::vector<int> block(steps, -1);
  std::vector<Made> list;
  for (int s = 0; s < backward; ++s) {
    const Step& step = program.steps[s];
    block[s] = block_of_step(step);
    read_by(theory, step, &list);
    for (const Made& m : list)
      if (auto it = maker.find(m); it != maker.end() && block[it->second] != block[s])
        stays.insert(m);
    made_by(theory, step, &list);
    bool all = step.is_compute() && is_source(graph.node(step.node));
    for (const Made& m : list) all = all || needed[m.first.index];
    for (const Made& m : list) {
      maker.try_emplace(m, s);
      if (all) stays.insert(m);
    }
  }
  // Values of one node stay together: they are made by one step.
  for (int s = 0; s < backward; ++s) {
    made_by(theory, program.steps[s], &list);
    if (std::any_of(list.begin(), list.end(), [&](const Made& m) { return stays.count(m) > 0; }))
      stays.insert(list.begin(), list.end());
  }

  std::vector<Step> result;
  result.assign(program.steps.begin(), program.steps.begin() + backward);
  std::vector<bool> again(steps);  // forward steps that ran again
  std::vector<int> wanted;         // a stack
  auto want = [&](const Step& step) {
    std::vector<Made> reads;
    read_by(theory, step, &reads);
    for (const Made& m : reads) {
      auto it = maker.find(m);
      if (it == maker.end() || stays.count(m) || again[it->second] || block[it->second] < 0)
        continue;
      again[it->second] = true;
      wanted.push_back(it->second);
    }
  };
  for (int s = backward; s < steps; ++s) {
    // A block is made again as a whole when the first of it is read.
    std::vector<int> batch;
    want(program.steps[s]);
    if (!wanted.empty()) {
      const int b = block[wanted[0]];
      for (int t = s + 1; t < steps; ++t) {
        std::vector<Made> reads;
        read_by(theory, program.steps[t], &reads);
        for (const Made& m : reads)
          if (auto it = maker.find(m); it != maker.end() && block[it->second] == b &&
                                       !stays.count(m) && !again[it->second]) {
            again[it->second] = true;
            wanted.push_back(it->second);
          }
      }
    }
    while (!wanted.empty()) {
      const int made = wanted.back();
      wanted.pop_back();
      batch.push_back(made);
      want(program.steps[made]);
    }
    std::sort(batch.begin(), batch.end());
    for (int made : batch) {
      result.push_back(program.steps[made]);
      result.back().again = true;
    }
    result.push_back(program.steps[s]);
  }
  return {std::move(result), program.sizes};
}

TEST(Recompute, IsWhatItsDefinitionSays) {
  Rng rng(7);
  int again = 0;
  for (const char* name : kGraphs) {
    const Graph graph = load(name);
    const Theory theory(graph);
    const CostModel model(mixed(2, 2));
    ProblemBuilder builder(theory, model, Optimizer::adamw);
    const Shares shares({0.3, 0.3, 0.2, 0.2});
    builder.price(Fractions(model.cluster(), shares));
    // Blocks as they are and drawn at random among the forward nodes.
    std::vector<int> block_of = blocks_of(graph), random = block_of;
    for (size_t n = 0; n < random.size(); ++n)
      random[n] = graph.nodes[n].phase == Phase::forward ? static_cast<int>(rng.below(4)) - 1 : -1;
    for (const std::vector<int>& blocks : {block_of, random})
      for (int i = 0; i < 6; ++i) {
        const Program program = random_program(builder, &rng);
        std::vector<bool> chosen(1 + *std::max_element(blocks.begin(), blocks.end()));
        for (size_t b = 0; b < chosen.size(); ++b) chosen[b] = rng.chance(0.6);
        const Program quick = recompute(theory, program, blocks, chosen);
        EXPECT_EQ(quick.steps, recompute_slowly(theory, program, blocks, chosen).steps);
        again += quick.steps.size() > program.steps.size();
      }
  }
  EXPECT_GT(again, 10);
}

// Where nothing fits otherwise, blocks are computed again, and the step takes longer by no more
// than its forward pass.
TEST(Recompute, MakesPlansFit) {
  const Graph graph = bounds::layered_graph(6, 4096);
  const Theory theory(graph);
  AlternationOptions options;
  auto synthesis_with = [&](double memory, bool recompute) {
    options.recompute = recompute;
    const DeviceType type{"d", 1e12, 4e12, memory, 5e10, 1e-6, 0};
    const CostModel model(flat_cluster({type}, {2}, {LinkKind::switched, 1e9, 1e-5}));
    return alternate(theory, model, options);
  };
  const Alternation free = synthesis_with(1e12, true);
  ASSERT_TRUE(free.feasible);
  EXPECT_TRUE(lines_again(theory, free.program).empty());
  auto least = [&](bool recompute) {
    double low = 0, high = 2 * free.cost.memory.peak[0];
    for (int i = 0; i < 12; ++i) {
      const double middle = (low + high) / 2;
      (synthesis_with(middle, recompute).feasible ? high : low) = middle;
    }
    return high;
  };
  const double without = least(false), with = least(true);
  EXPECT_LT(with, without);
  const Alternation lean = synthesis_with(with, true);
  ASSERT_TRUE(lean.feasible);
  EXPECT_FALSE(lines_again(theory, lean.program).empty());
  EXPECT_THAT(check(theory, lean.program), IsEmpty());
  EXPECT_LE(lean.cost.memory.peak[0], with);
  EXPECT_GT(lean.cost.step, free.cost.step);
}

}  // namespace
}  // namespace motley::spmd
