#include "solver/order.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "core/rng.h"
#include "reference/brute_force.h"
#include "reference/spmd_gpt.h"

namespace motley::solver {
namespace {

bool same(const Order& a, const Order& b) {
  const auto step = [](const OrderStep& x, const OrderStep& y) {
    return x.node == y.node && x.kind == y.kind && x.touch_begin == y.touch_begin &&
           x.touch_end == y.touch_end;
  };
  const auto touch = [](const Touch& x, const Touch& y) {
    return x.value == y.value && x.before == y.before && x.after == y.after && x.need == y.need &&
           x.since == y.since;
  };
  const auto repeat = [](const Repeat& x, const Repeat& y) {
    return x.begin == y.begin && x.period == y.period && x.count == y.count;
  };
  const auto equal = [](const auto& x, const auto& y, const auto& by) {
    return std::equal(x.begin(), x.end(), y.begin(), y.end(), by);
  };
  return equal(a.steps, b.steps, step) && equal(a.touches, b.touches, touch) &&
         equal(a.repeats, b.repeats, repeat) && a.made == b.made && a.kinds == b.kinds;
}

TEST(OrderMemo, GivesTheOrderOfTheProblem) {
  OrderMemo memo;
  // Every problem again with other costs, among many others.
  for (int round = 0; round < 2; ++round)
    for (uint64_t seed = 0; seed < 200; ++seed) {
      Problem problem = random_problem(seed, {12, 2, 5, 4});
      for (FormTable& table : problem.form_tables)
        for (double& seconds : table.convert) seconds *= 1 + 2 * round;
      EXPECT_TRUE(same(memo.of(problem), make_order(problem))) << seed;
      EXPECT_EQ(&memo.of(problem), &memo.of(problem));
    }
  // A node of the backward pass is another matter, although all else is equal.
  Problem problem = random_problem(1, {12, 2, 5, 4});
  const Order* before = &memo.of(problem);
  problem.nodes.back().backward = !problem.nodes.back().backward;
  EXPECT_NE(before, &memo.of(problem));
}

// Changes little of a problem: an option goes, or a node reads another value or belongs to another
// pass.
void change(Rng* rng, Problem* problem) {
  const auto any = [&](const auto& list) { return rng->below(static_cast<int64_t>(list.size())); };
  if (rng->chance(0.5)) {
    OptionTable& table = problem->option_tables[any(problem->option_tables)];
    if (table.options.size() > 1) table.options.erase(table.options.begin() + any(table.options));
    return;
  }
  const int64_t at = any(problem->nodes);
  ProblemNode& node = problem->nodes[at];
  if (node.inputs.empty() || rng->chance(0.2)) {
    node.backward = !node.backward;
    return;
  }
  int& input = node.inputs[any(node.inputs)];
  std::vector<int> others;
  for (int64_t n = 0; n < at; ++n)
    for (int value : problem->nodes[n].outputs)
      if (problem->value_table[value] == problem->value_table[input]) others.push_back(value);
  if (!others.empty()) input = others[any(others)];
}

// Orders with the stretches of many other problems at hand, most of which differ in little, equal
// those that are worked out anew: what a stretch is known by is all that its sequence depends on.
TEST(StretchMemo, GivesWhatIsWorkedOutAnew) {
  OrderOptions options;
  options.restarts = 30;
  StretchMemo memo;
  int problems = 0;
  const auto check = [&](const Problem& problem, const std::string& name) {
    ++problems;
    EXPECT_TRUE(same(make_order(problem, options, &memo), make_order(problem, options))) << name;
  };
  for (uint64_t seed = 0; seed < 150; ++seed) {
    Rng rng(seed);
    const Problem base = random_problem(seed % 50, {static_cast<int>(rng.between(4, 30)), 2, 5, 4});
    check(base, "random problem " + std::to_string(seed));
    for (int variant = 0; variant < 8; ++variant) {
      Problem problem = base;
      for (int64_t changes = rng.between(1, 3); changes > 0; --changes) change(&rng, &problem);
      check(problem, "random problem " + std::to_string(seed) + ", variant");
    }
  }
  for (int layers = 1; layers <= 6; ++layers)
    for (bool tied : {false, true}) {
      GptShape shape;
      shape.layers = layers;
      shape.tied = tied;
      const Problem base = gpt_problem(shape);
      check(base, std::to_string(layers) + " layers");
      for (uint64_t seed = 0; seed < 60; ++seed) {
        Rng rng(seed);
        Problem problem = base;
        change(&rng, &problem);
        check(problem, std::to_string(layers) + " layers, changed by " + std::to_string(seed));
      }
    }
  EXPECT_GT(memo.reused(), problems / 4);
}

}  // namespace
}  // namespace motley::solver
