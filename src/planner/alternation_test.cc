#include "planner/alternation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <numeric>
#include <set>

#include "cluster/part.h"
#include "core/error.h"
#include "core/rng.h"
#include "cost/overlap.h"
#include "planner/program_plan.h"
#include "reference/least_of_all.h"
#include "reference/sample.h"
#include "reference/spmd_graphs.h"
#include "solver/folded.h"
#include "solver/order.h"

namespace motley::planner {

using namespace solver;
using namespace spmd;

namespace {

using ::testing::HasSubstr;

// The most that an all-reduce of a gradient costs by itself beyond its part of a message.
Seconds by_itself(const Graph& graph, const CostModel& model) {
  Seconds most = 0;
  for (const Parameter& p : graph.parameters) {
    if (!p.gradient.valid()) continue;
    GradientRun alone({}), joined({});
    joined.any = joined.small = true;
    most = std::max(most, model.gradient_all_reduce(graph.spec(p.gradient), &alone) -
                              model.gradient_all_reduce(graph.spec(p.gradient), &joined));
  }
  return most;
}

// The price that the search minimises is the cost of the program it returns: for one device type
// the two differ by what the first of the gradients' all-reduces, which others join, takes more,
// and the latency of what is sent to second copies.
TEST(Builder, PriceIsTheCostOfTheProgram) {
  for (const char* name : kGraphs) {
    Graph graph = load(name);
    Theory theory(graph);
    CostModel model(flat_cluster({device("d", 1e12)}, {4}, {LinkKind::switched, 1e9, 1e-5}));
    Rng rng(1);
    for (int trial = 0; trial < 20; ++trial) {
      Shares shares({0.4, 0.3, 0.2, 0.1 + rng.uniform()});
      const int redundancy = trial % 2;
      Fractions fractions(model.cluster(), shares, redundancy);
      ProblemBuilder builder(theory, model, Optimizer::adamw);
      builder.price(fractions);
      Weights weights{{1.0}, {}};
      Solution solution = solve_folded(builder.problem(), make_order(builder.problem()), weights);
      Program program = builder.program(solution);
      EXPECT_THAT(check(theory, program), testing::IsEmpty());
      ProgramCost cost = cost_of(theory, program, model, fractions, Optimizer::adamw);
      EXPECT_GE(cost.step, solution.price * (1 - 1e-9)) << name;
      const Seconds latencies = by_itself(graph, model) + redundancy * model.latency();
      EXPECT_LE(cost.step, (solution.price + latencies) * (1 + 1e-9)) << name;
    }
  }
}

// With prices of the slowest type the price is no less than the cost of any program: what is left
// between them are stages whose operators do not all wait for the same type.
TEST(Builder, LevelPriceIsNoLessThanTheCost) {
  double equal = 0;
  for (const char* name : kGraphs) {
    const Graph graph = load(name);
    const Theory theory(graph);
    const CostModel model(mixed(2, 2));
    Rng rng(2);
    for (int trial = 0; trial < 20; ++trial) {
      const double fast = 0.1 + 0.3 * rng.uniform();
      const Shares shares({fast, fast, 0.5 - fast, 0.5 - fast});
      const Fractions fractions(model.cluster(), shares);
      ProblemBuilder builder(theory, model, Optimizer::adamw);
      builder.price(fractions);
      const Solution weighted =
          solve_folded(builder.problem(), make_order(builder.problem()), {{0.5, 0.5}, {}});
      builder.price_at_slowest_type();
      const Weights any{{0, 1}, {}};
      const Solution level = solve_folded(builder.problem(), make_order(builder.problem()), any);
      for (const std::vector<int>& option : {weighted.option, level.option}) {
        const Solution solution = evaluate(builder.problem(), option, any);
        const Seconds cost =
            cost_of(theory, builder.program(solution), model, fractions, Optimizer::adamw).step;
        const Seconds most = solution.price + by_itself(graph, model);
        EXPECT_LE(cost, most * (1 + 1e-9)) << name;
        equal = std::max(equal, cost / most);
      }
    }
  }
  EXPECT_GT(equal, 0.99);
}

// No program drawn at random is cheaper than the lower bound, on any number of types.
TEST(Alternation, LowerBoundHoldsAgainstRandomPrograms) {
  for (const char* name : kGraphs) {
    Graph graph = load(name);
    Theory theory(graph);
    CostModel model(mixed(2, 3));
    AlternationOptions options;
    options.ratios = {0.3, 0.3, 0.15, 0.15, 0.1};
    Alternation best = alternate(theory, model, options);
    ASSERT_TRUE(best.feasible) << best.reason;
    EXPECT_LE(best.lower_bound, best.cost.step * (1 + 1e-12));
    EXPECT_GE(best.lower_bound, 0.5 * best.cost.step);
    Shares shares(best.ratios);
    Fractions fractions(model.cluster(), shares);
    ProblemBuilder builder(theory, model, options.optimizer);
    builder.price(fractions);
    Rng rng(7);
    for (int trial = 0; trial < 100; ++trial) {
      Program program = random_program(builder, &rng);
      EXPECT_GE(cost_of(theory, program, model, fractions, options.optimizer).step,
                best.lower_bound * (1 - 1e-9))
          << name;
    }
  }
}

// At whatever moment time is up: nothing, or a sound program and its cost; with time enough, what
// is found without a limit.
TEST(Alternation, EndsInTime) {
  int found = 0, nothing = 0;
  for (const char* name : kGraphs) {
    const Graph graph = load(name);
    const Theory theory(graph);
    for (const Bytes memory : {16e9, 3e5}) {
      Cluster cluster = mixed(2, 2);
      for (DeviceType& type : cluster.types) type.memory = memory;
      const CostModel model(cluster);
      AlternationOptions options;
      options.overlap = true;
      const Alternation unlimited = alternate(theory, model, options);
      options.limits.deadline = Deadline::in(1e6);
      const Alternation enough = alternate(theory, model, options);
      EXPECT_EQ(enough.feasible, unlimited.feasible);
      EXPECT_EQ(enough.program.steps, unlimited.program.steps);
      EXPECT_EQ(enough.ratios, unlimited.ratios);
      EXPECT_EQ(enough.lower_bound, unlimited.lower_bound);
      for (double seconds = 1e-5; seconds < 4 * unlimited.seconds; seconds *= 2) {
        options.limits.deadline = Deadline::in(seconds);
        try {
          const Alternation s = alternate(theory, model, options);
          if (!s.feasible) continue;
          ++found;
          EXPECT_THAT(check(theory, s.program), testing::IsEmpty());
          const Shares shares(s.ratios);
          EXPECT_EQ(
              cost_of(theory, s.program, model, Fractions(cluster, shares), options.optimizer).step,
              s.cost.step);
          EXPECT_LE(s.lower_bound, unlimited.step() * (1 + 1e-9));
        } catch (const TimeIsUp&) {
          ++nothing;
        }
      }
    }
    ProgramRequest request;
    request.alternation.limits.deadline = Deadline::in(-1);
    const ProgramResult late = plan_program(load(name), mixed(2, 2), request);
    EXPECT_FALSE(late.feasible);
    EXPECT_THAT(late.reason, HasSubstr("time ran out"));
  }
  EXPECT_GT(found, 0);
  EXPECT_GT(nothing, 0);
}

// Nor with gradients beside the backward pass: under any mixture of bounds, wherever stretches
// begin, with tables of their own and without, and whichever class the program is of.
TEST(Alternation, LowerBoundHoldsWithOverlap) {
  int hiding = 0, after = 0, before = 0, whole = 0, reduced = 0;
  for (const char* name : kGraphs) {
    Graph graph = load(name);
    Theory theory(graph);
    for (double bandwidth : {1e8, 1e9, 1e10}) {
      Cluster cluster = mixed(2, 3, bandwidth);
      if (bandwidth < 1e10) cluster.types[1].interference = 0.4;
      CostModel model(cluster);
      const Shares shares({0.3, 0.3, 0.15, 0.15, 0.1});
      const Fractions fractions(model.cluster(), shares);
      AlternationOptions options;
      options.ratios = shares.ratios();
      options.overlap = true;
      const Alternation best = alternate(theory, model, options);
      ASSERT_TRUE(best.feasible) << best.reason;
      EXPECT_LE(best.lower_bound, best.step() * (1 + 1e-12));
      EXPECT_NEAR(best.hidden, hidden_seconds(theory, best.program, model, fractions), 1e-12);
      ProblemBuilder all(theory, model, options.optimizer);
      all.set_sizes(kLargestSizes);
      all.price(fractions);
      const auto step = [&](const Program& program) {
        const Seconds hidden = hidden_seconds(theory, program, model, fractions);
        const ProgramCost cost = cost_of(theory, program, model, fractions, options.optimizer);
        hiding += hidden > 0;
        // What is hidden is communication, behind computation, wherever the waits stand.
        EXPECT_LE(hidden, cost.comm * (1 + 1e-9)) << name;
        EXPECT_LE(hidden, (cost.step - cost.comm) * (1 + 1e-9)) << name;
        return cost.step - hidden;
      };
      Rng rng(7);
      std::vector<Program> programs;
      std::vector<Seconds> seconds;
      // Most communicate until the end; those that only sum gradients up do not.
      ProblemBuilder sums(theory, model, options.optimizer, Restriction::data_parallel);
      sums.price(fractions);
      const Order order_of_sums = make_order(sums.problem());
      for (int i = 0; i < 60; ++i) {
        if (i % 3 > 0) {
          programs.push_back(random_program(all, &rng));
        } else {
          Problem random = sums.problem();
          for (OptionTable& table : random.option_tables)
            for (Option& option : table.options) option.comm += 1e-4 * rng.uniform();
          programs.push_back(sums.program(solve_folded(random, order_of_sums, {{0.5, 0.5}, {}})));
        }
        if (i % 2 > 0)
          programs.back().sizes = {std::pow(10, 7 * rng.uniform()),
                                   std::pow(10, 7 * rng.uniform())};
        seconds.push_back(step(programs.back()));
        EXPECT_GE(seconds.back(), best.lower_bound * (1 - 1e-9)) << name;
      }
      const auto nodes = static_cast<int64_t>(graph.nodes.size());
      for (int trial = 0; trial < 6; ++trial) {
        std::set<int64_t> cuts{all.first_gradient()};
        for (int i = 0; i < 2; ++i) cuts.insert(1 + rng.below(nodes - 1));
        const std::vector<int64_t> from(cuts.begin(), cuts.end());
        const int stretches = static_cast<int>(from.size()) + 1;
        // Two gradients that programs all-reduce or not.
        std::vector<ValueId> separate;
        while (separate.size() < 2) {
          const auto gradients = all.reduced(programs[3 * rng.below(20)]);
          const ValueId one = gradients[rng.below(static_cast<int64_t>(gradients.size()))];
          if (separate.empty() || separate[0] != one) separate.push_back(one);
        }
        ProblemBuilder builder(theory, model, options.optimizer, Restriction::none,
                               trial % 2 == 0 ? from : std::vector<int64_t>(), separate);
        builder.set_sizes(kLargestSizes);
        builder.price(fractions);
        const Order order = make_order(builder.problem());
        const auto least = [&](int barrier, int closed, const std::vector<Decision>& decided) {
          const std::vector<OverlapBound> bounds = overlap_bounds(stretches, 2, barrier);
          std::vector<double> weights;
          for (size_t b = 0; b < bounds.size(); ++b)
            weights.push_back(rng.chance(0.4) ? rng.uniform() : 0);
          weights[rng.below(static_cast<int64_t>(weights.size()))] += 0.1;
          const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
          for (double& w : weights) w /= sum;
          OverlapPricing pricing = mixture(bounds, weights, from, 2);
          if (closed > 0) pricing.closed = closed;
          pricing.decided = decided;
          builder.price(fractions, 1, &pricing);
          const Solution solution =
              solve_folded(builder.problem(), order, {{1, 1}, {}}, {.max_states = 2000});
          const Seconds priced = solution.price + builder.decided_seconds(pricing);
          if (!solution.option.empty() && barrier == 0) {
            const Program program = all.program(solution);
            if (decided.empty()) {
              EXPECT_GE(step(program), priced * (1 - 1e-9)) << name;
            }
            // What the price is made of.
            const std::vector<double> parts =
                overlap_values(bounds, all.overlap_cost(program, fractions, pricing));
            const double price =
                std::inner_product(weights.begin(), weights.end(), parts.begin(), 0.0);
            EXPECT_GE(price, priced * (1 - 1e-9)) << name;
            if (trial % 2 == 0) {
              EXPECT_LE(price, priced * (1 + 1e-9)) << name;
            }
          }
          return solution.lower_bound + builder.decided_seconds(pricing);
        };
        const Seconds any = least(0, 0, {});
        Seconds by_decision[2][2];
        for (const bool a : {false, true})
          for (const bool b : {false, true})
            by_decision[a][b] = least(0, 0, {{separate[0], a}, {separate[1], b}});
        std::vector<std::pair<Seconds, Seconds>> classes;  // [stretch - 1] of both
        for (int s = 1; s < stretches; ++s) {
          const Seconds with = least(s, 0, {});
          classes.emplace_back(with, least(0, s, {}));
        }
        for (size_t p = 0; p < programs.size(); ++p) {
          EXPECT_GE(seconds[p], any * (1 - 1e-9)) << name;
          const std::vector<ValueId> its = all.reduced(programs[p]);
          bool has[2];
          for (int i = 0; i < 2; ++i) {
            has[i] = std::binary_search(its.begin(), its.end(), separate[i]);
            ++(has[i] ? reduced : whole);
          }
          EXPECT_GE(seconds[p], by_decision[has[0]][has[1]] * (1 - 1e-9))
              << name << " gradients %" << separate[0].index << " and %" << separate[1].index;
          const int64_t last = all.last_barrier(programs[p], shares);
          for (size_t s = 0; s < classes.size(); ++s) {
            const bool with = last >= from[s];
            ++(with ? after : before);
            EXPECT_GE(seconds[p], (with ? classes[s].first : classes[s].second) * (1 - 1e-9))
                << name << " from node " << from[s] << ", last barrier at " << last;
          }
        }
      }
    }
  }
  EXPECT_GT(hiding, 50);
  EXPECT_GT(after, 500);
  EXPECT_GT(before, 500);
  EXPECT_GT(whole, 500);
  EXPECT_GT(reduced, 500);
}

TEST(Alternation, OverlappedBoundIsBelowTheBestOfAllPrograms) {
  Rng rng(3);
  double tightest = 0;
  for (int trial = 0; trial < 4; ++trial) {
    const int batch = 8 << rng.below(6), inner = 1024 << rng.below(8);
    const Graph graph = parse_graph(fmt::format(R"(%0 = motley::input("x") : f32[{0},1]
%1 = motley::parameter("w") : f32[1,{1}]
%2 = motley::parameter("v") : f32[{1},1]
%3 = aten::mm(%0, %1) : f32[{0},{1}]
%4 = aten::mm(%3, %2) : f32[{0},1]
%5 = aten::sum(%4, none) : f32[]
%6 = aten::ones([{0}, 1], f32, none, none, none) : f32[{0},1] backward
%7 = aten::t(%3) : f32[{1},{0}] backward
%8 = aten::mm(%7, %6) : f32[{1},1] backward
%9 = aten::t(%2) : f32[1,{1}] backward
%10 = aten::mm(%6, %9) : f32[{0},{1}] backward
%11 = aten::t(%0) : f32[1,{0}] backward
%12 = aten::mm(%11, %10) : f32[1,{1}] backward
loss %5
gradient "w" %12
gradient "v" %8
)",
                                                batch, inner),
                                    "two layers");
    const Theory theory(graph);
    const CostModel model(
        flat_cluster({device("fast", 2e11), device("slow", 1e11)}, {1, 1},
                     {LinkKind::switched, std::pow(10.0, 8 + 2 * rng.uniform()), 1e-6}));
    const Shares shares({0.65, 0.35});
    const Fractions fractions(model.cluster(), shares);
    AlternationOptions options;
    options.ratios = shares.ratios();
    options.overlap = true;
    options.optimizer = Optimizer::sgd;
    const Alternation found = alternate(theory, model, options);
    ASSERT_TRUE(found.feasible) << found.reason;
    const Seconds least = least_of_all(theory, model, fractions);
    EXPECT_LE(found.lower_bound, least * (1 + 1e-9)) << batch << " " << inner;
    EXPECT_GE(found.step(), least * (1 - 0.02)) << batch << " " << inner;
    tightest = std::max(tightest, found.lower_bound / least);
  }
  EXPECT_GT(tightest, 0.95);
}

TEST(Alternation, NeverWorseThanItsRestrictions) {
  for (const char* name : kGraphs)
    for (double bandwidth : {1e7, 1e9, 1e11}) {
      ProgramRequest request;
      request.batch = 8;
      ProgramResult result = plan_program(load(name), mixed(2, 2, bandwidth), request);
      ASSERT_TRUE(result.feasible) << result.reason;
      EXPECT_THAT(check(result.plan), testing::IsEmpty());
      for (const StrategyTime& b : result.baselines)
        if (b.feasible) {
          EXPECT_LE(result.plan.predicted_step_s, b.predicted_step_s * (1 + 1e-9))
              << name << " " << b.name << " " << bandwidth;
        }
    }
}

// A plan of the whole cluster may do all the work on every device: what it takes says nothing about
// parts.
TEST(Planner, PartsAreLeftOutForGoodReasonOnly) {
  int parts = 0;
  for (const char* name : kGraphs)
    for (double bandwidth : {1e5, 1e8, 1e9, 1e11}) {
      const Cluster cluster = mixed(2, 2, bandwidth);
      ProgramRequest request;
      request.batch = 8;
      request.baselines = false;
      request.parts = true;
      request.alternation.certify = false;
      const ProgramResult best = plan_program(load(name), cluster, request);
      ASSERT_TRUE(best.feasible) << best.reason;
      parts += best.devices.size() < 4;
      request.parts = false;
      for (const std::vector<int>& devices :
           {std::vector<int>{0, 1, 2, 3}, std::vector<int>{0, 1}, std::vector<int>{0}}) {
        const ProgramResult part = plan_program(load(name), part_of(cluster, devices), request);
        ASSERT_TRUE(part.feasible) << part.reason;
        EXPECT_LE(best.plan.predicted_step_s, part.plan.predicted_step_s * (1 + 1e-9))
            << name << " " << bandwidth << " " << devices.size();
      }
    }
  EXPECT_GT(parts, 3);
}

TEST(Alternation, FasterDevicesGetMore) {
  ProgramRequest request;
  request.batch = 32;
  // Links so fast that computation decides.
  ProgramResult result = plan_program(load("mlp"), mixed(1, 1, 1e13), request);
  ASSERT_TRUE(result.feasible);
  EXPECT_GT(result.plan.ratios[0][0], 0.5);
}

// Figure 4 of HAP: padded where shares are nearly even, grouped where one is large; the form of
// every step of a plan is the faster one, and the price of the plan is that of its forms.
TEST(Forms, CrossOver) {
  const CostModel model(flat_cluster({device("d", 1e12)}, {4}, {LinkKind::switched, 1e9, 1e-5}));
  const double bytes = 4e6;
  for (Collective kind : {Collective::all_gather, Collective::reduce_scatter}) {
    int grouped = 0;
    for (double largest = 0.25; largest < 1; largest += 0.05) {
      const double rest = (1 - largest) / 3;
      const auto profile = model.net().profile({largest, rest, rest, rest});
      const double a = model.collective(kind, bytes, profile, PieceForm::padded),
                   b = model.collective(kind, bytes, profile, PieceForm::grouped);
      const double chunk = std::min(largest * bytes / 8, 262144.0);
      // By hand: three rounds of the largest; all but the least over one link, what two chunks are
      // longer than the least to fill the chains, six latencies.
      EXPECT_NEAR(a, 3 * largest * bytes / 1e9 + 2e-5, 1e-12);
      const double filling = 2 * std::max(0.0, chunk - rest * bytes);
      EXPECT_NEAR(b, ((1 - rest) * bytes + filling) / 1e9 + 6e-5, 1e-12);
      EXPECT_EQ(model.collective(kind, bytes, profile), std::min(a, b));
      EXPECT_GE(b<a, grouped> 0) << "the forms cross more than once";
      grouped += b < a;
    }
    EXPECT_GT(grouped, 5);
    EXPECT_LT(grouped, 15);
  }
}

TEST(Forms, AreTheFasterOnesAtTheRatiosOfThePlan) {
  int grouped = 0, padded = 0;
  for (const char* name : kGraphs)
    for (double skew : {1.0, 1.5, 4.0, 20.0}) {
      Graph graph = load(name);
      Theory theory(graph);
      CostModel model(mixed(1, 3, 1e8));
      AlternationOptions options;
      options.restriction = Restriction::zero;
      options.ratios = {skew / (skew + 3), 1 / (skew + 3), 1 / (skew + 3), 1 / (skew + 3)};
      const Alternation s = alternate(theory, model, options);
      ASSERT_TRUE(s.feasible) << s.reason;
      const Shares shares(s.ratios);
      const Fractions fractions(model.cluster(), shares);
      for (size_t i = 0; i < s.program.steps.size(); ++i) {
        const Step& step = s.program.steps[i];
        if (step.is_compute() || !has_forms(step.kind)) continue;
        (step.form == PieceForm::grouped ? grouped : padded) += 1;
        Program program = s.program;
        program.steps.change([&](std::vector<Step>& steps) {
          steps[i].form = step.form == PieceForm::grouped ? PieceForm::padded : PieceForm::grouped;
        });
        EXPECT_GE(cost_of(theory, program, model, fractions, options.optimizer).step,
                  s.cost.step * (1 - 1e-12))
            << name << " step " << i;
      }
    }
  EXPECT_GT(grouped, 0);
  EXPECT_GT(padded, 0);
}

// Sufficient factor broadcasting (HAP section 2.5.2): a gradient is computed whole by every device
// from gathered factors instead of being all-reduced. Against the best program that may not.
TEST(Forms, SufficientFactorsAreGatheredExactlyWhenThatIsCheaper) {
  int with = 0, without = 0;
  for (int batch : {2, 8, 32, 128, 512, 2048}) {
    const Graph graph = parse_graph(fmt::format(R"(%0 = motley::input("x") : f32[{0},1024]
%1 = motley::parameter("w") : f32[1024,1024]
%2 = aten::mm(%0, %1) : f32[{0},1024]
%3 = aten::relu(%2) : f32[{0},1024]
%4 = motley::parameter("v") : f32[1024,1024]
%5 = aten::mm(%3, %4) : f32[{0},1024]
%6 = aten::relu(%5) : f32[{0},1024]
%7 = aten::sum(%6, none) : f32[]
%8 = aten::full([{0}, 1024], 1.0, f32, none, none, none) : f32[{0},1024] backward
%9 = aten::threshold_backward(%8, %6, 0) : f32[{0},1024] backward
%10 = aten::t(%4) : f32[1024,1024] backward
%11 = aten::mm(%9, %10) : f32[{0},1024] backward
%12 = aten::t(%3) : f32[1024,{0}] backward
%13 = aten::mm(%12, %9) : f32[1024,1024] backward
%14 = aten::threshold_backward(%11, %3, 0) : f32[{0},1024] backward
%15 = aten::t(%0) : f32[1024,{0}] backward
%16 = aten::mm(%15, %14) : f32[1024,1024] backward
loss %7
gradient "w" %16
gradient "v" %13
)",
                                                batch),
                                    "two layers");
    Theory theory(graph);
    CostModel model(flat_cluster({device("d", 2e11)}, {2}, {LinkKind::switched, 1e9, 1e-6}));
    ProblemBuilder builder(theory, model, Optimizer::sgd);
    Shares shares({0.5, 0.5});
    builder.price(Fractions(model.cluster(), shares));
    // Parameters whole (the first choice of their token), as in data parallelism.
    Problem all = builder.problem();
    std::vector<bool> gradient(all.value_table.size());
    auto own_table = [](Problem* problem, ProblemNode* node) {
      problem->option_tables.push_back(problem->option_tables[node->table]);
      node->table = static_cast<int>(problem->option_tables.size()) - 1;
      return &problem->option_tables.back().options;
    };
    for (ProblemNode& node : all.nodes) {
      if (node.inputs.empty() && node.outputs.size() == 2) own_table(&all, &node)->resize(1);
      if (node.outputs.empty() && node.inputs.size() == 2) gradient[node.inputs[1]] = true;
    }
    auto whole = [](const Option& o) {
      return o.in == std::vector<uint8_t>(o.in.size(), 0) && o.out == std::vector<uint8_t>{0};
    };
    auto makes_gradient = [&](const ProblemNode& node) {
      return node.outputs.size() == 1 && gradient[node.outputs[0]];
    };
    Problem forbidden = all;
    for (ProblemNode& node : forbidden.nodes)
      if (makes_gradient(node)) std::erase_if(*own_table(&forbidden, &node), whole);
    const Weights weights{{1.0}, {}};
    const Solution best = solve_folded(all, make_order(all), weights),
                   other = solve_folded(forbidden, make_order(forbidden), weights);
    int factors = 0;
    for (size_t n = 0; n < all.nodes.size(); ++n)
      if (makes_gradient(all.nodes[n]) &&
          whole(all.option_tables[all.nodes[n].table].options[best.option[n]]))
        for (const Conversion& c : best.conversions)
          factors += c.to == 0 && std::count(all.nodes[n].inputs.begin(), all.nodes[n].inputs.end(),
                                             c.value) > 0;
    EXPECT_EQ(factors > 0, best.price < other.price * (1 - 1e-9)) << batch;
    ++(factors > 0 ? with : without);
  }
  EXPECT_GE(with, 2);
  EXPECT_GE(without, 2);
}

