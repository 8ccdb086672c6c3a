#include "planner/engines.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "cluster/part.h"
#include "core/error.h"
#include "core/parallel.h"
#include "core/rng.h"
#include "planner/planner.h"
#include "sim/simulate.h"

namespace motley::planner {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

// Products and activations, and their gradients, for any number of samples.
Graph layers(int count, int64_t samples) {
  constexpr int kWidth = 256;
  std::string text = "model toy\n", results;
  int next = 0;
  const auto add = [&](const std::string& op, int64_t rows, int64_t columns, const char* phase) {
    text += fmt::format("%{} = {} : f32[{},{}]{}\n", next, op, rows, columns, phase);
    return next++;
  };
  std::vector<int> weight(count), in(count), out(count);
  for (int l = 0; l < count; ++l)
    weight[l] = add(fmt::format("motley::parameter(\"layer{}.w\")", l), kWidth, kWidth, "");
  int last = add("motley::input(\"x\")", samples, kWidth, "");
  for (int l = 0; l < count; ++l) {
    in[l] = last;
    const int product =
        add(fmt::format("aten::mm(%{}, %{})", last, weight[l]), samples, kWidth, "");
    last = out[l] = add(fmt::format("aten::tanh(%{})", product), samples, kWidth, "");
  }
  text += fmt::format("%{} = aten::sum(%{}, none) : f32[]\n", next, last);
  const int loss = next++;
  const char* back = " backward";
  int gradient =
      add(fmt::format("aten::full([{}, {}], 1.0, f32, none, none, none)", samples, kWidth), samples,
          kWidth, back);
  for (int l = count - 1; l >= 0; --l) {
    gradient =
        add(fmt::format("aten::tanh_backward(%{}, %{})", gradient, out[l]), samples, kWidth, back);
    const int turned = add(fmt::format("aten::t(%{})", in[l]), kWidth, samples, back);
    const int of_weight =
        add(fmt::format("aten::mm(%{}, %{})", turned, gradient), kWidth, kWidth, back);
    results += fmt::format("gradient \"layer{}.w\" %{}\n", l, of_weight);
    if (l == 0) continue;
    const int across = add(fmt::format("aten::t(%{})", weight[l]), kWidth, kWidth, back);
    gradient = add(fmt::format("aten::mm(%{}, %{})", gradient, across), samples, kWidth, back);
  }
  return parse_graph(fmt::format("{}loss %{}\n{}", text, loss, results), "toy");
}

// Two machines of two fast devices and two of two slow ones.
Cluster machines(Bytes memory) {
  return parse_cluster(fmt::format(R"(name: machines
device_types:
  - {{name: fast, flops: 4e12, memory: {0}, memory_bandwidth: 100e9, overhead: 1e-6}}
  - {{name: slow, flops: 1e12, memory: {0}, memory_bandwidth: 50e9, overhead: 1e-6}}
link: {{bandwidth: 1e9, latency: 1e-5}}
groups:
  - {{name: a, count: 2, link: {{bandwidth: 10e9, latency: 2e-6}}, devices: [{{type: fast, count: 2}}]}}
  - {{name: b, count: 2, link: {{bandwidth: 10e9, latency: 2e-6}}, devices: [{{type: slow, count: 2}}]}}
)",
                                   static_cast<int64_t>(memory)),
                       "machines");
}

