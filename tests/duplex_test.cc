// Steps in parts, from the batch to a run: the same as one device, whatever the program, its stages,
// the parts and the shares.
#include "shard/duplex.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdlib>

#include "core/error.h"
#include "core/file.h"
#include "planner/planner.h"
#include "reference/sample.h"
#include "runtime/verify.h"
#include "shard/joined.h"
#include "sim/simulate.h"
#include "solver/folded.h"
#include "solver/order.h"
#include "spmd/recompute.h"
#include "two_speeds.h"

namespace motley {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

// A random program of one part with random ratios, divided into random stages.
Plan random_plan(const std::string& model, int64_t batch, int parts, Rng* rng) {
  Plan plan;
  plan.engine = "duplex";
  plan.model = model;
  plan.batch = batch;
  plan.cluster = cluster_of(1, 2, 1e9);
  plan.set_graph(captured(model, batch));
  plan.duplex = duplex_of(*plan.theory, even_parts(batch, parts), "test");
  const Theory part(plan.duplex->first->graph);
  plan.ratios = {{0.2 + rng->uniform(), rng->uniform(), rng->uniform()}};
  const double sum = plan.ratios[0][0] + plan.ratios[0][1] + plan.ratios[0][2];
  for (double& r : plan.ratios[0]) r /= sum;
  const CostModel cost(plan.cluster);
  spmd::ProblemBuilder builder(part, cost, plan.optimizer);
  builder.price(Fractions(plan.cluster, Shares(plan.ratios)));
  const Program program = spmd::random_program(builder, rng);
  StageDivision division;
  division.begin = {0};
  const int steps = static_cast<int>(program.steps.size());
  const double dense = rng->uniform() * rng->uniform();
  for (int i = 1; i < steps; ++i)
    if (rng->chance(dense)) division.begin.push_back(i);
  division.reduce = static_cast<Reduce>(rng->below(3));
  division.ahead = static_cast<int>(rng->below(4));
  for (size_t s = 0; s < division.begin.size() * static_cast<size_t>(parts); ++s)
    division.slack.push_back(1e4 * rng->uniform());
  if (rng->chance(0.7))
    for (size_t s = 0; s < division.begin.size(); ++s) division.whole.push_back(rng->chance(0.5));
  for (int i = 0; i < steps; ++i)
    if (rng->chance(dense)) division.reduce_at.push_back(i);
  plan.program = mirrored(*plan.duplex, part, program, division, "test");
  return plan;
}

const char* const kModels[] = {
    "bert:layers=1,hidden=16,heads=2,seq=6,vocab=24,dropout=0.2",
    "bert-moe:layers=1,hidden=16,heads=2,seq=6,vocab=24,experts=4,every=1",
    "gpt:layers=1,hidden=16,heads=2,seq=8,vocab=24",
    "llama:layers=1,hidden=16,heads=4,kv_heads=2,ffn=24,seq=6,vocab=24",
    "mlp:layers=2,hidden=16,in=12,classes=5",
    "moe:layers=1,hidden=16,heads=4,kv_heads=2,ffn=24,experts=4,seq=6,vocab=24",
    "transgan:layers=1,hidden=64,heads=1,side=4,latent=16",
    "vgg19:width=2,image=32",
    "vit:layers=1,hidden=16,heads=2,image=16,patch=8,classes=5",
    "vit-moe:layers=1,hidden=16,heads=2,image=16,patch=8,classes=5,experts=4,every=1"};

TEST(Duplex, RandomProgramsInPartsAreOneDevice) {
  Rng rng(25);
  int calls = 0, sums = 0, in_place = 0;  // of all parts at once
  for (const char* model : kModels)
    for (const auto& [batch, parts] : {std::pair(8, 2), {7, 2}, {11, 3}, {6, 1}}) {
      SCOPED_TRACE(fmt::format("{}, {} samples in {} parts", model, batch, parts));
      const Plan made = random_plan(model, batch, parts, &rng);
      const std::string text = to_json(made).dump();
      const Plan plan = parse_plan(text, "made.json");
      EXPECT_EQ(to_json(plan).dump(), text);
      ASSERT_THAT(check(plan, false), IsEmpty());
      for (const JoinedCall& call : joined_calls(plan.running(), plan.program)) {
        ++calls;
        sums += call.sums();
        in_place += call.own != std::vector<bool>(call.own.size()) &&
                    call.copied == std::vector<bool>(call.copied.size());
      }
      const Verification v = verify_plan(plan, DType::f64, static_cast<uint64_t>(batch));
      EXPECT_TRUE(v.equivalent) << v.gradient_error << " of " << v.worst_parameter << ", loss "
                                << v.loss_error;
      const Simulation sim = simulate(plan);
      double most = 0;
      for (const DeviceTime& d : sim.devices) {
        EXPECT_NEAR(d.busy + d.exposed_comm + d.idle, sim.step, 1e-9 * sim.step);
        EXPECT_LE(d.exposed_comm, d.comm * (1 + 1e-9));
        most = std::max({most, d.busy, d.comm});
      }
      EXPECT_GE(sim.step, most * (1 - 1e-9));  // no program is faster than either
    }
  EXPECT_GT(calls, 500);
  EXPECT_GT(sums, 50);
  EXPECT_GT(in_place, 100);
}

// Every step that says joined wrongly is found: no other steps may run together.
TEST(Duplex, CheckerFindsWrongJoinedSteps) {
  Rng rng(27);
  int refused = 0;
  for (const char* model : {kModels[1], kModels[2], kModels[8]})
    for (int trial = 0; trial < 8; ++trial) {
      Plan plan = random_plan(model, 8, 2, &rng);
      ASSERT_THAT(check(plan, false), IsEmpty());
      for (int change = 0; change < 10; ++change) {
        Steps& changed = plan.program.steps;
        const Steps before = changed;
        const size_t at = rng.below(before.size());
        changed.change([&](std::vector<Step>& steps) { steps[at].joined = !steps[at].joined; });
        if (const std::vector<std::string> problems = check(plan, false); problems.empty()) {
          // Steps that may as well run one by one, or together.
          EXPECT_TRUE(verify_plan(plan, DType::f64, 1).equivalent);
        } else {
          EXPECT_THAT(problems[0], HasSubstr("says joined"));
          ++refused;
        }
        changed = before;
      }
    }
  EXPECT_GT(refused, 150);
}

// A plan of three devices with unequal shares, without a program.
Plan uneven_plan(const std::string& model, int64_t batch) {
  Plan plan;
  plan.engine = "duplex";
  plan.model = model;
  plan.batch = batch;
  plan.cluster = cluster_of(1, 2, 1e9);
  plan.ratios = {{0.5, 0.3, 0.2}};
  plan.set_graph(captured(model, batch));
  return plan;
}

// Runs the program of one part for all parts of the plan, in random stages, what is gathered so many
// of them ahead.
void expect_equal_in_stages(const Theory& part, const Program& program, int ahead, Plan* plan,
                            Rng* rng) {
  const Program ordered = pieces_first(part, program);
  StageDivision division{{0}, static_cast<Reduce>(rng->below(3)), ahead, {}};
  for (int i = 1; i < static_cast<int>(ordered.steps.size()); ++i)
    if (rng->chance(0.1)) division.begin.push_back(i);
  division.slack.assign(division.begin.size() * static_cast<size_t>(plan->duplex->parts()), 1e4);
  plan->program = mirrored(*plan->duplex, part, ordered, division, "test");
  ASSERT_THAT(check(*plan, false), IsEmpty());
  const Verification v = verify_plan(*plan, DType::f64, 1);
  EXPECT_TRUE(v.equivalent) << v.gradient_error << " of " << v.worst_parameter;
}

// Parameters gathered again in the backward pass, ahead of their use, and layers computed again.
TEST(Duplex, WhatIsMadeAgainTravelsDuringTheBackwardPass) {
  Rng rng(26);
  int gathered = 0, computed = 0;
  for (const char* model : kModels) {
    Plan plan = uneven_plan(model, 6);
    const CostModel cost(plan.cluster);
    for (const int parts : {1, 2}) {
      plan.duplex = duplex_of(*plan.theory, even_parts(plan.batch, parts), "test");
      const Theory part(plan.duplex->first->graph);
      spmd::ProblemBuilder builder(part, cost, plan.optimizer, spmd::Restriction::zero);
      builder.price(Fractions(plan.cluster, Shares(plan.ratios)));
      const Program cut = builder.program(solver::solve_folded(
          builder.problem(), solver::make_order(builder.problem()), {{0.5, 0.5}, {}}));
      const std::vector<int> blocks = spmd::blocks_of(part.graph());
      for (const bool whole_blocks : {false, true}) {
        Program program = spmd::gathered_again(part, cut);
        if (whole_blocks) program = spmd::recompute(part, cut, blocks, std::vector<bool>(8, true));
        (whole_blocks ? computed : gathered) += program.steps.size() > cut.steps.size();
        EXPECT_EQ(spmd::once(program).steps, cut.steps);
        for (int trial = 0; trial < 4; ++trial) {
          SCOPED_TRACE(fmt::format("{}, {} parts, blocks {}", model, parts, whole_blocks));
          expect_equal_in_stages(part, program, trial, &plan, &rng);
        }
      }
    }
  }
  EXPECT_GT(gathered, 8);
  EXPECT_GT(computed, 4);
}

// Parameters kept in pieces in the place of whole ones: gathered ahead of the forward pass that reads
// them, and again in the backward pass.
TEST(Duplex, ParametersThatAreWholeMayBeKeptInPieces) {
  Rng rng(27);
  int moved = 0, again = 0;
  for (const char* model : kModels) {
    Plan plan = uneven_plan(model, 6);
    const CostModel cost(plan.cluster);
    for (const int parts : {1, 2})
      for (int trial = 0; trial < 4; ++trial) {
        SCOPED_TRACE(fmt::format("{}, {} parts, trial {}", model, parts, trial));
        plan.duplex = duplex_of(*plan.theory, even_parts(plan.batch, parts), "test");
        const Theory part(plan.duplex->first->graph);
        const auto restriction =
            trial < 2 ? spmd::Restriction::data_parallel : spmd::Restriction::none;
        spmd::ProblemBuilder builder(part, cost, plan.optimizer, restriction);
        builder.price(Fractions(plan.cluster, Shares(plan.ratios)));
        const Program whole = builder.program(solver::solve_folded(
            builder.problem(), solver::make_order(builder.problem()), {{0.5, 0.5}, {}}));
        Program program = spmd::stored_in_pieces(
            part, whole, [&](ValueId, Collective kind, const Placement& pieces) {
              EXPECT_EQ(pieces.is_shard(), kind != Collective::all_reduce);
              return kind == Collective::all_reduce ? 1 : 0.8 * rng.uniform();
            });
        moved += program.steps.size() - whole.steps.size();
        if (trial % 2 == 1) {
          const size_t before = program.steps.size();
          program = spmd::gathered_again(part, program);
          again += program.steps.size() - before;
        }
        expect_equal_in_stages(part, program, trial, &plan, &rng);
      }
  }
  EXPECT_GT(moved, 100);
  EXPECT_GT(again, 50);
}

TEST(Duplex, RefusesWhatIsNotASumOverSamples) {
  const Graph graph = captured("convnet:width=4,image=8", 8);
  const Theory theory(graph);
  try {
    duplex_of(theory, {4, 4}, "here");
    FAIL();
  } catch (const UserError& e) {
    EXPECT_THAT(e.what(), HasSubstr("here: the batch cannot be taken in parts side by side"));
  }
}

// Checker and reader trust no field.
TEST(Duplex, WrongFilesAreRefused) {
  Rng rng(3);
  Json json = to_json(random_plan(kModels[4], 8, 2, &rng));
  auto problem = [&](const Json& parts) {
    Json wrong = json;
    wrong["duplex"]["parts"] = parts;
    try {
      parse_plan(wrong.dump(), "f.json");
      return std::string();
    } catch (const UserError& e) {
      return std::string(e.what());
    }
  };
  EXPECT_THAT(problem({4, 3}), HasSubstr("f.json: duplex: field 'parts' is [4,3]"));
  EXPECT_THAT(problem({4, -4, 8}), HasSubstr("holds -4"));
  EXPECT_THAT(problem(std::vector<int>(17, 1)), HasSubstr("add up to the batch"));
  EXPECT_THAT(problem("two"), HasSubstr("parts"));
  EXPECT_THAT(problem(Json::array()), HasSubstr("parts"));
}

planner::PlanReport planned(const std::string& model, int64_t batch, const Cluster& cluster,
                            int duplex) {
  planner::PlanOptions options;
  options.model = model;
  options.batch = batch;
  options.duplex = duplex;
  options.baselines = false;
  return planner::plan([&](int64_t samples) { return captured(model, samples); }, cluster, options);
}

// Where communication is about as long as computation, parts are faster; where it is negligible they
// are not taken.
TEST(Duplex, IsChosenWhereItPays) {
  const char* model = "gpt:layers=2,hidden=128,heads=4,seq=64,vocab=512";
  const planner::PlanReport slow = planned(model, 16, cluster_of(2, 2, 4e8), 0);
  ASSERT_FALSE(slow.candidates.empty());
  EXPECT_TRUE(slow.candidates[0].plan->duplex) << slow.candidates[0].plan->engine;
  const planner::PlanReport fast = planned(model, 16, cluster_of(2, 2, 1e13), 0);
  ASSERT_FALSE(fast.candidates.empty());
  EXPECT_FALSE(fast.candidates[0].plan->duplex);
}

// One layer of twelve has experts and communicates; the others take both parts at once, which
// launches half as much, and is faster than taking turns. It runs as one device does.
TEST(Duplex, PartsTakeTurnsOnlyWhereItPays) {
  const std::string model =
      "bert-moe:layers=12,hidden=48,heads=4,seq=16,vocab=128,experts=4,every=12";
  Cluster cluster = cluster_of(1, 1, 5e7);
  for (DeviceType& type : cluster.types) {
    type.flops = 1.5e10;
    type.memory_bandwidth = 2e9;
    type.overhead = 16e-6;
  }
  planner::PlanOptions options;
  options.model = model;
  options.batch = 8;
  options.duplex = 2;
  options.strategy = "expert-parallel";
  options.baselines = false;
  const planner::PlanReport report =
      planner::plan([&](int64_t samples) { return captured(model, samples); }, cluster, options);
  ASSERT_FALSE(report.candidates.empty());
  const std::string text = to_json(*report.candidates[0].plan).dump();
  Plan plan = parse_plan(text, "mixed.json");
  const std::vector<JoinedCall> calls = joined_calls(plan.running(), plan.program);
  EXPECT_GT(calls.size(), 300);
  EXPECT_THAT(check(plan), IsEmpty());
  EXPECT_TRUE(verify_plan(plan, DType::f64, 1).equivalent);
  const Simulation mixed = simulate(plan);
  EXPECT_NEAR(mixed.step, plan.predicted_step_s, 1e-9);
  EXPECT_GT(mixed.overlap, 0.3);
  plan.program.steps.change([](std::vector<Step>& steps) {
    for (Step& step : steps) step.joined = false;
  });
  EXPECT_GT(simulate(plan).step, 1.05 * mixed.step);
}

// What the program prints on standard output or, if it fails, on standard error.
std::string printed(const std::string& words, int code = 0) {
  const std::string out = ::testing::TempDir() + "duplex.out";
  const int status = std::system(fmt::format("cd {} && timeout 120 {}/motley {} > {}.1 2> {}.2",
                                             MOTLEY_SOURCE_DIR, MOTLEY_BINARY_DIR, words, out, out)
                                     .c_str());
  EXPECT_EQ(WEXITSTATUS(status), code) << words << "\n" << read_file(out + ".2");
  return read_file(out + (code == 0 ? ".1" : ".2"));
}
Json json_of(const std::string& words) { return parse_json(printed(words + " --json"), words); }

// Planned, checked, simulated, explained, shown, and run as one device runs it.
TEST(Duplex, OnTheCommandLine) {
  const std::string small =
      "plan gpt:layers=1,hidden=32,heads=4,seq=8,vocab=64 --cluster local-mixed-4 --batch 9 ";
  const std::string plan = ::testing::TempDir() + "duplex.json";
  for (const char* parts : {"1", "2", "3"}) {
    const Json made = json_of(small + "-o " + plan + " --duplex " + parts);
    EXPECT_EQ(parse_json(read_file(plan), plan)["duplex"]["parts"].size(), std::stoul(parts));
    printed("check " + plan);
    const Json sim = json_of("simulate " + plan);
    EXPECT_NEAR(sim["step_s"].get<double>(), made["predicted_step_s"].get<double>(), 1e-12);
    for (const Json& d : sim["devices"])
      EXPECT_NEAR(d["hidden_comm_s"].get<double>() + d["exposed_comm_s"].get<double>(),
                  d["comm_s"].get<double>(), 1e-12);
    EXPECT_LT(json_of("verify " + plan)["gradient_error"].get<double>(), 1e-9);
  }
  printed("explain " + plan);
  printed("report --time-limit 1 " + plan + " -o " + plan + ".html");
  printed("simulate " + plan + " --trace " + plan + ".trace");
  EXPECT_THAT(printed("export " + plan + " --to ddp -o " + plan + ".d", 3),
              HasSubstr("--duplex off"));
  const Json on = json_of("run --steps 2 " + plan),
             off = json_of("run --steps 2 --overlap off " + plan);
  EXPECT_EQ(on["steps"][1]["loss"], off["steps"][1]["loss"]);
  for (const Json& device : off["communication"]) EXPECT_EQ(device["hidden_comm_s"], 0);
  // Gradients beside the backward pass of a plan without parts.
  printed(small + "--engine spmd --strategy dp-ev --duplex off -o " + plan);
  for (const char* overlap : {"on", "off"}) {
    const Json run = json_of(fmt::format("run --steps 3 --overlap {} {}", overlap, plan));
    for (const Json& device : run["communication"]) {
      EXPECT_GT(device["exposed_comm_s"], 0);
      EXPECT_EQ(device["hidden_comm_s"] > 0, overlap == std::string("on")) << device;
    }
  }
  EXPECT_THAT(printed(small + "--duplex two", 2), HasSubstr("--duplex is 'two'"));
  EXPECT_THAT(printed(small + "--duplex 10", 2), HasSubstr("a batch of 9 has no 10 parts"));
  EXPECT_THAT(printed(small + "--duplex 2 --engine grid", 2), HasSubstr("leave out engines"));
}

}  // namespace
}  // namespace motley
