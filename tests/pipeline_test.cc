// Pipeline plans as a whole: soundness of random ones by running, files, hostile input.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <iterator>
#include <set>

#include "capture/capture.h"
#include "core/error.h"
#include "graph/canonical.h"
#include "graph/precision.h"
#include "pipeline/layers.h"
#include "pipeline_cases.h"
#include "random_pipeline.h"
#include "runtime/verify.h"

namespace motley {
namespace {

// The micro-batch of a batch is the model captured with fewer samples, but for what is divided by
// the size of the batch and counts of its targets.
TEST(Pipeline, MicroBatchesAreTheModelAtFewerSamples) {
  for (const RandomPipeline& what : pipeline_cases())
    for (const int parts : {2, 6}) {
      const int64_t batch = what.micro_batch * parts;
      const Graph whole = canonicalize(capture(what.model, batch).graph),
                  alone = canonicalize(capture(what.model, what.micro_batch).graph);
      const Theory theory(whole);
      const MicroBatch part = micro_batch_of(theory, batch, parts, what.model);
      EXPECT_TRUE(verify(part.graph).empty()) << what.model << ": " << verify(part.graph)[0];
      // Operators and shapes.
      const auto calls = [&](const Graph& graph) {
        std::multiset<std::string> list;
        for (const Node& node : graph.nodes) {
          std::string line = node.op;
          for (ValueId v : node.outputs)
            if (v.valid()) line += " " + to_string(graph.spec(v));
          list.insert(line);
        }
        return list;
      };
      const auto of_part = calls(part.graph), of_alone = calls(alone);
      std::vector<std::string> more, less;
      std::set_difference(of_part.begin(), of_part.end(), of_alone.begin(), of_alone.end(),
                          std::back_inserter(more));
      std::set_difference(of_alone.begin(), of_alone.end(), of_part.begin(), of_part.end(),
                          std::back_inserter(less));
      const bool counts = !less.empty();
      EXPECT_EQ(counts, what.model.rfind("transgan", 0) != 0) << what.model;
      EXPECT_EQ(fmt::format("{}", fmt::join(more, "; ")), counts ? "motley::input f32[]" : "");
      EXPECT_EQ(less.size(), counts ? 3U : 0U) << fmt::format("{}", fmt::join(less, "; "));
      EXPECT_EQ(part.exact(), what.model.rfind("convnet", 0) != 0) << what.model;
    }
}

// A stage sends one gradient to the one before it and none further, whatever layers share; nor does
// it send a parameter in another type.
TEST(Pipeline, StagesTalkToTheirNeighbours) {
  for (const char* model :
       {"llama:layers=4,hidden=16,heads=4,kv_heads=2,ffn=24,seq=6,vocab=11",
        "moe:layers=4,hidden=16,heads=4,kv_heads=2,ffn=24,experts=3,seq=6,vocab=11",
        "vit:layers=4,hidden=16,heads=4,image=8,patch=4,classes=5",
        "bert:layers=4,hidden=16,heads=4,seq=6,vocab=11",
        "gpt:layers=4,hidden=16,heads=4,seq=6,vocab=11"})
    for (const bool low : {false, true}) {
      Graph graph = canonicalize(capture(model, 2).graph);
      if (low) graph = with_precision(graph, DType::bf16);
      const pipeline::Layers layers = pipeline::find_layers(graph, {});
      // Cut where blocks begin, behind the first one.
      const auto blocks = std::max_element(layers.modules.begin(), layers.modules.end(),
                                           [](auto& a, auto& b) { return a.repeats < b.repeats; });
      ASSERT_GE(blocks->repeats, 3) << model;
      std::vector<int> stage_of(graph.nodes.size(), 0);
      int stage = 0, forward = 0;
      for (const pipeline::Layer& layer : layers.layers) {
        const int period = (blocks->end - blocks->first) / blocks->repeats;
        if (forward > blocks->first && forward < blocks->end &&
            (forward - blocks->first) % period == 0)
          ++stage;
        for (NodeId n : layer.forward) stage_of[n.index] = stage;
        for (NodeId n : layer.backward) stage_of[n.index] = stage;
        forward += static_cast<int>(layer.forward.size());
      }
      for (size_t n = 1; n < stage_of.size(); ++n)
        if (is_source(graph.nodes[n])) stage_of[n] = stage_of[n - 1];
      const Stages stages = cut_stages(graph, stage_of, stage + 1, model);
      int gradients = 0;
      for (const Transfer& t : stages.transfers) {
        EXPECT_EQ(std::abs(t.from - t.to), 1) << model << " sends " << t.from << " to " << t.to;
        gradients += t.to < t.from;
      }
      EXPECT_EQ(gradients, stage) << model;
      for (const Tied& tied : stages.tied)
        EXPECT_EQ(tied.stages, (std::vector<int>{0, stage})) << model;
    }
}

TEST(Pipeline, RandomPlansEqualOneDevice) {
  int skips = 0, tied = 0, unequal = 0;
  for (size_t c = 0; c < pipeline_cases().size(); ++c) {
    Rng rng(100 + c);
    for (int trial = 0; trial < 8; ++trial) {
      const Plan plan = random_pipeline(pipeline_cases()[c], &rng);
      const std::vector<std::string> problems = check(plan, false);
      ASSERT_TRUE(problems.empty()) << pipeline_cases()[c].model << ": " << problems[0];
      const Verification v = verify_plan(plan, DType::f64, 3 + trial);
      EXPECT_LT(v.loss_error, 1e-9) << pipeline_cases()[c].model << " trial " << trial;
      EXPECT_LT(v.gradient_error, 1e-9)
          << pipeline_cases()[c].model << " trial " << trial << " at " << v.worst_parameter;
      for (const Transfer& t : plan.pipeline->parts().transfers)
        skips += std::abs(t.from - t.to) > 1;
      tied += static_cast<int>(plan.pipeline->parts().tied.size());
      unequal += plan.pipeline->replicas.size() > 1 &&
                 plan.pipeline->replicas[0].stages[0].devices.size() !=
                     plan.pipeline->replicas[1].stages[0].devices.size();
    }
  }
  // The draw covers what is special.
  EXPECT_GT(skips, 0);
  EXPECT_GT(tied, 5);
  EXPECT_GT(unequal, 3);
}

// Stages that share devices: any stages, groups that differ from replica to replica, values that
// stay on their device, any warm-up count that does not wait for ever.
TEST(Pipeline, SharedDevicesEqualOneDevice) {
  int shared = 0, kept = 0, early = 0, unequal = 0;
  for (size_t c = 0; c < pipeline_cases().size(); ++c) {
    RandomPipeline what = pipeline_cases()[c];
    what.shared = true;
    Rng rng(900 + c);
    for (int trial = 0; trial < 8; ++trial) {
      const Plan plan = random_pipeline(what, &rng);
      const std::vector<std::string> problems = check(plan, false);
      ASSERT_TRUE(problems.empty()) << what.model << ": " << problems[0];
      const Verification v = verify_plan(plan, DType::f64, 3 + trial);
      EXPECT_LT(v.loss_error, 1e-9) << what.model << " trial " << trial;
      EXPECT_LT(v.gradient_error, 1e-9)
          << what.model << " trial " << trial << " at " << v.worst_parameter;
      const ReplicaPlan& replica = plan.pipeline->replicas[0];
      for (const auto& group : stage_groups(replica)) {
        shared += group.size() > 1;
        early += group.size() > 1 && replica.stages[group[0]].warm_up <
                                         static_cast<int>(group.size()) * replica.micro_batches;
      }
      unequal += plan.pipeline->replicas.size() > 1 &&
                 stage_groups(replica) != stage_groups(plan.pipeline->replicas[1]);
      for (const Transfer& t : plan.pipeline->parts().transfers)
        kept += replica.stages[t.from].devices == replica.stages[t.to].devices;
    }
  }
  EXPECT_GT(shared, 20);
  EXPECT_GT(kept, 20);
  EXPECT_GT(early, 5);
  EXPECT_GT(unequal, 2);
}

// All-reduces inside stages and over replicas run the steps that the plan names: without the steps
// the sums are missed.
TEST(Pipeline, ReductionsInStepsEqualOneDevice) {
  int stages_caught = 0, replicas_caught = 0;
  for (size_t c = 0; c < pipeline_cases().size(); ++c) {
    RandomPipeline what = pipeline_cases()[c];
    what.reductions = true;
    Rng rng(700 + c);
    for (int trial = 0; trial < 3; ++trial) {
      Plan plan = random_pipeline(what, &rng);
      const std::vector<std::string> problems = check(plan, false);
      ASSERT_TRUE(problems.empty()) << what.model << ": " << problems[0];
      EXPECT_EQ(parse_plan(to_json(plan).dump(), "plan").reductions, plan.reductions);
      const Verification v = verify_plan(plan, DType::f64, 3 + trial);
      EXPECT_LT(v.loss_error, 1e-9) << what.model << " trial " << trial;
      EXPECT_LT(v.gradient_error, 1e-9)
          << what.model << " trial " << trial << " at " << v.worst_parameter;
      if (trial > 0) continue;
      for (const bool inside : {true, false}) {
        Plan wrong = parse_plan(to_json(plan).dump(), "plan");
        int planted = 0;
        for (ReductionProgram& program : wrong.reductions) {
          bool stage = false;
          for (const ReplicaPlan& replica : plan.pipeline->replicas)
            for (const StagePlan& s : replica.stages) stage = stage || s.devices == program.devices;
          if (stage != inside) continue;
          program.steps.clear();
          ++planted;
        }
        if (planted == 0) continue;
        EXPECT_FALSE(check(wrong, false).empty());
        const Verification w = verify_plan(wrong, DType::f64, 3);
        (inside ? stages_caught : replicas_caught) += !(w.gradient_error < 1e-6);
      }
    }
  }
  EXPECT_GT(stages_caught, 2);
  EXPECT_GT(replicas_caught, 2);
}

// Gradients that ranks and replicas sum at once: whatever else the programs of the replicas do with
// them, however unlike the replicas are, and where stages share their devices.
TEST(Pipeline, JointReductionsEqualOneDevice) {
  int joint = 0, separate = 0, caught = 0, shared = 0;
  for (size_t c = 0; c < pipeline_cases().size(); ++c) {
    RandomPipeline what = pipeline_cases()[c];
    what.reductions = what.joint = true;
    Rng rng(900 + c);
    for (int trial = 0; trial < 4; ++trial) {
      what.shared = trial >= 2;
      const Plan plan = random_pipeline(what, &rng);
      const std::vector<std::string> problems = check(plan, false);
      ASSERT_TRUE(problems.empty()) << what.model << ": " << problems[0];
      const PipelinePlan& pipeline = *plan.pipeline;
      std::set<std::vector<int>> over_both;
      for (int s = 0; s < pipeline.stages(); ++s) {
        const JointGradients gradients =
            joint_gradients(pipeline, s, plan.reductions, plan.cluster.size());
        for (bool one : gradients.gradient) ++(one ? joint : separate);
        if (!gradients.any()) continue;
        over_both.insert(devices_of(pipeline, s));
        for (const auto& group : stage_groups(pipeline.replicas[0]))
          shared += group.size() > 1 && std::count(group.begin(), group.end(), s) > 0;
      }
      const Verification v = verify_plan(plan, DType::f64, 3 + trial);
      EXPECT_LT(v.loss_error, 1e-9) << what.model << " trial " << trial;
      EXPECT_LT(v.gradient_error, 1e-9)
          << what.model << " trial " << trial << " at " << v.worst_parameter;
      if (caught > 2 || over_both.empty()) continue;
      Plan wrong = parse_plan(to_json(plan).dump(), "plan");
      for (ReductionProgram& program : wrong.reductions)
        if (over_both.count(program.devices)) program.steps.clear();
      EXPECT_FALSE(check(wrong, false).empty());
      caught += !(verify_plan(wrong, DType::f64, 3).gradient_error < 1e-6);
    }
  }
  EXPECT_GT(joint, 10);
  EXPECT_GT(separate, 10);
  EXPECT_GT(caught, 1);
  EXPECT_GT(shared, 0);
}

// Replicas that divide optimizer state and gradients: every level in any mixture over stages, any
// shares, tensor parallelism inside, tied parameters, unlike replicas, stages that share devices.
TEST(Pipeline, DividedStateEqualsOneDevice) {
  int first = 0, second = 0, tied = 0, whole = 0, uneven = 0, cut = 0;
  for (size_t c = 0; c < pipeline_cases().size(); ++c) {
    RandomPipeline what = pipeline_cases()[c];
    what.zero = true;
    Rng rng(1300 + c);
    for (int trial = 0; trial < 6; ++trial) {
      what.shared = trial >= 3;
      const Plan plan = random_pipeline(what, &rng);
      const std::vector<std::string> problems = check(plan, false);
      ASSERT_TRUE(problems.empty()) << what.model << ": " << problems[0];
      EXPECT_EQ(parse_plan(to_json(plan).dump(), "plan").pipeline->zero, plan.pipeline->zero);
      const Verification v = verify_plan(plan, DType::f64, 3 + trial);
      EXPECT_LT(v.loss_error, 1e-9) << what.model << " trial " << trial;
      EXPECT_LT(v.gradient_error, 1e-9)
          << what.model << " trial " << trial << " at " << v.worst_parameter;
      const PipelinePlan& pipeline = *plan.pipeline;
      for (int s = 0; s < pipeline.stages(); ++s) {
        const DividedState divided = divided_state(pipeline, s);
        const StagePlan& stage = pipeline.replicas[0].stages[s];
        const auto stored = stored_placements(pipeline.theory(s), stage.program);
        for (size_t i = 0; i < divided.optimizer.size(); ++i) {
          whole += !divided.optimizer[i];
          if (!divided.optimizer[i]) continue;
          ++(pipeline.level(s) == 1 ? first : second);
          tied += divided.tied[i];
          uneven += divided.shares[0] != divided.shares[1];
          cut += stored[pipeline.graph(s).parameters[i].value.index].is_shard();
        }
      }
    }
  }
  EXPECT_GT(first, 50);
  EXPECT_GT(second, 25);
  EXPECT_GT(tied, 1);
  EXPECT_GT(whole, 25);
  EXPECT_GT(uneven, 50);
  EXPECT_GT(cut, 25);
}

// That it is sound, comes back from its file, and computes what one device does.
void equals_one_device(const Plan& plan, int trial) {
  const std::vector<std::string> problems = check(plan, false);
  ASSERT_TRUE(problems.empty()) << plan.model << ": " << problems[0];
  const std::string text = to_json(plan).dump();
  EXPECT_EQ(to_json(parse_plan(text, "plan")).dump(), text);
  const Verification v = verify_plan(plan, DType::f64, 3 + trial);
  EXPECT_LT(v.loss_error, 1e-9) << plan.model << " trial " << trial;
  EXPECT_LT(v.gradient_error, 1e-9)
      << plan.model << " trial " << trial << " at " << v.worst_parameter;
}

// Programs that gather parameters and scatter gradients in every pass, whatever else they do: with
// replicas that divide state or not, stages that are computed again or share their devices.
TEST(Pipeline, PiecesEqualOneDevice) {
  int gathered = 0, scattered = 0, divided = 0, shared = 0;
  for (size_t c = 0; c < pipeline_cases().size(); ++c) {
    RandomPipeline what = pipeline_cases()[c];
    what.pieces = true;
    Rng rng(1700 + c);
    for (int trial = 0; trial < 6; ++trial) {
      what.zero = trial % 2 == 1;
      what.shared = trial >= 4;
      const Plan plan = random_pipeline(what, &rng);
      ASSERT_NO_FATAL_FAILURE(equals_one_device(plan, trial));
      const PipelinePlan& pipeline = *plan.pipeline;
      for (const ReplicaPlan& replica : pipeline.replicas)
        for (int s = 0; s < pipeline.stages(); ++s) {
          const Program& program = replica.stages[s].program;
          const Phases phases = phases_of(pipeline.theory(s), program);
          for (size_t i = 0; i < program.steps.size(); ++i) {
            const Step& step = program.steps[i];
            if (step.again || step.each) {
              EXPECT_GE(static_cast<int>(i), phases.backward);
              EXPECT_LT(static_cast<int>(i), phases.reduction);
            }
            gathered += step.again && !step.is_compute();
            scattered += step.each && step.kind == Collective::reduce_scatter;
            if (!step.each) continue;
            divided += pipeline.level(s) > 0;
            shared += stage_groups(replica).size() < replica.stages.size();
          }
        }
      if (trial > 0) continue;
      Plan wrong = parse_plan(to_json(plan).dump(), "plan");
      wrong.pipeline->replicas[0].stages[0].program.steps.change(
          [](std::vector<Step>& steps) { steps[0].each = true; });
      EXPECT_FALSE(check(wrong, false).empty());
    }
  }
  EXPECT_GT(gathered, 100);
  EXPECT_GT(scattered, 100);
  EXPECT_GT(divided, 25);
  EXPECT_GT(shared, 25);
}

// Stages that compute some of their blocks again, with parameters held in pieces or whole, and
// passes that are split, run again as a whole or share their devices.
TEST(Pipeline, BlocksComputedAgainEqualOneDevice) {
  int again = 0, in_pieces = 0, later = 0;
  for (size_t c = 0; c < pipeline_cases().size(); ++c) {
    RandomPipeline what = pipeline_cases()[c];
    what.again = true;
    Rng rng(2100 + c);
    for (int trial = 0; trial < 6; ++trial) {
      what.pieces = trial % 2 == 1;
      what.zero = trial % 3 == 2;
      what.shared = trial >= 4;
      const Plan plan = random_pipeline(what, &rng);
      ASSERT_NO_FATAL_FAILURE(equals_one_device(plan, trial));
      for (const ReplicaPlan& replica : plan.pipeline->replicas)
        for (const StagePlan& stage : replica.stages) {
          const std::vector<Step>& steps = stage.program.steps;
          const bool computes = std::any_of(steps.begin(), steps.end(), [](const Step& step) {
            return step.again && step.is_compute();
          });
          again += computes;
          in_pieces += computes && std::any_of(steps.begin(), steps.end(),
                                               [](const Step& step) { return step.each; });
          later += computes && has_later(stage.program);
        }
    }
  }
  EXPECT_GT(again, 50);
  EXPECT_GT(in_pieces, 10);
  EXPECT_GT(later, 5);
}

TEST(Pipeline, FilesRoundTrip) {
  Rng rng(5);
  for (const RandomPipeline& c : pipeline_cases()) {
    const Plan plan = random_pipeline(c, &rng);
    const std::string text = to_json(plan).dump(1);
    const Plan again = parse_plan(text, "plan");
    EXPECT_EQ(to_json(again).dump(1), text);
    EXPECT_TRUE(check(again, false).empty());
    EXPECT_NE(describe(again).find("stage 0"), std::string::npos);
  }
}

TEST(Pipeline, DivisionsAreChecked) {
  RandomPipeline what = pipeline_cases()[3];
  what.zero = true;
  Rng rng(29);
  Plan plan = random_pipeline(what, &rng);
  while (plan.pipeline->stages() < 2) plan = random_pipeline(what, &rng);
  PipelinePlan& pipeline = *plan.pipeline;
  auto problem = [&](const std::vector<Division>& zero) {
    pipeline.zero = zero;
    const auto problems = check(plan, false);
    return problems.empty() ? std::string() : problems[0];
  };
  std::vector<Division> good(pipeline.stages(), {1, {}});
  EXPECT_EQ(problem(good), "");
  EXPECT_NE(problem({{1, {}}}).find("zero has 1 entries"), std::string::npos);
  auto bad = good;
  bad[0].level = 3;
  EXPECT_NE(problem(bad).find("zero level 3; give 0, 1 or 2"), std::string::npos);
  bad[0] = {1, {1}};
  EXPECT_NE(problem(bad).find("not one share per replica"), std::string::npos);
  bad[0] = {1, std::vector<double>(pipeline.replicas.size(), 0)};
  EXPECT_NE(problem(bad).find("not one share per replica"), std::string::npos);
  bad[0] = {2, {}};
  pipeline.replicas[1].micro_batches = pipeline.replicas[0].micro_batches + 1;
  fit_batch(&plan);
  EXPECT_NE(problem(bad).find("meet in every backward pass"), std::string::npos);
  EXPECT_EQ(problem(good), "");
  Json json = to_json(plan);
  auto refused = [&](const Json& zero) {
    json["pipeline"]["zero"] = zero;
    try {
      parse_plan(json.dump(), "p.json");
    } catch (const UserError& e) {
      return std::string(e.what());
    }
    return std::string("taken");
  };
  Json list = Json::array();
  for (size_t s = 0; s < pipeline.zero.size(); ++s) list.push_back({{"level", 1}});
  EXPECT_EQ(refused(list), "taken");
  auto changed = [&](const Json& one) {
    Json other = list;
    other[0] = one;
    return refused(other);
  };
  EXPECT_NE(changed({{"level", 3}}).find("parameters are cut by the programs of stages"),
            std::string::npos);
  EXPECT_NE(changed({{"level", -1}}).find("give 0, 1 or 2"), std::string::npos);
  EXPECT_NE(changed({{"level", 1}, {"shares", {1}}}).find("has 1 numbers"), std::string::npos);
  EXPECT_NE(changed({{"level", 1}, {"shares", {1, -1}}}).find("of at least 0"), std::string::npos);
  EXPECT_NE(refused(Json::array()).find("has 0 entries"), std::string::npos);
  EXPECT_NE(refused(1), "taken");
}

// Every change of one number or word in a plan file either leaves a plan that the checker judges or
// is refused with one line; nothing crashes.
TEST(Pipeline, HostileFilesAreRefusedInOneLine) {
  Rng rng(31);
  Plan plan = random_pipeline(pipeline_cases()[3], &rng);
  plan.pipeline->zero.assign(plan.pipeline->stages(),
                             {1, std::vector<double>(plan.pipeline->replicas.size(), 0.5)});
  const Json good = to_json(plan);
  int refused = 0, unsound = 0;
  auto judge = [&](const Json& json) {
    try {
      const Plan read = parse_plan(json.dump(), "p.json");
      if (!check(read, true).empty()) ++unsound;
    } catch (const UserError& e) {
      ++refused;
      EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos);
    }
  };
  const std::vector<Json> values = {-1,
                                    0,
                                    1e300,
                                    1 << 30,
                                    "x",
                                    nullptr,
                                    true,
                                    {},
                                    2.5,
                                    -7,
                                    3,
                                    Json::array(),
                                    18446744073709551615u};
  std::function<void(Json&, Json&, int)> walk = [&](Json& root, Json& at, int depth) {
    if (depth > 7) return;
    if (at.is_structured()) {
      if (at.size() > 40) {
        walk(root, at[at.size() / 2], depth + 1);
      } else {
        for (auto& child : at) walk(root, child, depth + 1);
      }
    }
    const Json before = at;
    for (const Json& value : values) {
      at = value;
      judge(root);
    }
    at = before;
  };
  Json work = good;
  walk(work, work["pipeline"], 0);
  for (const auto& [key, value] : good["pipeline"].items()) {
    work = good;
    work["pipeline"].erase(key);
    judge(work);
  }
  work = good;
  work["ratios"] = {1};
  judge(work);
  std::printf("%d refused, %d unsound\n", refused, unsound);
  EXPECT_GT(refused, 200);
  EXPECT_GT(unsound, 5);
}

}  // namespace
}  // namespace motley
