// What is hidden where computation is slower beside messages, against a walk through the step that
// keeps every interval in which the network is busy.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>

#include "cluster/part.h"
#include "core/rng.h"
#include "cost/overlap.h"
#include "reference/sample.h"
#include "reference/spmd_graphs.h"
#include "solver/folded.h"
#include "solver/order.h"
#include "spmd/build.h"

namespace motley::spmd {
namespace {

using Interval = std::pair<Seconds, Seconds>;

// When work that begins then is done: found by halving, of how much is done by a moment.
Seconds done(const std::vector<Interval>& busy, Seconds begin, Seconds work, double slowdown) {
  const auto by = [&](Seconds moment) {
    Seconds beside = 0;
    for (const auto& [from, to] : busy)
      beside += std::max(0.0, std::min(to, moment) - std::max(from, begin));
    return (moment - begin - beside) + beside / (1 + slowdown);
  };
  Seconds low = begin, high = begin + work * (1 + slowdown);
  for (int i = 0; i < 200; ++i) (by((low + high) / 2) < work ? low : high) = (low + high) / 2;
  return high;
}

// What is hidden of messages that start behind step `barrier`, the last other collective (-1: there
// is none), until the first is waited for, at step `wait`. REQUIRES: one device type; all start in
// front of the wait, and no other collective runs behind it.
Seconds hidden_by_walking(const Theory& theory, const Program& program, const CostModel& model,
                          const Fractions& fractions, int barrier, int wait) {
  const auto messages = gradient_messages(theory, program, fractions.shares());
  std::vector<Interval> busy;
  Seconds now = 0, plain = 0, charged = 0;
  size_t next = 0;
  const auto send = [&](int made) {
    for (; next < messages.size() && messages[next].ready <= made; ++next) {
      Bytes bytes = 0;
      for (int g : messages[next].steps)
        bytes += static_cast<Bytes>(theory.graph().spec(program.steps[g].value).bytes());
      const Seconds begin = std::max(now, busy.empty() ? 0 : busy.back().second);
      busy.emplace_back(begin, begin + model.net().all_reduce(bytes));
    }
  };
  send(barrier);
  for (int s = barrier + 1; s < wait; ++s) {
    const Step& step = program.steps[s];
    if (step.is_compute()) {
      const Work work = work_of(theory, step.node, theory.triples(step.node)[step.triple]);
      if (!work.free) {
        const Seconds seconds = model.compute(0, work, fractions.by_type(work.cut)[0]);
        now = done(busy, now, seconds, model.cluster().types[0].interference);
        plain += seconds;
      }
    }
    send(s);
  }
  GradientRun run(program.sizes);
  for (size_t s = wait; s < program.steps.size(); ++s) {
    const Step& step = program.steps[s];
    if (step.is_compute()) {
      if (!work_of(theory, step.node, theory.triples(step.node)[step.triple]).free) run.end();
    } else if (step.kind == Collective::all_reduce) {
      const TensorSpec& spec = theory.graph().spec(step.value);
      charged += model.gradient_all_reduce(spec, &run) - model.copying_seconds(spec, program.sizes);
    }
  }
  return charged - (std::max(now, busy.back().second) - plain);
}

TEST(Interference, WhatIsHiddenIsThatOfTheWalk) {
  int slower = 0;
  Rng rng(3);
  for (const char* name : kGraphs) {
    const Graph graph = load(name);
    const Theory theory(graph);
    for (int trial = 0; trial < 150; ++trial) {
      const BytesPerSecond bandwidth = std::pow(10, 7 + 4 * rng.uniform());
      const auto model_with = [&](double interference) {
        DeviceType type = device("d", 1e10);
        type.interference = interference;
        return std::make_unique<CostModel>(
            flat_cluster({type}, {3}, {LinkKind::switched, bandwidth, 1e-6}));
      };
      const double much = trial % 4 == 0 ? 0 : 2 * rng.uniform();
      const auto model = model_with(much), plain = model_with(0);
      const Shares shares({1. / 3, 1. / 3, 1. / 3});
      const Fractions fractions(model->cluster(), shares);
      ProblemBuilder builder(theory, *plain, Optimizer::adamw, Restriction::data_parallel);
      builder.price(fractions);
      Program program = builder.program(solver::solve_folded(
          builder.problem(), solver::make_order(builder.problem()), {{1}, {}}));
      if (trial % 3 > 0)
        program.sizes = {std::pow(10, 1 + 5 * rng.uniform()), std::pow(10, 2 + 5 * rng.uniform())};
      const auto messages = gradient_messages(theory, program, shares);
      if (messages.empty()) continue;
      const std::vector<bool> barrier = barriers(theory, program, shares);
      int wait = static_cast<int>(program.steps.size());
      for (const GradientMessage& m : messages) wait = std::min(wait, m.steps[0]);
      const auto first = barrier.begin(), waits = first + wait;
      const auto last = std::find(std::make_reverse_iterator(waits), barrier.rend(), true);
      const bool behind = std::find(waits, barrier.end(), true) != barrier.end();
      if (behind || messages.back().ready >= wait) continue;
      const Seconds hidden = hidden_seconds(theory, program, *model, fractions),
                    without = hidden_seconds(theory, program, *plain, fractions);
      EXPECT_NEAR(hidden,
                  hidden_by_walking(theory, program, *model, fractions,
                                    static_cast<int>(last.base() - first) - 1, wait),
                  1e-9)
          << name;
      EXPECT_LE(hidden, without * (1 + 1e-12)) << name;
      slower += hidden < without;
    }
  }
  EXPECT_GT(slower, 20);
}

}  // namespace
}  // namespace motley::spmd
