#include "plan/plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <utility>

#include "cluster/resources.h"
#include "core/error.h"
#include "core/rng.h"
#include "cost/storage.h"
#include "graph/precision.h"
#include "reference/graphs.h"

namespace motley {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const char* kGraph = R"(model toy
%0 = motley::input("x") : f32[6,4]
%1 = motley::parameter("w") : f32[4,10]
%2 = aten::mm(%0, %1) : f32[6,10]
%3 = aten::sum(%2, none) : f32[]
%4 = aten::full([6, 10], 1.0, f32, none, none, none) : f32[6,10] backward
%5 = aten::t(%0) : f32[4,6] backward
%6 = aten::mm(%5, %4) : f32[4,10] backward
loss %3
gradient "w" %6
)";

Plan sample() {
  Plan plan;
  plan.model = "toy";
  plan.batch = 6;
  plan.cluster = flat_cluster(
      {{"big", 4e12, 4e12, 1e9, 1e11, 1e-6, 0}, {"small", 1e12, 1e12, 1e9, 1e11, 1e-6, 0}}, {1, 2},
      {LinkKind::switched, 1e9, 1e-5});
  plan.ratios = {{0.5, 0.25, 0.25}};
  plan.set_graph(parse_graph(kGraph, "toy"));
  std::vector<Step> steps;
  for (const char* line : {"node 0 motley::input  -> S(0)", "node 1 motley::parameter  -> R",
                           "node 2 aten::mm S(0), R -> S(0)", "node 3 aten::sum S(0) -> P",
                           "node 4 aten::full  -> S(0)", "node 5 aten::t S(0) -> S(1)",
                           "node 6 aten::mm S(1), S(0) -> P", "all_reduce %6 P -> R"})
    steps.push_back(parse_step(*plan.theory, line, "sample"));
  plan.program.steps = std::move(steps);
  plan.peak_memory_bytes = {1, 2, 3};
  return plan;
}

std::string failure(const std::string& text) {
  try {
    parse_plan(text, "p.json");
  } catch (const UserError& e) {
    return e.what();
  }
  return "no error";
}

std::string changed(const std::function<void(Json&)>& change) {
  Json j = to_json(sample());
  change(j);
  return j.dump();
}

TEST(Plan, RoundTrips) {
  std::string text = to_json(sample()).dump();
  Plan again = parse_plan(text, "p.json");
  EXPECT_EQ(to_json(again).dump(), text);
  EXPECT_THAT(check(again), IsEmpty());
}

// The first reduces with either other, then all know the sum.
ReductionProgram two_steps() {
  return {{},
          {{Collective::reduce, {{0, 1, 2}}}, {Collective::broadcast, {{0, 1, 2}}}},
          100,
          1e-5,
          2e-9};
}

TEST(Plan, HoldsReductionPrograms) {
  Plan plan = sample();
  const Seconds before = cost_of(*plan.theory, plan.program, CostModel(plan.cluster),
                                 Fractions(plan.cluster, Shares(plan.ratios)), plan.optimizer)
                             .comm;
  plan.reductions = {two_steps()};
  EXPECT_THAT(check(plan), IsEmpty());
  const std::string text = to_json(plan).dump(1);
  const Plan again = parse_plan(text, "p.json");
  EXPECT_EQ(to_json(again).dump(1), text);
  EXPECT_EQ(again.reductions, plan.reductions);
  EXPECT_THAT(describe(again), HasSubstr("reduce in one group of 3, then broadcast"));
  // 160 bytes of gradient take it; the price is the program's.
  const Shares shares(plan.ratios);
  const Fractions fractions(plan.cluster, shares);
  const CostModel model(plan.cluster, plan.reductions);
  const Seconds after = cost_of(*plan.theory, plan.program, model, fractions, plan.optimizer).comm;
  EXPECT_NEAR(after, 1e-5 + 160 * 2e-9, 1e-15);
  EXPECT_NE(after, before);

  plan.reductions[0].steps.pop_back();
  EXPECT_THAT(check(plan), testing::ElementsAre(HasSubstr("without the sum of all")));
  plan.reductions = {two_steps(), two_steps()};
  EXPECT_THAT(check(plan), testing::ElementsAre(HasSubstr("no more bytes")));
}

