#include "spmd/segments.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "core/rng.h"
#include "cost/overlap.h"
#include "graph/segment.h"
#include "planner/program_plan.h"
#include "reference/sample.h"
#include "reference/spmd_graphs.h"
#include "solver/folded.h"
#include "solver/order.h"

namespace motley::spmd {

using namespace solver;
using namespace planner;

namespace {

using ::testing::IsEmpty;

// Runs of forward nodes; backward nodes follow them.
std::vector<int> random_runs(const Graph& graph, int segments, Rng* rng) {
  std::vector<int> segment(graph.nodes.size(), -1);
  int now = 0;
  for (size_t n = 0; n < segment.size(); ++n) {
    if (is_source(graph.nodes[n]) || graph.nodes[n].phase == Phase::backward) continue;
    if (rng->chance(0.15)) now = static_cast<int>(rng->below(segments));
    segment[n] = now;
  }
  return with_backward(graph, std::move(segment));
}

Ratios random_ratios(int segments, int devices, Rng* rng) {
  Ratios all(segments, std::vector<double>(devices));
  for (auto& ratios : all) {
    double total = 0;
    for (double& r : ratios) total += r = rng->chance(0.2) ? 0 : 0.05 + rng->uniform();
    ratios[0] += total == 0;
    for (double& r : ratios) r /= total == 0 ? 1 : total;
  }
  return all;
}

// A program of a graph on the graph cut into segments: boundaries where their values are read.
Program translated(const Theory& from, const Program& program, const Theory& to) {
  const Graph &whole = from.graph(), &cut = to.graph();
  std::vector<NodeId> node_of;
  for (size_t n = 0; n < cut.nodes.size(); ++n)
    if (!is_boundary(cut.nodes[n])) node_of.push_back(NodeId(static_cast<int64_t>(n)));
  auto value_of = [&](ValueId v) {
    const Value& value = whole.value(v);
    return cut.node(node_of[value.producer.index]).outputs[value.output];
  };
  auto triple_of = [&](NodeId node, const std::vector<Placement>& in,
                       const std::vector<Placement>& out) {
    const auto& triples = to.triples(node);
    for (size_t t = 0; t < triples.size(); ++t)
      if (triples[t].in == in && triples[t].out == out) return static_cast<int>(t);
    ADD_FAILURE() << "no such triple";
    return 0;
  };
  std::vector<Step> result;
  std::set<std::pair<ValueId, Placement>> crossed;
  for (Step step : program.steps) {
    if (!step.is_compute()) {
      step.value = value_of(step.value);
      result.push_back(step);
      continue;
    }
    const Triple& triple = from.triples(step.node)[step.triple];
    step.node = node_of[step.node.index];
    step.triple = triple_of(step.node, triple.in, triple.out);
    const auto inputs = cut.inputs_of(cut.node(step.node));
    for (size_t i = 0; i < inputs.size(); ++i) {
      const NodeId maker = cut.value(inputs[i]).producer;
      if (!is_boundary(cut.node(maker)) || !crossed.insert({inputs[i], triple.in[i]}).second)
        continue;
      Step boundary;
      boundary.node = maker;
      boundary.triple = triple_of(maker, {triple.in[i]}, {triple.in[i]});
      result.push_back(boundary);
    }
    result.push_back(step);
  }
  // Updates of buffers end where the buffers are.
  const std::vector<Placement> stored = stored_placements(to, {result});
  for (const Buffer& b : cut.buffers) {
    if (!b.update.valid()) continue;
    const NodeId maker = cut.value(b.update).producer;
    const Placement p = stored[b.value.index];
    if (!is_boundary(cut.node(maker)) || !crossed.insert({b.update, p}).second) continue;
    Step boundary;
    boundary.node = maker;
    boundary.triple = triple_of(maker, {p}, {p});
    result.push_back(boundary);
  }
  return {std::move(result)};
}

// The same program costs the same, to the last second and byte, whatever the boundaries, where all
// segments have the same ratios.
TEST(Segments, EqualRatiosPriceAsOneSegment) {
  int programs = 0;
  for (const char* name : kGraphs) {
    const Graph graph = load(name);
    const Theory theory(graph);
    const CostModel model(mixed(2, 3));
    Rng rng(17);
    ProblemBuilder builder(theory, model, Optimizer::adamw);
    for (int trial = 0; trial < 40; ++trial) {
      const Graph cut = with_segments(graph, random_runs(graph, 3, &rng));
      const bool moved_gradient =
          std::any_of(cut.parameters.begin(), cut.parameters.end(), [&](const Parameter& p) {
            return p.gradient.valid() && is_boundary(cut.node(cut.value(p.gradient).producer));
          });
      if (moved_gradient) continue;  // of a tied parameter: one more step on its way
      const Theory theory_of_cut(cut);
      const Ratios one = random_ratios(1, 5, &rng);
      const Shares shares(one), many(Ratios(theory_of_cut.segments(), one[0]));
      const Fractions fractions(model.cluster(), shares), of_cut(model.cluster(), many);
      builder.price(fractions);
      const Program program = random_program(builder, &rng);
      const Program same = translated(theory, program, theory_of_cut);
      ASSERT_THAT(check(theory_of_cut, same), IsEmpty()) << name;
      const ProgramCost a = cost_of(theory, program, model, fractions, Optimizer::adamw);
      const ProgramCost b = cost_of(theory_of_cut, same, model, of_cut, Optimizer::adamw);
      EXPECT_NEAR(b.step, a.step, 1e-12 * a.step) << name;
      EXPECT_NEAR(b.comm, a.comm, 1e-12 * a.step) << name;
      EXPECT_EQ(b.stages.size(), a.stages.size()) << name;
      for (size_t t = 0; t < a.memory.peak.size(); ++t)
        EXPECT_NEAR(b.memory.peak[t], a.memory.peak[t], 1) << name;
      EXPECT_NEAR(hidden_seconds(theory_of_cut, same, model, of_cut),
                  hidden_seconds(theory, program, model, fractions), 1e-12 * a.step)
          << name;
      ++programs;
    }
  }
  EXPECT_GT(programs, 60);
}

// What the search adds up is what the program costs, exchanges included.
TEST(Segments, PriceIsTheCostOfTheProgram) {
  int exchanges = 0;
  for (const char* name : kGraphs) {
    const Graph graph = load(name);
    const CostModel model(flat_cluster({device("d", 1e9)}, {4}, {LinkKind::switched, 1e9, 1e-7}));
    Rng rng(1);
    for (int trial = 0; trial < 20; ++trial) {
      const Graph cut = with_segments(graph, random_runs(graph, 3, &rng));
      const Theory theory(cut);
      const Shares shares(random_ratios(theory.segments(), 4, &rng));
      const Fractions fractions(model.cluster(), shares);
      ProblemBuilder builder(theory, model, Optimizer::adamw);
      builder.price(fractions);
      const Solution solution =
          solve_folded(builder.problem(), make_order(builder.problem()), {{1.0}, {}});
      Program program = builder.program(solution);
      choose_forms(theory, &program, model, fractions);
      EXPECT_THAT(check(theory, program), IsEmpty());
      const ProgramCost cost = cost_of(theory, program, model, fractions, Optimizer::adamw);
      EXPECT_GE(cost.step, solution.price * (1 - 1e-9)) << name;
      // Gradients that boundaries part pay a latency each.
      const double latencies =
          model.net().all_reduce(0) * static_cast<double>(1 + graph.parameters.size());
      EXPECT_LE(cost.step, (solution.price + latencies) * (1 + 1e-9)) << name;
      for (const Bytes bytes : cost.exchanged) exchanges += bytes > 0;
    }
  }
  EXPECT_GT(exchanges, 10);
}

// No program drawn at random, at the ratios of the best pair, is below the bound; and the best pair
// is no worse than one with the ratios of one segment.
TEST(Segments, LowerBoundHoldsAndOneSegmentIsNoBetter) {
  for (const char* name : kGraphs) {
    const Graph graph = load(name);
    for (const double bandwidth : {1e8, 1e10}) {
      const CostModel model(mixed(2, 3, bandwidth));
      AlternationOptions options;
      const Theory whole(graph);
      const Alternation one = alternate(whole, model, options);
      ASSERT_TRUE(one.feasible);
      for (int count = 2; count <= 3; ++count) {
        const Graph cut =
            with_segments(graph, partition_segments(graph, count, SegmentWeight::bytes));
        const Theory theory(cut);
        ASSERT_GT(theory.segments(), 1) << name;
        const Alternation best = alternate(theory, model, options);
        ASSERT_TRUE(best.feasible) << best.reason;
        EXPECT_THAT(check(theory, best.program), IsEmpty());
        EXPECT_EQ(best.ratios.size(), static_cast<size_t>(theory.segments()));
        EXPECT_LE(best.step(), one.step() * (1 + 1e-3)) << name << " " << count;
        EXPECT_LE(best.lower_bound, best.cost.step * (1 + 1e-12));
        const Shares shares(best.ratios);
        const Fractions fractions(model.cluster(), shares);
        EXPECT_NEAR(cost_of(theory, best.program, model, fractions, options.optimizer).step,
                    best.cost.step, 1e-12);
        ProblemBuilder builder(theory, model, options.optimizer);
        builder.price(fractions);
        Rng rng(7);
        for (int trial = 0; trial < 50; ++trial)
          EXPECT_GE(
              cost_of(theory, random_program(builder, &rng), model, fractions, options.optimizer)
                  .step,
              best.lower_bound * (1 - 1e-9))
              << name;
      }
    }
  }
}

// METIS: segments in the order of the forward pass, all of them there, small tensors on the cut.
TEST(Segments, PartitionsCutSmallTensors) {
  for (const char* name : kGraphs) {
    const Graph graph = load(name);
    for (const auto weight : {SegmentWeight::bytes, SegmentWeight::flops})
      for (int count = 1; count <= 4; ++count) {
        const std::vector<int> segment = partition_segments(graph, count, weight);
        ASSERT_EQ(segment.size(), graph.nodes.size());
        EXPECT_EQ(segment, partition_segments(graph, count, weight));
        const std::set<int> used(segment.begin(), segment.end());
        EXPECT_LE(*used.rbegin(), count - 1);
        EXPECT_GE(static_cast<int>(used.size()), std::min(count, 2)) << name;
        auto crossing = [](const Graph& cut) {
          Bytes bytes = 0;
          for (const Node& node : cut.nodes)
            if (is_boundary(node)) bytes += static_cast<Bytes>(cut.spec(node.outputs[0]).bytes());
          return bytes;
        };
        if (count == 1) continue;
        const Bytes found = crossing(with_segments(graph, segment));
        // Against as many segments anywhere: the mean of random ones is far worse.
        Rng rng(1);
        Bytes random = 0;
        for (int trial = 0; trial < 20; ++trial) {
          std::vector<int> any(graph.nodes.size(), -1);
          for (size_t n = 0; n < any.size(); ++n)
            if (!is_source(graph.nodes[n]) && graph.nodes[n].phase == Phase::forward)
              any[n] = static_cast<int>(rng.below(count));
          random += crossing(with_segments(graph, with_backward(graph, any))) / 20;
        }
        EXPECT_LT(found, random / 2) << name << " " << count;
      }
  }
}

}  // namespace
}  // namespace motley::spmd
