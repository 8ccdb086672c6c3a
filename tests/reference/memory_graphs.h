// What memory_problem.h promises, checked on random programs of a graph.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "bounds/memory_problem.h"
#include "core/rng.h"
#include "cost/overlap.h"
#include "reference/sample.h"
#include "reference/spmd_graphs.h"
#include "solver/folded.h"
#include "solver/order.h"
#include "spmd/recompute.h"

namespace motley::bounds {

using namespace solver;
using namespace spmd;

// Layers of a product, tanh and relu, of which the backward pass reads the result of tanh that no
// other layer does.
inline Graph layered_graph(int layers, int64_t batch = 64, int64_t width = 32) {
  Graph graph;
  const TensorSpec wide{DType::f32, {width, width}}, rows{DType::f32, {batch, width}},
      columns{DType::f32, {width, batch}};
  std::vector<ValueId> weights;
  for (int l = 0; l < layers; ++l)
    weights.push_back(graph.add_parameter(fmt::format("layer{}.w", l), wide));
  auto add = [&](const char* op, std::vector<Arg> args, const TensorSpec& spec, Phase phase) {
    return graph.node(graph.add(op, std::move(args), {spec}, phase)).outputs[0];
  };
  std::vector<ValueId> x{graph.add_input("x", rows)}, tanh;
  for (int l = 0; l < layers; ++l) {
    const ValueId product = add("aten::mm", {x[l], weights[l]}, rows, Phase::forward);
    tanh.push_back(add("aten::tanh", {product}, rows, Phase::forward));
    x.push_back(add("aten::relu", {tanh[l]}, rows, Phase::forward));
  }
  const Phase backward = Phase::backward;
  graph.loss = add("aten::sum", {x[layers], {}}, {DType::f32, {}}, Phase::forward);
  ValueId g = add("aten::full", {std::vector<int64_t>{batch, width}, 1.0, DType::f32, {}, {}, {}},
                  rows, backward);
  for (int l = layers - 1; l >= 0; --l) {
    g = add("aten::threshold_backward", {g, x[l + 1], int64_t{0}}, rows, backward);
    g = add("aten::tanh_backward", {g, tanh[l]}, rows, backward);
    const ValueId turned = add("aten::t", {x[l]}, columns, backward);
    graph.parameters[l].gradient = add("aten::mm", {turned, g}, wide, backward);
    if (l == 0) break;
    g = add("aten::mm", {g, add("aten::t", {weights[l]}, wide, backward)}, rows, backward);
  }
  return graph;
}

// At random weights and prices of bytes, on devices of two types with random shares, no program is
// cheaper than the bound with its bytes priced, whatever blocks it computes again; nothing hidden,
// and with gradients that overlap with the backward pass. Returns the least that one is more expensive, as
// a part of it. Programs are random ones and those of searches, at such prices and at these.
inline double expect_no_program_below(const Graph& graph, int rounds, int programs, uint64_t seed) {
  const Theory theory(graph);
  const CostModel model(mixed(2, 2));
  const std::vector<int> block_of = blocks_of(graph);
  const int blocks = 1 + *std::max_element(block_of.begin(), block_of.end());
  Rng rng(seed);
  double least = 1;
  for (int round = 0; round < rounds; ++round) {
    const double fast = 0.1 + 0.3 * rng.uniform();
    const Shares shares({fast, fast, 0.5 - fast, 0.5 - fast});
    const Fractions fractions(model.cluster(), shares);
    ProblemBuilder plain(theory, model, Optimizer::adamw);
    plain.price(fractions);
    struct Candidate {
      ProgramCost cost;
      Seconds hidden;
    };
    std::vector<Candidate> candidates;
    auto add = [&](const Program& program, const std::vector<bool>& chosen) {
      Program again = recompute(theory, program, block_of, chosen);
      choose_forms(theory, &again, model, fractions);
      candidates.push_back({cost_of(theory, again, model, fractions, Optimizer::adamw),
                            hidden_seconds(theory, again, model, fractions)});
    };
    MemoryProblem simple(theory, plain, block_of, fractions,
                         MemoryProblem::peak_node(theory, plain, fractions));
    const Order order = make_order(simple.problem());
    for (int i = 0; i < programs; ++i) {
      Program program;
      if (i % 2 == 0) {
        program = random_program(plain, &rng);
      } else {
        Weights weights{{rng.uniform(), 0}, {}};
        weights.compute[1] = 1 - weights.compute[0];
        for (int t = 0; t < 2; ++t) weights.memory.push_back(std::pow(10, -16 + 4 * rng.uniform()));
        program = plain.program(
            simple.plain(solve_folded(simple.problem(), order, weights, {.max_states = 200})));
      }
      std::vector<bool> chosen(blocks);
      for (int b = 0; b < blocks; ++b) chosen[b] = rng.chance(0.5);
      add(program, chosen);
    }
    double bytes = 0, seconds = 0;
    for (const Candidate& c : candidates) {
      bytes = std::max(bytes, c.cost.memory.peak[0]);
      seconds = std::max(seconds, c.cost.step);
    }
    for (const bool overlap : {false, true}) {
      const std::vector<int64_t> from =
          overlap ? std::vector<int64_t>{plain.first_gradient()} : std::vector<int64_t>();
      ProblemBuilder builder(theory, model, Optimizer::adamw, Restriction::none, from);
      Weights weights{{rng.uniform(), 0}, {}};
      weights.compute[1] = 1 - weights.compute[0];
      OverlapPricing pricing;
      std::vector<double> of_type = weights.compute;
      if (overlap) {
        const std::vector<OverlapBound> bounds =
            overlap_bounds(static_cast<int>(from.size()) + 1, 2, 0);
        std::vector<double> mix;
        for (size_t b = 0; b < bounds.size(); ++b) mix.push_back(rng.uniform());
        const double sum = std::accumulate(mix.begin(), mix.end(), 0.0);
        for (double& m : mix) m /= sum;
        pricing = mixture(bounds, mix, from, 2);
        of_type = pricing.compute[0];
        weights.compute = {1, 1};
      }
      builder.price(fractions, 1, overlap ? &pricing : nullptr);
      const NodeId peak_node = MemoryProblem::peak_node(theory, builder, fractions);
      EXPECT_TRUE(peak_node.valid());
      MemoryProblem problem(theory, builder, block_of, fractions, peak_node, from);
      problem.price(overlap ? &pricing : nullptr);
      for (int t = 0; t < 2; ++t)
        weights.memory.push_back(std::pow(10, -2 + 2 * rng.uniform()) * seconds / bytes);
      const Solution solution = solve_folded(problem.problem(), make_order(problem.problem()),
                                             weights, {.max_states = 500, .sweeps = 200});
      Seconds bound = solution.lower_bound;
      for (int t = 0; t < 2; ++t)
        bound +=
            weights.memory[t] * problem.fixed_bytes()[t] + of_type[t] * model.per_step(t, graph);
      add(builder.program(problem.plain(solution)), problem.chosen(solution));
      for (const Candidate& c : candidates) {
        Seconds price = c.cost.step - c.hidden;
        if (!overlap) {
          price = c.cost.comm;
          for (int t = 0; t < 2; ++t) price += weights.compute[t] * c.cost.compute[t];
        }
        for (int t = 0; t < 2; ++t) price += weights.memory[t] * c.cost.memory.peak[t];
        EXPECT_GE(price, bound * (1 - 1e-9)) << "round " << round << (overlap ? ", overlap" : "");
        least = std::min(least, 1 - bound / price);
      }
    }
  }
  return least;
}

}  // namespace motley::bounds