TEST(Alternation, IsDeterministic) {
  ProgramRequest request;
  request.batch = 8;
  Json a = to_json(plan_program(load("gpt1"), mixed(2, 2), request).plan),
       b = to_json(plan_program(load("gpt1"), mixed(2, 2), request).plan);
  EXPECT_EQ(a.dump(), b.dump());
}

// Memory is a hard limit: the plan fits, costs more than the unlimited one, and stores parameters
// in pieces.
TEST(Alternation, MemoryIsAHardLimit) {
  Graph graph = load("mlp");
  Theory theory(graph);
  CostModel roomy(mixed(2, 2, 1e8));
  AlternationOptions options;
  Alternation free = alternate(theory, roomy, options);
  ASSERT_TRUE(free.feasible);
  Bytes needed = free.cost.memory.peak[0];
  Cluster tight = mixed(2, 2, 1e8);
  for (DeviceType& t : tight.types) t.memory = 0.7 * needed;
  CostModel model(tight);
  Alternation limited = alternate(theory, model, options);
  ASSERT_TRUE(limited.feasible) << limited.reason;
  for (size_t t = 0; t < 2; ++t) EXPECT_LE(limited.cost.memory.peak[t], tight.types[t].memory);
  EXPECT_GE(limited.cost.step, free.cost.step * (1 - 1e-9));

  for (DeviceType& t : tight.types) t.memory = 1000;
  CostModel tiny(tight);
  Alternation none = alternate(theory, tiny, options);
  EXPECT_FALSE(none.feasible);
  EXPECT_THAT(none.reason, HasSubstr("fast lacks"));
}

TEST(Alternation, SaysWhenARestrictionHasNoProgram) {
  // The batch of this graph is one sample: data parallelism cannot cut it.
  Graph graph = parse_graph(R"(%0 = motley::input("x") : f32[1,4]
%1 = motley::parameter("w") : f32[4,4]
%2 = aten::mm(%0, %1) : f32[1,4]
%3 = aten::sum(%2, none) : f32[]
loss %3
)",
                            "one");
  Theory theory(graph);
  CostModel model(mixed(1, 1));
  EXPECT_TRUE(alternate(theory, model, {}).feasible);
}

}  // namespace
}  // namespace motley::planner