// What is found does not depend on how many threads plan layers and stages, or whether engines
// search at the same time, with and without enough memory.
TEST(Engines, PlansDoNotDependOnThreads) {
  const auto graph_of = [](int64_t samples) { return layers(8, samples); };
  for (const Bytes memory : {16e9, 12e6, 9e6}) {
    const Cluster cluster = machines(memory);
    const auto all = [&](int threads) {
      PlanOptions request;
      request.model = "toy";
      request.batch = 64;
      request.threads = threads;
      std::vector<EngineResult> results(4);
      parallel_for(4, threads, [&](int e) {
        results[e] = e == 0   ? plan_pipeline(request, cluster, graph_of)
                     : e == 1 ? plan_grid(request, cluster, graph_of, {})
                     : e == 2 ? plan_virtual(request, cluster, graph_of, {})
                              : plan_one_program(request, cluster, graph_of, false);
      });
      return results;
    };
    const std::vector<EngineResult> one = all(1), more = all(4);
    for (size_t e = 0; e < one.size(); ++e) {
      EXPECT_FALSE(one[e].candidates.empty())
          << memory << " " << one[e].engine << ": " << one[e].reason;
      EXPECT_EQ(more[e].reason, one[e].reason);
      EXPECT_EQ(more[e].planned, one[e].planned);
      ASSERT_EQ(more[e].candidates.size(), one[e].candidates.size());
      for (size_t p = 0; p < one[e].candidates.size(); ++p) {
        EXPECT_EQ(more[e].candidates[p].note, one[e].candidates[p].note);
        EXPECT_EQ(to_json(*more[e].candidates[p].plan).dump(),
                  to_json(*one[e].candidates[p].plan).dump());
      }
    }
  }
}

// No step takes less than the machine takes to launch its calls, as planned and as simulated.
TEST(Engines, StepsWaitForLaunches) {
  Cluster cluster = machines(16e9);
  for (DeviceType& type : cluster.types)
    for (const char* op : {"aten::mm", "aten::relu", "aten::t"}) {
      OpRate rate{op};
      rate.flops = type.flops, rate.memory_bandwidth = type.memory_bandwidth, rate.launch = 1e-2;
      type.ops.push_back(rate);
    }
  PlanOptions request;
  request.model = "toy";
  request.batch = 64;
  const auto graph_of = [](int64_t samples) { return layers(8, samples); };
  int pipelines = 0;
  const PlanReport report = plan(graph_of, cluster, request);
  const EngineResult pipeline = plan_pipeline(request, cluster, graph_of);
  for (const auto* candidates : {&report.candidates, &pipeline.candidates})
    for (const Candidate& candidate : *candidates) {
      const Plan& plan = *candidate.plan;
      EXPECT_NEAR(simulate(plan).step, plan.predicted_step_s, 1e-9 * plan.predicted_step_s);
      if (!plan.pipeline) {
        const Shares shares(plan.ratios);
        const Seconds launches = launching(plan.running(), plan.program, CostModel(plan.cluster),
                                           Fractions(plan.cluster, shares), plan.optimizer)
                                     .launches;
        EXPECT_GT(launches, 8 * 1e-2);
        EXPECT_GE(plan.predicted_step_s, launches);
        continue;
      }
      ++pipelines;
      for (const ReplicaPlan& replica : plan.pipeline->replicas)
        for (size_t s = 0; s < replica.stages.size(); ++s) {
          const StagePlan& stage = replica.stages[s];
          const Cluster part = part_of(plan.cluster, stage.devices);
          const Shares shares(stage.ratios);
          const Seconds launches =
              launching(plan.pipeline->theory(static_cast<int>(s)), stage.program, CostModel(part),
                        Fractions(part, shares), 0, static_cast<int>(stage.program.steps.size()))
                  .launches;
          EXPECT_GT(launches, 0);
          EXPECT_GE(plan.predicted_step_s, replica.micro_batches * launches * (1 - 1e-9));
        }
    }
  EXPECT_GT(pipelines, 0);
}