TEST(Plan, SaysWhatToMend) {
  EXPECT_THAT(failure("{}"),
              HasSubstr("p.json: field 'motley_plan' is missing; this is not a plan"));
  EXPECT_THAT(failure("[1]"), HasSubstr("give a JSON object"));
  EXPECT_THAT(failure(changed([](Json& j) { j["motley_plan"] = 9; })),
              HasSubstr("is 9; this motley reads version 2"));
  EXPECT_THAT(failure(changed([](Json& j) {
                j["ratios"] = {0.5, -1, 1};
              })),
              HasSubstr("ratios[1] is -1"));
  EXPECT_THAT(failure(changed([](Json& j) {
                j["ratios"] = {0.5, 0.5};
              })),
              HasSubstr("has 2 numbers; the cluster has 3 devices"));
  EXPECT_THAT(failure(changed([](Json& j) { j["ratios"] = {0, 0, 0}; })), HasSubstr("all zero"));
  EXPECT_THAT(failure(changed([](Json& j) { j["batch"] = 0; })),
              HasSubstr("'batch' is not positive"));
  EXPECT_THAT(failure(changed([](Json& j) { j["optimizer"] = "lion"; })),
              HasSubstr("give adamw, amsgrad, sgd, fused-adamw"));
  EXPECT_THAT(
      failure(changed([](Json& j) { j["program"][2] = "node 2 aten::bmm S(0), R -> S(0)"; })),
      HasSubstr("p.json: program[2]: 'node 2 aten::bmm S(0), R -> S(0)' is aten::mm in the graph; "
                "the plan was made for another model"));
  EXPECT_THAT(failure(changed([](Json& j) { j["program"][2] = "node 2 aten::mm S(1), R -> P"; })),
              HasSubstr("is not a Hoare triple"));
  EXPECT_THAT(failure(changed([](Json& j) { j["program"][2] = 7; })), HasSubstr("program[2] is 7"));
  auto with_reduction = [](const std::function<void(Json&)>& change) {
    return failure(changed([&](Json& j) {
      j["reductions"] = {{{"from_bytes", 1},
                          {"fixed_s", 0},
                          {"seconds_per_byte", 0},
                          {"steps", {{{"collective", "all_reduce"}, {"groups", {{0, 1, 2}}}}}}}};
      change(j["reductions"][0]);
    }));
  };
  EXPECT_EQ(with_reduction([](Json&) {}), "no error");
  EXPECT_THAT(with_reduction([](Json& j) { j["steps"][0]["collective"] = "gossip"; }),
              HasSubstr("p.json: reductions[0].steps[0]: field 'collective' is 'gossip'; give"));
  EXPECT_THAT(with_reduction([](Json& j) { j["steps"][0]["groups"][0][1] = -4; }),
              HasSubstr("holds -4"));
  EXPECT_THAT(with_reduction([](Json& j) { j["from_bytes"] = -1; }), HasSubstr("negative"));
  EXPECT_THAT(failure(changed([](Json& j) { j["graph"][1] = "%0 = nonsense"; })),
              HasSubstr("p.json: graph: line 2"));
  EXPECT_THAT(
      failure(changed([](Json& j) { j["cluster"] = Json::array({"link: {bandwidth: 0}"}); })),
      HasSubstr("p.json: cluster"));
}

