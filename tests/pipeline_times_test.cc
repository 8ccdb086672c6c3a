// Simulated times of pipeline plans against simulators and recurrences that know nothing of plans.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "cluster/part.h"
#include "grid/schedule.h"
#include "net/messages.h"
#include "pipeline/schedules.h"
#include "pipeline/simulate.h"
#include "pipeline_cases.h"
#include "random_pipeline.h"
#include "sim/pipeline.h"
#include "sim/simulate.h"

namespace motley {
namespace {

// A stage of the first replica, on one device: its phases, and what it and the next send each
// other.
struct ChainStage {
  PhaseSeconds seconds;
  Seconds down = 0, up = 0;
};
std::vector<ChainStage> chain_of(const Plan& plan) {
  const PipelinePlan& pipeline = *plan.pipeline;
  const ReplicaPlan& replica = pipeline.replicas[0];
  const net::Topology topology(plan.cluster);
  std::vector<ChainStage> chain;
  for (int s = 0; s < pipeline.stages(); ++s) {
    const StagePlan& stage = replica.stages[s];
    const CostModel model(part_of(plan.cluster, stage.devices));
    const Shares shares(stage.ratios);
    ChainStage& of = chain.emplace_back();
    of.seconds = phase_seconds(pipeline.theory(s), stage.program, model,
                               Fractions(model.cluster(), shares), plan.optimizer);
    std::vector<net::PairMessage> down, up;
    for (const Transfer& t : pipeline.parts().transfers) {
      const net::PairMessage m = {
          replica.stages[t.from].devices[0], replica.stages[t.to].devices[0],
          static_cast<Bytes>(plan.pipeline->part().graph.spec(t.value).bytes())};
      if (t.from == s && t.to == s + 1) down.push_back(m);
      if (t.from == s + 1 && t.to == s) up.push_back(m);
    }
    of.down = net::messages_time(topology, down);
    of.up = net::messages_time(topology, up);
  }
  return chain;
}

// The event simulator agrees with the recurrence of grid/schedule.h, which knows nothing of plans.
TEST(Pipeline, InterleavedTimesAreThoseOfTheGrid) {
  RandomPipeline what = {"gpt:layers=6,hidden=16,heads=4,seq=6,vocab=11", 2};
  what.plain = true, what.split = false;
  Rng rng(77);
  int compared = 0;
  for (int trial = 0; trial < 60; ++trial) {
    Plan plan = random_pipeline(what, &rng);
    PipelinePlan& pipeline = *plan.pipeline;
    ReplicaPlan& replica = pipeline.replicas[0];
    const int stages = pipeline.stages(), groups = stages / 2;
    bool chain = stages == 4;
    for (const Transfer& t : pipeline.parts().transfers)
      chain = chain && std::abs(t.from - t.to) == 1;
    if (!chain) continue;
    replica.micro_batches = groups * static_cast<int>(1 + rng.below(3));
    fit_batch(&plan);
    const auto counts = pipeline::interleaved_counts(groups, 2, replica.micro_batches);
    for (int s = 0; s < stages; ++s) {
      replica.stages[s].devices = replica.stages[s % groups].devices;
      replica.stages[s].warm_up = counts[s % groups];
    }
    ASSERT_TRUE(check(plan, false).empty()) << check(plan, false)[0];
    grid::Pipeline p;
    for (const ChainStage& stage : chain_of(plan)) {
      p.forward.push_back(stage.seconds.forward);
      p.backward.push_back(stage.seconds.backward);
      p.activation.push_back(stage.down);
      p.gradient.push_back(stage.up);
    }
    p.activation.pop_back();
    p.gradient.pop_back();
    const std::vector<Seconds> ends =
        grid::simulate_interleaved(p, groups, replica.micro_batches, grid::Runtime::motley);
    const Simulation simulation = simulate(plan, Spans::all);
    for (int g = 0; g < groups; ++g) {
      Seconds end = 0;
      for (const Span& span : simulation.spans)
        if (span.device == replica.stages[g].devices[0] && span.name.starts_with("backward"))
          end = std::max(end, span.end);
      EXPECT_NEAR(end, ends[g], 1e-9 * end);
    }
    ++compared;
  }
  EXPECT_GT(compared, 5);
}

// One device per stage and a chain of transfers: the event simulator is that of pipeline/.
TEST(Pipeline, SimulatedAsTheChainOfItsStages) {
  Rng rng(41);
  int split = 0;
  for (int trial = 0; trial < 12; ++trial) {
    RandomPipeline what = pipeline_cases()[3];
    what.plain = true;
    Plan plan = random_pipeline(what, &rng);
    auto skips = [&] {
      // The first stage would wait for what is computed from the whole batch before.
      const std::vector<Span> spans = simulate(plan, Spans::all).spans;
      if (plan.pipeline->stages() == 1 ||
          std::none_of(spans.begin(), spans.end(), [](const Span& x) { return x.begin == 0; }))
        return true;
      for (const Transfer& t : plan.pipeline->parts().transfers)
        if (std::abs(t.from - t.to) > 1 || !plan.pipeline->parts().tied.empty() ||
            (t.from > t.to &&
             plan.pipeline->part()
                     .graph.node(plan.pipeline->part().graph.value(t.value).producer)
                     .phase == Phase::forward))
          return true;
      // A stage of the loss alone has no gradient to hand back.
      for (int to = 0; to + 1 < plan.pipeline->stages(); ++to)
        if (std::none_of(plan.pipeline->parts().transfers.begin(),
                         plan.pipeline->parts().transfers.end(),
                         [&](const Transfer& t) { return t.backward && t.to == to; }))
          return true;
      return false;
    };
    while (skips()) plan = random_pipeline(what, &rng);
    const PipelinePlan& pipeline = *plan.pipeline;
    const ReplicaPlan& replica = pipeline.replicas[0];
    pipeline::Pipeline chain;
    std::vector<int> counts, behind;
    for (const ChainStage& stage : chain_of(plan)) {
      const auto s = static_cast<int>(chain.stages.size());
      counts.push_back(in_flight(replica, s));
      behind.push_back(replica.stages[s].weights_behind);
      split += has_later(replica.stages[s].program);
      chain.stages.push_back(
          {stage.seconds.forward, stage.seconds.backward, stage.seconds.weights});
      chain.epilogue.push_back(stage.seconds.reduction + stage.seconds.update);
      chain.links.push_back({stage.down, stage.up});
    }
    chain.links.pop_back();
    const auto timeline = pipeline::simulate(
        chain, pipeline::strict_schedule("", counts, replica.micro_batches, behind));
    const Simulation simulation = simulate(plan, Spans::all);
    EXPECT_NEAR(simulation.step, timeline.makespan, 1e-9 * timeline.makespan);
    for (int s = 0; s < pipeline.stages(); ++s)
      EXPECT_NEAR(simulation.devices[replica.stages[s].devices[0]].busy,
                  timeline.busy[s] + chain.epilogue[s], 1e-9 * timeline.makespan);
  }
  EXPECT_GT(split, 5);
}

// Steps by what was worked out once are those of simulations from the beginning.
TEST(Pipeline, StepsOfOtherCountsAreThoseOfSimulations) {
  Rng rng(43);
  std::set<Seconds> different;
  for (RandomPipeline what : pipeline_cases()) {
    for (int trial = 0; trial < 2; ++trial) {
      what.zero = trial == 1;
      Plan plan = random_pipeline(what, &rng);
      PipelineSteps steps(plan);
      for (int counts = 0; counts < 4; ++counts) {
        for (ReplicaPlan& replica : plan.pipeline->replicas) {
          int warm_up = 1;
          for (auto stage = replica.stages.rbegin(); stage != replica.stages.rend(); ++stage) {
            stage->warm_up = warm_up;
            warm_up = static_cast<int>(
                std::min<int64_t>(replica.micro_batches, warm_up + rng.between(0, 2)));
          }
        }
        const Seconds step = steps.step();
        EXPECT_EQ(step, simulate(plan).step);
        different.insert(step);
      }
    }
  }
  EXPECT_GT(different.size(), 2 * pipeline_cases().size());
}

}  // namespace
}  // namespace motley