// Sizes of micro-batches are tried by what those before them took: on devices of one type that
// misses no better one.
TEST(Engines, TryTheMicroBatchesThatMatter) {
  Rng rng(7);
  for (int trial = 0; trial < 6; ++trial) {
    const auto depth = static_cast<int>(4 + rng.below(8));
    const auto graph_of = [depth](int64_t samples) { return layers(depth, samples); };
    const double memory = trial % 2 == 0 ? 16e9 : 40e6 + 200e6 * rng.uniform();
    const Cluster cluster = parse_cluster(fmt::format(R"(name: alike
device_types:
  - {{name: fast, flops: 4e12, memory: {}, memory_bandwidth: 100e9, overhead: 1e-6}}
link: {{bandwidth: 1e9, latency: 1e-5}}
groups:
  - {{name: a, count: 4, link: {{bandwidth: 10e9, latency: 2e-6}}, devices: [{{type: fast, count: 2}}]}}
)",
                                                      static_cast<int64_t>(memory)),
                                          "alike");
    PlanOptions request;
    request.model = "toy";
    request.batch = int64_t{16384} << rng.below(4);
    const auto best = [&](const std::vector<int64_t>& sizes) {
      request.micro_batches = sizes;
      const EngineResult found = plan_pipeline(request, cluster, graph_of);
      return found.candidates.empty() ? std::numeric_limits<double>::infinity()
                                      : found.candidates[0].plan->predicted_step_s;
    };
    Seconds each = std::numeric_limits<double>::infinity();
    for (int64_t count = 1; count <= 128 && request.batch % count == 0; count *= 2)
      each = std::min(each, best({request.batch / count}));
    EXPECT_LE(best({}), 1.02 * each) << depth << " layers, batch " << request.batch;
  }
}

// At whatever moment time is up: no plan, and that time ran out, or sound ones; with time enough,
// what is found without a limit.
TEST(Engines, EndInTime) {
  const auto graph_of = [](int64_t samples) { return layers(6, samples); };
  int found = 0, nothing = 0;
  for (const Bytes memory : {16e9, 4e6}) {
    const Cluster cluster = machines(memory);
    const auto plan_with = [&](int engine, const Deadline& deadline) {
      PlanOptions request;
      request.model = "toy";
      request.batch = 32;
      request.limits.deadline = deadline;
      return engine == 0   ? plan_pipeline(request, cluster, graph_of)
             : engine == 1 ? plan_grid(request, cluster, graph_of, {})
                           : plan_virtual(request, cluster, graph_of, {});
    };
    for (int engine = 0; engine < 3; ++engine) {
      const EngineResult unlimited = plan_with(engine, {}),
                         enough = plan_with(engine, Deadline::in(1e6));
      ASSERT_EQ(enough.candidates.size(), unlimited.candidates.size());
      for (size_t p = 0; p < enough.candidates.size(); ++p)
        EXPECT_EQ(to_json(*enough.candidates[p].plan).dump(),
                  to_json(*unlimited.candidates[p].plan).dump());
      for (double seconds = 1e-4; seconds < 2 * unlimited.search_s; seconds *= 3) {
        const EngineResult result = plan_with(engine, Deadline::in(seconds));
        for (const Candidate& c : result.candidates) EXPECT_TRUE(check(*c.plan).empty());
        ++(result.candidates.empty() ? nothing : found);
        if (result.candidates.empty()) {
          EXPECT_NE(result.reason, "") << result.engine;
        }
      }
      const EngineResult late = plan_with(engine, Deadline::in(-1));
      EXPECT_TRUE(late.candidates.empty());
      EXPECT_NE(late.reason.find("time ran out"), std::string::npos) << late.engine << late.reason;
    }
  }
  EXPECT_GT(found, 0);
  EXPECT_GT(nothing, 0);
}

// Where time runs out while one part is searched after two, parts and program belong together.
TEST(Engines, EndInTimeBetweenParts) {
  const auto graph_of = [](int64_t samples) { return layers(5, samples); };
  const Cluster cluster = machines(16e9);
  int two = 0, one = 0;
  for (double work = 1; work < 1e7; work *= 1.25) {
    PlanOptions request;
    request.model = "toy";
    request.batch = 32;
    request.engine = "duplex";
    request.threads = 1;
    request.limits.deadline = Deadline(Deadline::Limits{.work = static_cast<int64_t>(work)});
    for (const Candidate& c : plan(graph_of, cluster, request).candidates) {
      ASSERT_NE(c.plan->duplex, nullptr);
      EXPECT_THAT(check(*c.plan), IsEmpty());
      EXPECT_NEAR(simulate(*c.plan).step, c.simulated_s, 1e-9 * c.simulated_s);
      ++(c.plan->duplex->parts() == 2 ? two : one);
    }
  }
  EXPECT_GT(two, 0);
}