// Hostile files: cut and garbled plans are refused or read, never a crash.
TEST(Plan, SurvivesGarbage) {
  std::string text = to_json(sample()).dump();
  Rng rng(1);
  int refused = 0;
  for (int trial = 0; trial < 3000; ++trial) {
    std::string bad = text;
    for (int64_t i = rng.between(1, 4); i > 0; --i) {
      size_t at = static_cast<size_t>(rng.below(static_cast<int64_t>(bad.size())));
      switch (rng.below(4)) {
        case 0:
          bad[at] = static_cast<char>(rng.below(256));
          break;
        case 1:
          bad.erase(at, static_cast<size_t>(rng.between(1, 30)));
          break;
        case 2:
          bad.insert(
              at, bad.substr(static_cast<size_t>(rng.below(static_cast<int64_t>(bad.size()))), 20));
          break;
        default:
          bad[at] = "0123456789"[rng.below(10)];
      }
    }
    try {
      Plan plan = parse_plan(bad, "p.json");
      check(plan);
    } catch (const UserError&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 1000);
}

// The same for graphs, on captured steps with their many operators.
TEST(Graph, SurvivesGarbage) {
  Rng rng(2);
  int refused = 0, read = 0;
  for (const char* name : kGraphs) {
    const std::string text = graph_text(name);
    for (int trial = 0; trial < 700; ++trial) {
      std::string bad = text;
      for (int64_t i = rng.between(1, 3); i > 0; --i) {
        size_t at = static_cast<size_t>(rng.below(static_cast<int64_t>(bad.size())));
        if (rng.chance(0.7))
          bad[at] = "0123456789[],%-"[rng.below(15)];
        else
          bad.erase(at, static_cast<size_t>(rng.between(1, 12)));
      }
      try {
        Graph graph = parse_graph(bad, name);
        Theory theory(graph);
        ++read;
      } catch (const UserError&) {
        ++refused;
      }
    }
  }
  EXPECT_GT(refused, 500);
  EXPECT_GT(read, 100);
}

// The toy in bf16 with its weight in f32: 40 numbers of parameter and two of state at 4 bytes and a
// gradient at 2; at the end of the step the optimizer has the gradient at 4 bytes as well.
TEST(Cost, MixedPrecisionByHand) {
  Plan plan = sample();
  plan.program = {};
  plan.set_graph(with_precision(parse_graph(kGraph, "toy"), DType::bf16));
  const Graph& graph = *plan.graph;
  ASSERT_EQ(graph.parameters.size(), 1u);
  EXPECT_EQ(state_bytes(graph, graph.parameters[0], Optimizer::adamw), 40 * (4 + 8 + 2));
  const Plan full = sample();
  EXPECT_EQ(state_bytes(*full.graph, full.graph->parameters[0], Optimizer::adamw), 40 * 16);
  // Products run at the rate of 16 bits, and touch half the bytes.
  DeviceType type{"d", 1e12, 4e12, 1e9, 1e11, 0, 0};
  const CostModel model(flat_cluster({type}, {2}, {LinkKind::switched, 1e9, 0}));
  auto product = [&](const Graph& g) {
    const Theory theory(g);
    for (size_t n = 0; n < g.nodes.size(); ++n)
      if (g.nodes[n].op == "aten::mm") {
        const Work work = work_of(theory, NodeId(n), theory.triples(NodeId(n))[0]);
        return std::pair{work.cut_bytes + work.whole_bytes, work.half};
      }
    return std::pair{0.0, false};
  };
  EXPECT_EQ(product(*full.graph), std::pair(4.0 * (24 + 40 + 60), false));
  EXPECT_EQ(product(graph), std::pair(2.0 * (24 + 40 + 60), true));
  Work work;
  work.flops = 4e12;
  EXPECT_DOUBLE_EQ(model.compute(0, work, 1), 4);
  work.half = true;
  EXPECT_DOUBLE_EQ(model.compute(0, work, 1), 1);

  plan.precision = DType::bf16;
  EXPECT_THAT(to_json(plan).dump(), HasSubstr("\"precision\":\"bf16\""));
  Plan other = sample();
  other.precision = DType::bf16;
  EXPECT_THAT(check(other), Contains(HasSubstr("nothing in the graph is computed in it")));
  other = sample();
  other.set_graph(with_precision(parse_graph(kGraph, "toy"), DType::bf16));
  EXPECT_THAT(check(other), Contains(HasSubstr("the gradient of w is bf16")));
}

TEST(Check, AddsUpMemory) {
  Plan plan = sample();
  for (DeviceType& t : plan.cluster.types) t.memory = 100;
  EXPECT_THAT(check(plan), testing::Contains(HasSubstr("device type big needs")));
  EXPECT_THAT(check(plan, false), IsEmpty());
}

// The formula of section 3.2 by hand: 6x4x10 products of 2 flops, three of them cut; w all-reduced
// on three devices.
TEST(Cost, OfDataParallelismByHand) {
  Plan plan = sample();
  CostModel model(plan.cluster);
  Shares shares(plan.ratios);  // 6 samples: 3, 1, 2 -> the two small devices are priced at the
                               // larger piece, 2
  Fractions fractions(plan.cluster, shares);
  EXPECT_EQ(shares.of(6), (std::vector<int64_t>{3, 1, 2}));
  ProgramCost cost = cost_of(*plan.theory, plan.program, model, fractions, Optimizer::sgd);
  auto op = [&](double flops, double cut, double whole, int type, double f) {
    const DeviceType& t = plan.cluster.types[type];
    return t.overhead + std::max(flops * f / t.flops, (cut * f + whole) / t.memory_bandwidth);
  };
  Seconds first[2], second[2];
  for (int t = 0; t < 2; ++t) {
    double f = t == 0 ? 3. / 6 : 2. / 6;
    first[t] = op(480, 4 * (24 + 60), 160, t, f) + op(60, 4 * 60, 4, t, f) +
               op(60, 4 * 60, 0, t, f) + op(480, 4 * (24 + 60), 160, t, f);
    second[t] = plan.cluster.types[t].overhead + 160. * 5 / plan.cluster.types[t].memory_bandwidth;
  }
  Seconds all_reduce = std::min(2 * 2 / 3. * 160 / 1e9 + 4e-5, 2 * 160 / 1e9 + 2 * 2 * 1e-5);
  EXPECT_NEAR(cost.step, std::max(first[0], first[1]) + all_reduce + std::max(second[0], second[1]),
              1e-12);
  EXPECT_EQ(cost.stages.size(), 2u);
}

// Two products whose rate is known, the rest as long as a small call takes: the sum of the slower type's.
TEST(Cost, OfLaunchesByHand) {
  Plan plan = sample();
  const Shares shares({1, 0, 0});
  const Fractions fractions(plan.cluster, shares);
  const auto launches = [&] {
    return launching(*plan.theory, plan.program, CostModel(plan.cluster), fractions, Optimizer::sgd)
        .launches;
  };
  EXPECT_EQ(launches(), 0);
  int calls = 0, products = 0;
  for (const Step& step : plan.program.steps) {
    if (!step.is_compute() ||
        work_of(*plan.theory, step.node, plan.theory->triples(step.node)[step.triple]).free)
      continue;
    ++calls;
    products += plan.graph->node(step.node).op == "aten::mm";
  }
  ASSERT_EQ(products, 2);
  DeviceType& type = plan.cluster.types[1];
  OpRate product{"aten::mm"}, update{"motley::sgd"}, step{"motley::step"};
  product.launch = 3e-3, update.launch = 1e-3, step.overhead = 5e-4;
  type.ops = {product, update, step};
  EXPECT_NEAR(launches(), products * 3e-3 + (calls - products) * type.overhead + 1e-3 + 5e-4,
              1e-12);
  slow_down(&type, 2);
  EXPECT_NEAR(launches(), 2 * (products * 3e-3 + 1e-3 + 5e-4) + (calls - products) * type.overhead,
              1e-12);
}

// A device is done when the longest chain is: up to some call the machine launches, from it on the
// device computes.
TEST(Cost, WaitsForLaunchesAreTheLongestChain) {
  Rng rng(11);
  for (int trial = 0; trial < 50; ++trial) {
    Plan plan = sample();
    DeviceType& type = plan.cluster.types[1];
    for (const Node& node : plan.graph->nodes)
      if (std::none_of(type.ops.begin(), type.ops.end(),
                       [&](const OpRate& r) { return r.op == node.op; })) {
        OpRate& rate = type.ops.emplace_back(OpRate{node.op});
        rate.overhead = 1e-5 * rng.uniform(), rate.launch = 1e-5 * rng.uniform();
      }
    const CostModel model(plan.cluster);
    const Shares shares({0.3, 0.3, 0.4});
    const Fractions fractions(plan.cluster, shares);
    std::vector<Seconds> launch, compute;
    for (const Step& step : plan.program.steps) {
      if (!step.is_compute()) continue;
      const Work work =
          work_of(*plan.theory, step.node, plan.theory->triples(step.node)[step.triple]);
      if (work.free) continue;
      launch.push_back(model.launch(1, work));
      compute.push_back(model.compute(1, work, fractions.by_type(work.cut)[1]));
    }
    Seconds done = 0;
    for (size_t k = 0; k < launch.size(); ++k)
      done = std::max(
          done, std::accumulate(launch.begin(), launch.begin() + static_cast<long>(k) + 1, 0.) +
                    std::accumulate(compute.begin() + static_cast<long>(k), compute.end(), 0.));
    const Launching calls = launching(*plan.theory, plan.program, model, fractions, 0,
                                      static_cast<int>(plan.program.steps.size()));
    EXPECT_NEAR(calls.launches, std::accumulate(launch.begin(), launch.end(), 0.), 1e-15);
    EXPECT_NEAR(calls.waits, done - std::accumulate(compute.begin(), compute.end(), 0.), 1e-15);
    EXPECT_EQ(calls.beyond(calls.waits), 0);
  }
}

// Peak memory by hand: w, its gradient and momentum; activations by liveness.
TEST(Cost, MemoryByHand) {
  Plan plan = sample();
  Shares shares({1, 0, 0});
  Fractions fractions(plan.cluster, shares);
  MemoryCost memory = memory_of(*plan.theory, plan.program, fractions, 2, Optimizer::sgd);
  EXPECT_DOUBLE_EQ(memory.state[0], 3 * 160);
  // The first device holds all: x (96), the loss (4), and %4 (240) while the gradient is made,
  // which is counted already, and sent (160 more). Later, with %4 gone, the optimizer takes less
  // (320). The batch is there throughout, and small change.
  EXPECT_DOUBLE_EQ(memory.peak[0], 3 * 160 + 96 + 4 + 240 + 160 + held_throughout(*plan.graph));
}

}  // namespace
}  // namespace motley