// The first program is not searched for so long that no time is left to take it in parts.
TEST(Engines, FindAProgramInPartsEarly) {
  const auto graph_of = [](int64_t samples) { return layers(12, samples); };
  const Cluster cluster = machines(16e9);
  const auto least_work = [&](const char* engine, int duplex) {
    for (double work = 1; work < 1e8; work *= 1.25) {
      PlanOptions request;
      request.model = "toy";
      request.batch = 32;
      request.engine = engine;
      request.duplex = duplex;
      request.threads = 1;
      request.limits.deadline = Deadline(Deadline::Limits{.work = static_cast<int64_t>(work)});
      const PlanReport report = plan(graph_of, cluster, request);
      if (!report.candidates.empty()) return work;
      EXPECT_TRUE(report.out_of_time) << report.reason;
    }
    return std::numeric_limits<double>::infinity();
  };
  EXPECT_LE(least_work("duplex", 2), 1.2 * least_work("spmd", -1));
}

// However much work there may be: the same twice, no plan and that time ran out, or sound ones;
// with enough, what is found without a limit.
TEST(Planner, EndsAfterSoMuchWork) {
  const auto graph_of = [](int64_t samples) { return layers(6, samples); };
  const Cluster cluster = machines(4e6);
  const auto plan_with = [&](int64_t work) {
    PlanOptions request;
    request.model = "toy";
    request.batch = 32;
    request.threads = 1;
    request.limits.deadline = Deadline(Deadline::Limits{.work = work});
    return plan(graph_of, cluster, request);
  };
  const PlanReport all = plan_with(std::numeric_limits<int64_t>::max() - 1);
  ASSERT_FALSE(all.candidates.empty());
  EXPECT_FALSE(all.out_of_time);
  int found = 0, nothing = 0;
  for (int64_t work = 1; work < 10'000'000; work *= 7) {
    const PlanReport one = plan_with(work), other = plan_with(work);
    ASSERT_EQ(one.candidates.size(), other.candidates.size());
    for (size_t c = 0; c < one.candidates.size(); ++c) {
      EXPECT_TRUE(check(*one.candidates[c].plan).empty());
      EXPECT_EQ(to_json(*one.candidates[c].plan).dump(), to_json(*other.candidates[c].plan).dump());
      EXPECT_GE(one.candidates[c].simulated_s, one.candidates[c].plan->lower_bound_s * (1 - 1e-9));
    }
    ++(one.candidates.empty() ? nothing : found);
    if (one.candidates.empty()) {
      EXPECT_TRUE(one.out_of_time);
    }
  }
  EXPECT_GT(found, 0);
  EXPECT_GT(nothing, 0);
  const PlanReport enough = plan_with(1'000'000'000);
  EXPECT_FALSE(enough.out_of_time);
  EXPECT_EQ(to_json(*enough.best().plan).dump(), to_json(*all.best().plan).dump());
}

// Interrupted as soon as there is a plan: there is one.
TEST(Planner, IsInterrupted) {
  std::atomic<bool> interrupted = false;
  PlanOptions request;
  request.model = "toy";
  request.batch = 32;
  request.limits.deadline = Deadline(Deadline::Limits{.interrupted = &interrupted});
  request.record = std::make_shared<Record>([&](const Progress& now) {
    EXPECT_FALSE(now.trying.empty());
    interrupted = std::isfinite(now.best);
  });
  const PlanReport report =
      plan([](int64_t samples) { return layers(6, samples); }, machines(16e9), request);
  ASSERT_FALSE(report.candidates.empty());
  EXPECT_TRUE(report.out_of_time);
  EXPECT_TRUE(check(*report.best().plan).empty());
  EXPECT_LE(request.record->first_s(), request.record->now().seconds);
  EXPECT_LE(report.best().plan->predicted_step_s, request.record->now().best * (1 + 1e-9));
}

const StrategyTime& of(const EngineResult& result, const std::string& name) {
  for (const StrategyTime& b : result.baselines)
    if (b.name == name) return b;
  ADD_FAILURE() << "no " << name;
  return result.baselines.at(0);
}

// The knobs of opponents: in less than one pass takes they add up gradients of micro-batches;
// the fastest devices alone are slower here; less memory never makes them faster; and the best of
// them is a sound plan.
TEST(Opponents, TurnTheirKnobs) {
  const auto graph_of = [](int64_t samples) { return layers(8, samples); };
  PlanOptions options;
  options.model = "toy";
  options.batch = 4096;
  const EngineResult ample = plan_opponents(options, machines(16e9), graph_of);
  ASSERT_EQ(ample.baselines.size(), 8u);
  for (const StrategyTime& b : ample.baselines) EXPECT_TRUE(b.feasible) << b.name << b.reason;
  EXPECT_THAT(of(ample, "ddp").knobs, HasSubstr("1 micro-batch of 4096"));
  EXPECT_LT(of(ample, "ddp-by-speed").predicted_step_s, of(ample, "ddp").predicted_step_s);
  ASSERT_EQ(ample.candidates.size(), 1u);
  // The best is the one that is fastest on motley's runtime.
  for (const StrategyTime& b : ample.baselines) {
    EXPECT_GE(b.on_motley_s, (1 - 1e-9) * ample.candidates[0].plan->predicted_step_s) << b.name;
    EXPECT_GE(b.on_motley_s, (1 - 1e-9) * b.predicted_step_s) << b.name;
    if (b.name.starts_with("fsdp")) continue;
    EXPECT_GE(b.predicted_step_s, (1 - 1e-9) * ample.candidates[0].plan->predicted_step_s)
        << b.name;
  }
  EXPECT_THAT(motley::check(*ample.candidates[0].plan), IsEmpty());

  // What DDP by speed holds does not fit.
  const auto ddp = std::find_if(ample.others.begin(), ample.others.end(), [](const Candidate& c) {
    return c.plan->engine == "ddp-by-speed";
  });
  ASSERT_NE(ddp, ample.others.end());
  const std::vector<Bytes>& peaks = ddp->plan->peak_memory_bytes;
  const Bytes most = *std::max_element(peaks.begin(), peaks.end());
  const EngineResult tight = plan_opponents(options, machines(0.7 * most), graph_of);
  EXPECT_TRUE(of(tight, "ddp").feasible) << of(tight, "ddp").reason;
  EXPECT_THAT(of(tight, "ddp").knobs, Not(HasSubstr("1 micro-batch of")));
  for (const StrategyTime& b : tight.baselines) {
    if (!b.feasible) continue;
    EXPECT_GE(b.predicted_step_s, (1 - 1e-9) * of(ample, b.name).predicted_step_s) << b.name;
  }
  for (const Candidate& c : tight.candidates) EXPECT_THAT(motley::check(*c.plan), IsEmpty());
  // No knob makes the parameters fit.
  const EngineResult none = plan_opponents(options, machines(1e6), graph_of);
  EXPECT_TRUE(none.candidates.empty());
  EXPECT_THAT(of(none, "ddp").reason, HasSubstr("lacks"));
}

// What plan() returns is no slower than any of them.
TEST(Opponents, AreNoFasterThanThePlan) {
  const auto graph_of = [](int64_t samples) { return layers(6, samples); };
  for (const Bytes memory : {16e9, 20e6}) {
    PlanOptions options;
    options.model = "toy";
    options.batch = 512;
    const PlanReport report = plan(graph_of, machines(memory), options);
    const EngineResult* opponents = report.of("opponents");
    ASSERT_NE(opponents, nullptr);
    for (const StrategyTime& b : opponents->baselines) {
      if (!b.feasible) continue;
      EXPECT_LE(report.best().simulated_s, b.predicted_step_s * (1 + 1e-9)) << b.name;
      EXPECT_LE(report.best().simulated_s, b.on_motley_s * (1 + 1e-9)) << b.name;
    }
  }
}

// ---- what the devices talk over ---------------------------------------------------------------

Cluster over(const std::string& backend, Bytes memory = 16e9) {
  Cluster cluster = machines(memory);
  cluster.groups[0].backend = backend_named(backend);
  return cluster;
}

// Seconds that one device communicates in data parallelism on it.
Seconds sent_in(const Cluster& cluster, DType precision, Seconds* hidden = nullptr,
                int64_t batch = 512) {
  PlanOptions options;
  options.model = "toy";
  options.batch = batch;
  options.engine = "spmd";
  options.strategy = "dp-ev";
  options.precision = precision;
  const PlanReport report =
      plan([](int64_t samples) { return layers(6, samples); }, cluster, options);
  const Simulation simulation = simulate(*report.best().plan);
  if (hidden) *hidden = simulation.devices[0].comm - simulation.devices[0].exposed_comm;
  return simulation.devices[0].comm;
}

// Gradients of bf16 have half the bytes, and gloo adds them as f32.
TEST(Backends, SumsOfSixteenBitsArePricedAsTheyTravel) {
  const Seconds fixed = 1e-3;  // latencies, about
  for (const char* backend : {"nccl", "gloo", ""})
    EXPECT_EQ(sent_in(over(backend), DType::f32), sent_in(over(""), DType::f32));
  const Seconds f32 = sent_in(over("gloo"), DType::f32);
  // Of half the bytes more are small, and join others.
  EXPECT_LE(sent_in(over("gloo"), DType::bf16), f32);
  EXPECT_GT(sent_in(over("gloo"), DType::bf16), 0.8 * f32);
  EXPECT_LT(sent_in(over("nccl"), DType::bf16), 0.55 * f32 + fixed);
  EXPECT_LT(sent_in(over("nccl"), DType::bf16), 0.9 * f32);
  EXPECT_EQ(sent_in(over("unheard-of"), DType::bf16), sent_in(over("gloo"), DType::bf16));
}

TEST(Backends, NothingIsHiddenOverOneThatHidesNothing) {
  Seconds hidden = 0;
  sent_in(over("gloo"), DType::f32, &hidden, 1 << 16);
  EXPECT_GT(hidden, 0);
  Cluster cluster = over("gloo");
  cluster.groups[0].backend.hides = false;
  sent_in(cluster, DType::f32, &hidden, 1 << 16);
  EXPECT_NEAR(hidden, 0, 1e-12);
  PlanOptions options;
  options.model = "toy";
  options.batch = 512;
  options.duplex = 2;
  EXPECT_THROW(plan([](int64_t samples) { return layers(6, samples); }, cluster, options),
               UserError);
}

TEST(Backends, WithoutMessagesPlansAreOfOneProgram) {
  const auto graph_of = [](int64_t samples) { return layers(6, samples); };
  PlanOptions options;
  options.model = "toy";
  options.batch = 512;
  // Where memory is short, too: gradients added up over micro-batches go from worker to worker.
  for (const Bytes memory : {16e9, 8e6})
    for (const char* backend : {"unheard-of", "ucc"}) {
      const Cluster cluster = over(backend, memory);
      const PlanReport report = plan(graph_of, cluster, options);
      if (memory > 1e9) {
        EXPECT_FALSE(report.candidates.empty()) << report.reason;
      }
      for (const Candidate& c : report.candidates) {
        EXPECT_FALSE(c.plan->pipeline) << c.note;
        EXPECT_TRUE(c.plan->reductions.empty()) << c.note;
        EXPECT_THAT(motley::check(*c.plan), IsEmpty());
      }
    }
  for (const char* engine : {"pipeline", "grid", "virtual", "opponents"}) {
    options.engine = engine;
    try {
      plan(graph_of, over("unheard-of"), options);
      ADD_FAILURE() << engine;
    } catch (const UserError& e) {
      EXPECT_THAT(e.what(), HasSubstr("has no messages between two workers"));
    }
  }
  // The checker says it of a plan that was made for another.
  options.engine = "pipeline";
  const PlanReport report = plan(graph_of, over("nccl"), options);
  ASSERT_FALSE(report.candidates.empty()) << report.reason;
  Plan& plan = *report.candidates[0].plan;
  ASSERT_TRUE(plan.pipeline);
  plan.cluster.groups[0].backend = backend_named("unheard-of");
  EXPECT_THAT(motley::check(plan), testing::Contains(HasSubstr("the backend unheard-of")));
}

}  // namespace
}  // namespace motley::planner
