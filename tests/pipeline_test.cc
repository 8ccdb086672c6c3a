// Pipeline plans as a whole: soundness of random ones by running, files, training, hostile input.
#include "sim/pipeline.h"

#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <set>

#include "capture/capture.h"
#include "cluster/part.h"
#include "counted.h"
#include "graph/canonical.h"
#include "graph/precision.h"
#include "grid/schedule.h"
#include "net/messages.h"
#include "pipeline/layers.h"
#include "pipeline/schedules.h"
#include "pipeline/simulate.h"
#include "planner/alternation.h"
#include "random_pipeline.h"
#include "runtime/eager.h"
#include "runtime/pipeline_worker.h"
#include "runtime/trainer.h"
#include "runtime/verify.h"
#include "spmd/recompute.h"
#include "zoo/module.h"

namespace motley {
namespace {

const std::vector<RandomPipeline>& cases() {
  static const std::vector<RandomPipeline> list = {
      {"gpt:layers=3,hidden=16,heads=4,seq=6,vocab=11", 2},
      {"gpt:layers=2,hidden=16,heads=4,seq=6,vocab=11,dropout=0.2", 3},
      {"bert:layers=2,hidden=16,heads=4,seq=6,vocab=11", 2},
      {"mlp:layers=4,hidden=12,in=10,classes=7", 5},
      {"vgg19:width=2,image=32,classes=5", 2},
      {"vit:layers=2,hidden=16,heads=4,image=8,patch=4,classes=5", 3},
      {"llama:layers=2,hidden=16,heads=4,kv_heads=2,ffn=24,seq=6,vocab=11", 2},
      {"convnet:width=4,image=8,classes=5", 4},
      {"transgan:layers=1,hidden=128,heads=2,side=2,latent=8", 2},
  };
  return list;
}

// The micro-batch of a batch is the model captured with fewer samples, but for what is divided by
// the size of the batch and counts of its targets.
TEST(Pipeline, MicroBatchesAreTheModelAtFewerSamples) {
  for (const RandomPipeline& what : cases())
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

TEST(Pipeline, RandomPlansEqualOneDevice) {
  int skips = 0, tied = 0, unequal = 0;
  for (size_t c = 0; c < cases().size(); ++c) {
    Rng rng(100 + c);
    for (int trial = 0; trial < 8; ++trial) {
      const Plan plan = random_pipeline(cases()[c], &rng);
      const std::vector<std::string> problems = check(plan, false);
      ASSERT_TRUE(problems.empty()) << cases()[c].model << ": " << problems[0];
      const Verification v = verify_plan(plan, DType::f64, 3 + trial);
      EXPECT_LT(v.loss_error, 1e-9) << cases()[c].model << " trial " << trial;
      EXPECT_LT(v.gradient_error, 1e-9)
          << cases()[c].model << " trial " << trial << " at " << v.worst_parameter;
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
  for (size_t c = 0; c < cases().size(); ++c) {
    RandomPipeline what = cases()[c];
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
    const Simulation simulation = simulate(plan, true);
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

// All-reduces inside stages and over replicas run the steps that the plan names: without the steps
// the sums are missed.
TEST(Pipeline, ReductionsInStepsEqualOneDevice) {
  int stages_caught = 0, replicas_caught = 0;
  for (size_t c = 0; c < cases().size(); ++c) {
    RandomPipeline what = cases()[c];
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
  for (size_t c = 0; c < cases().size(); ++c) {
    RandomPipeline what = cases()[c];
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
  for (size_t c = 0; c < cases().size(); ++c) {
    RandomPipeline what = cases()[c];
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

// Programs that gather parameters and scatter gradients in every pass, whatever else they do: with
// replicas that divide state or not, stages that are computed again or share their devices.
TEST(Pipeline, PiecesEqualOneDevice) {
  int gathered = 0, scattered = 0, divided = 0, shared = 0;
  for (size_t c = 0; c < cases().size(); ++c) {
    RandomPipeline what = cases()[c];
    what.pieces = true;
    Rng rng(1700 + c);
    for (int trial = 0; trial < 6; ++trial) {
      what.zero = trial % 2 == 1;
      what.shared = trial >= 4;
      const Plan plan = random_pipeline(what, &rng);
      const std::vector<std::string> problems = check(plan, false);
      ASSERT_TRUE(problems.empty()) << what.model << ": " << problems[0];
      const std::string text = to_json(plan).dump();
      EXPECT_EQ(to_json(parse_plan(text, "plan")).dump(), text);
      const Verification v = verify_plan(plan, DType::f64, 3 + trial);
      EXPECT_LT(v.loss_error, 1e-9) << what.model << " trial " << trial;
      EXPECT_LT(v.gradient_error, 1e-9)
          << what.model << " trial " << trial << " at " << v.worst_parameter;
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
      Plan wrong = parse_plan(text, "plan");
      wrong.pipeline->replicas[0].stages[0].program.steps[0].each = true;
      EXPECT_FALSE(check(wrong, false).empty());
    }
  }
  EXPECT_GT(gathered, 100);
  EXPECT_GT(scattered, 100);
  EXPECT_GT(divided, 25);
  EXPECT_GT(shared, 25);
}

TEST(Pipeline, FilesRoundTrip) {
  Rng rng(5);
  for (const RandomPipeline& c : cases()) {
    const Plan plan = random_pipeline(c, &rng);
    const std::string text = to_json(plan).dump(1);
    const Plan again = parse_plan(text, "plan");
    EXPECT_EQ(to_json(again).dump(1), text);
    EXPECT_TRUE(check(again, false).empty());
    EXPECT_NE(describe(again).find("stage 0"), std::string::npos);
  }
}

std::vector<double> losses(const Plan& plan, const TrainOptions& options, int steps,
                           std::map<std::string, at::Tensor>* parameters = nullptr,
                           std::vector<double>* norms = nullptr) {
  std::vector<double> list;
  std::mutex mutex;
  run_thread_group(plan.cluster.size(), [&](Communicator& group) {
    Trainer trainer(plan, group, options);
    for (int i = 0; i < steps; ++i) {
      const StepReport report = trainer.step();
      if (group.rank() == 0) list.push_back(report.loss);
      if (group.rank() == 0 && norms) norms->push_back(report.gradient_norm);
    }
    if (!options.checkpoint.empty()) trainer.save(), trainer.conclude();
    if (!parameters) return;
    for (const Parameter& p : plan.graph->parameters) {
      const at::Tensor whole = trainer.parameter(p.name);
      std::lock_guard lock(mutex);
      if (group.rank() == 0) (*parameters)[p.name] = whole;
    }
  });
  return list;
}

// Several optimizer steps, clipped, against one device in double precision; and a checkpoint that
// either goes on from.
TEST(Pipeline, TrainsAsOneDevice) {
  const DefaultDType default_type(DType::f64);
  RandomPipeline what = cases()[0];
  what.dtype = DType::f64;
  Rng rng(11);
  for (Optimizer optimizer : {Optimizer::adamw, Optimizer::sgd}) {
    Plan plan = random_pipeline(what, &rng);
    while (plan.pipeline->parts().tied.empty() || plan.pipeline->replicas.size() < 2)
      plan = random_pipeline(what, &rng);
    plan.optimizer = optimizer;
    Plan one;  // all replicated: one stage on one device
    one.engine = "pipeline";
    one.model = plan.model;
    one.batch = plan.batch;
    one.optimizer = optimizer;
    one.cluster = flat_cluster({device_catalogue().back()}, {1}, {LinkKind::switched, 1e9, 1e-5});
    one.set_graph(canonicalize(capture(plan.model, plan.batch, what.dtype).graph));
    one.ratios = {{1.}};
    for (size_t n = 0; n < one.graph->nodes.size(); ++n) {
      const auto& triples = one.theory->triples(NodeId(n));
      for (size_t t = 0; t < triples.size(); ++t)
        if (triples[t].cut == 0 && triples[t].kernel.empty() &&
            std::all_of(triples[t].in.begin(), triples[t].in.end(),
                        [](Placement p) { return p.is_replicated(); }) &&
            std::all_of(triples[t].out.begin(), triples[t].out.end(),
                        [](Placement p) { return p.is_replicated(); })) {
          Step step;
          step.node = NodeId(n);
          step.triple = static_cast<int>(t);
          one.program.steps.push_back(step);
          break;
        }
    }
    ASSERT_TRUE(check(one, false).empty()) << check(one, false)[0];
    const std::string folder =
        (std::filesystem::temp_directory_path() / "motley_pipeline_test").string();
    std::filesystem::remove_all(folder);
    TrainOptions options;
    options.seed = 4;
    options.clip = 0.5;
    std::vector<double> norms, expected_norms;
    std::map<std::string, at::Tensor> parameters, expected_parameters;
    const auto expected = losses(one, options, 4, &expected_parameters, &expected_norms);
    options.checkpoint = folder;
    auto got = losses(plan, options, 2, nullptr, &norms);
    const auto rest = losses(plan, options, 2, &parameters, &norms);
    got.insert(got.end(), rest.begin(), rest.end());
    std::filesystem::remove_all(folder);
    ASSERT_EQ(got.size(), 4u);
    for (int i = 0; i < 4; ++i) {
      EXPECT_NEAR(got[i], expected[i], 1e-9) << i;
      EXPECT_NEAR(norms[i], expected_norms[i], 1e-9 * expected_norms[i]) << i;
    }
    EXPECT_GT(std::abs(expected[3] - expected[0]), 1e-4);  // steps that do nothing are alike too
    for (const auto& [name, tensor] : expected_parameters)
      EXPECT_LT((parameters.at(name) - tensor).abs().max().item<double>(), 1e-9) << name;
  }
}

// Several clipped steps of both optimizers are those of replicas that keep everything, in double
// precision; either goes on from the other's checkpoint.
TEST(Pipeline, DividedStateTrainsAsWhole) {
  const DefaultDType default_type(DType::f64);
  RandomPipeline what = cases()[0];
  what.zero = true;
  what.dtype = DType::f64;
  Rng rng(19);
  std::set<int> levels;
  for (int trial = 0; trial < 4; ++trial) {
    Plan plan = random_pipeline(what, &rng);
    plan.optimizer = trial % 2 == 0 ? Optimizer::adamw : Optimizer::sgd;
    Plan whole = parse_plan(to_json(plan).dump(), "plan");
    whole.pipeline->zero.clear();
    bool any = false;
    for (int s = 0; s < plan.pipeline->stages(); ++s) {
      if (divided_state(*plan.pipeline, s).any()) levels.insert(plan.pipeline->level(s));
      any = any || divided_state(*plan.pipeline, s).any();
    }
    if (!any) continue;
    const std::string folder =
        (std::filesystem::temp_directory_path() / "motley_divided_test").string();
    TrainOptions options;
    options.seed = 4;
    options.clip = 0.5;
    std::vector<double> expected_norms;
    std::map<std::string, at::Tensor> expected_parameters;
    const auto expected = losses(whole, options, 4, &expected_parameters, &expected_norms);
    options.checkpoint = folder;
    for (const bool divided_first : {true, false}) {
      std::filesystem::remove_all(folder);
      std::vector<double> norms;
      std::map<std::string, at::Tensor> parameters;
      auto got = losses(divided_first ? plan : whole, options, 2, nullptr, &norms);
      const auto rest = losses(divided_first ? whole : plan, options, 2, &parameters, &norms);
      got.insert(got.end(), rest.begin(), rest.end());
      ASSERT_EQ(got.size(), 4u);
      for (int i = 0; i < 4; ++i) {
        EXPECT_NEAR(got[i], expected[i], 1e-9 * expected[i]) << i;
        EXPECT_NEAR(norms[i], expected_norms[i], 1e-9 * expected_norms[i]) << i;
      }
      for (const auto& [name, tensor] : expected_parameters)
        EXPECT_LT((parameters.at(name) - tensor).abs().max().item<double>(), 1e-9) << name;
    }
    std::filesystem::remove_all(folder);
  }
  EXPECT_EQ(levels, (std::set<int>{1, 2}));
}

// The most memory that devices hold in a step falls by what the account of the plan says.
TEST(Pipeline, DividedStateIsNotHeld) {
  RandomPipeline what = {"mlp:layers=16,hidden=64,in=64,classes=64", 1024};
  what.plain = true;
  Rng rng(23);
  Plan plan = random_pipeline(what, &rng);
  while (plan.pipeline->stages() != 1) plan = random_pipeline(what, &rng);
  plan.optimizer = Optimizer::adamw;
  PipelinePlan& pipeline = *plan.pipeline;
  pipeline.replicas[0].stages[0].devices = {0};
  pipeline.replicas[0].micro_batches = 2;
  pipeline.replicas[0].stages[0].warm_up = 1;  // so that most is held beside the first's sums
  pipeline.replicas.push_back(pipeline.replicas[0]);
  pipeline.replicas[1].stages[0].devices = {1};
  fit_batch(&plan);
  plan.cluster = flat_cluster({device_catalogue().back()}, {2}, {LinkKind::switched, 1e9, 1e-5});
  std::map<int, std::vector<double>> planned, measured;  // [level][device]
  for (int level : {0, 1, 2}) {
    pipeline.zero = {{level, {3, 1}}};
    ASSERT_TRUE(check(plan, false).empty()) << check(plan, false)[0];
    planned[level] = pipeline_memory(pipeline, plan.cluster, plan.optimizer);
    for (const HeldBytes& held : held_by_workers(plan)) measured[level].push_back(held.most);
  }
  const auto parameters = static_cast<double>(pipeline.graph(0).parameter_bytes());
  for (int device : {0, 1})
    for (int level : {1, 2}) {
      const double saved = planned[level - 1][device] - planned[level][device];
      EXPECT_GT(saved, 0) << level;
      EXPECT_NEAR(measured[level - 1][device] - measured[level][device], saved, 0.1 * parameters)
          << "device " << device << " level " << level;
    }
}

// A stage of four devices that cut all parameters: where passes gather and scatter, devices hold as
// much less at most as the account of the plan says.
TEST(Pipeline, PiecesAreHeld) {
  RandomPipeline what = {"mlp:layers=16,hidden=128,in=128,classes=128", 1024};
  what.plain = true;
  Rng rng(31);
  Plan plan = random_pipeline(what, &rng);
  while (plan.pipeline->stages() != 1) plan = random_pipeline(what, &rng);
  plan.optimizer = Optimizer::adamw;
  plan.cluster = flat_cluster({device_catalogue().back()}, {4}, {LinkKind::switched, 1e9, 1e-5});
  PipelinePlan& pipeline = *plan.pipeline;
  StagePlan& stage = pipeline.replicas[0].stages[0];
  pipeline.replicas[0].micro_batches = 2;
  fit_batch(&plan);
  stage.warm_up = 1;
  stage.devices = {0, 1, 2, 3};
  stage.ratios = {0.25, 0.25, 0.25, 0.25};
  planner::AlternationOptions options;
  options.restriction = spmd::Restriction::zero;
  options.memory_limit = options.certify = options.polish = false;
  options.ratios = stage.ratios;
  const CostModel model(plan.cluster);
  const planner::Alternation found = planner::alternate(pipeline.theory(0), model, options);
  ASSERT_TRUE(found.feasible) << found.reason;
  const Program whole = phase_ordered(pipeline.theory(0), found.program);
  double planned[2] = {}, measured[2] = {};
  for (const bool pieces : {false, true}) {
    stage.program = pieces ? spmd::hold_pieces(pipeline.theory(0), whole) : whole;
    ASSERT_TRUE(check(plan, false).empty()) << check(plan, false)[0];
    planned[pieces] = pipeline_memory(pipeline, plan.cluster, plan.optimizer)[0];
    measured[pieces] = held_by_workers(plan)[0].most;
  }
  const auto parameters = static_cast<double>(pipeline.graph(0).parameter_bytes());
  EXPECT_GT(planned[0] - planned[1], parameters);  // gathered copies, and sums of gradients
  EXPECT_NEAR(measured[0] - measured[1], planned[0] - planned[1], 0.1 * parameters);
  EXPECT_LE(measured[1], planned[1]);
  EXPECT_GT(measured[1], planned[1] - 0.6 * parameters);
}

TEST(Pipeline, DivisionsAreChecked) {
  RandomPipeline what = cases()[3];
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

// One device per stage and a chain of transfers: the event simulator is that of pipeline/.
TEST(Pipeline, SimulatedAsTheChainOfItsStages) {
  Rng rng(41);
  int split = 0;
  for (int trial = 0; trial < 12; ++trial) {
    RandomPipeline what = cases()[3];
    what.plain = true;
    Plan plan = random_pipeline(what, &rng);
    auto skips = [&] {
      // The first stage would wait for what is computed from the whole batch before.
      const std::vector<Span> spans = simulate(plan, true).spans;
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
    const Simulation simulation = simulate(plan, true);
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
  for (RandomPipeline what : cases()) {
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
  EXPECT_GT(different.size(), 2 * cases().size());
}

// One step of a worker, from the parameters that the model begins with.
void step_once(const Plan& plan, Worker* worker) {
  const auto all = materialize(parse_model(plan.model), 1);
  const TensorMap values = parameters_of(*all);
  for (size_t i = 0; i < worker->parameters().size(); ++i)
    worker->set_parameter(
        i, worker->parameter_piece(
               i, values.at(plan.graph->parameters[worker->parameters()[i]].name).detach()));
  worker->step(0, input_pieces(plan, *worker, random_inputs(*all, plan.batch, 2)));
}

// Counts what is sent from one side to another.
class CountedGroup final : public Communicator {
 public:
  CountedGroup(Communicator& group, const std::vector<int>& sides, std::atomic<int64_t>* bytes)
      : group_(group), sides_(sides), bytes_(*bytes) {}
  int rank() const override { return group_.rank(); }
  int size() const override { return group_.size(); }
  void all_reduce(at::Tensor& tensor, Reduction reduction) override {
    group_.all_reduce(tensor, reduction);
  }
  void all_gather(std::vector<at::Tensor>& pieces) override { group_.all_gather(pieces); }
  at::Tensor reduce_scatter(const std::vector<at::Tensor>& pieces) override {
    return group_.reduce_scatter(pieces);
  }
  void all_to_all(const std::vector<at::Tensor>& send, std::vector<at::Tensor>& receive) override {
    group_.all_to_all(send, receive);
  }
  void barrier() override { group_.barrier(); }
  std::unique_ptr<Message> send(const at::Tensor& tensor, int to, int tag) override {
    if (sides_[to] != sides_[rank()]) bytes_ += static_cast<int64_t>(tensor.nbytes());
    return group_.send(tensor, to, tag);
  }
  std::unique_ptr<Message> receive(at::Tensor& tensor, int from, int tag) override {
    return group_.receive(tensor, from, tag);
  }

 private:
  Communicator& group_;
  const std::vector<int>& sides_;  // [rank]
  std::atomic<int64_t>& bytes_;
};

// Stages send each other what the simulator says; the gradient of a parameter that two of them hold
// crosses once in each direction, however many devices need all of it.
TEST(Pipeline, SendsWhatIsSimulated) {
  Rng rng(23);
  int tied = 0, wide = 0, unequal = 0;
  for (int trial = 0; trial < 80; ++trial) {
    const Plan plan = random_pipeline(cases()[trial % 2], &rng);
    const PipelinePlan& pipeline = *plan.pipeline;
    if (pipeline.replicas.size() > 1 || pipeline.stages() < 2) continue;
    const std::vector<StagePlan>& stages = pipeline.replicas[0].stages;
    double expected = 0;
    for (const Exchange& e : simulate(plan).exchanges) {
      expected += e.count * e.bytes;
      if (!e.what.starts_with("gradients of tied")) continue;
      const Tied& t = pipeline.parts().tied[0];
      const size_t a = stages[t.stages[0]].devices.size(), b = stages[t.stages[1]].devices.size();
      ASSERT_EQ(t.stages.size(), 2U);
      const auto bytes = static_cast<double>(
          plan.graph->spec(plan.graph->parameters[t.parameter].gradient).bytes());
      EXPECT_NEAR(e.bytes, 2 * bytes, 1e-6 * bytes);
      ++tied;
      unequal += a != b;
      for (int s : t.stages) {
        const auto& held = pipeline.parts().parameter_of[s];
        const size_t i = std::find(held.begin(), held.end(), t.parameter) - held.begin();
        const ValueId v = pipeline.graph(s).parameters[i].value;
        wide += stages[s].devices.size() > 1 &&
                !stored_placements(pipeline.theory(s), stages[s].program)[v.index].is_shard();
      }
    }
    std::vector<int> sides(plan.cluster.size(), -1);
    for (int s = 0; s < pipeline.stages(); ++s)
      for (int d : stages[s].devices) sides[d] = s;
    std::atomic<int64_t> sent = 0;
    run_thread_group(plan.cluster.size(), [&](Communicator& group) {
      at::NoGradGuard no_grad;
      CountedGroup counted(group, sides, &sent);
      const auto worker = make_worker(plan, counted, {});
      step_once(plan, worker.get());
    });
    EXPECT_NEAR(static_cast<double>(sent), expected, 1e-6 * expected) << "trial " << trial;
  }
  // The draw covers what is special.
  EXPECT_GT(tied, 5);
  EXPECT_GT(unequal, 3);
  EXPECT_GT(wide, 3);
}

// A stage holds as many micro-batches as its warm-up count says, no more.
TEST(Pipeline, HoldsAsManyMicroBatchesAsPlanned) {
  Rng rng(21);
  for (int trial = 0; trial < 12; ++trial) {
    RandomPipeline what = cases()[3];
    what.shared = trial % 2 == 1;
    const Plan plan = random_pipeline(what, &rng);
    run_thread_group(plan.cluster.size(), [&](Communicator& group) {
      at::NoGradGuard no_grad;
      const auto worker = make_worker(plan, group, {});
      const std::vector<Seat> seats = plan.pipeline->seats(group.rank());
      step_once(plan, worker.get());
      if (seats.empty()) return;
      const ReplicaPlan& replica = plan.pipeline->replicas[seats[0].replica];
      if (seats.size() == 1) {
        const int stage = seats[0].stage;
        EXPECT_EQ(
            worker->most_in_flight(),
            std::min(replica.micro_batches, in_flight(replica, stage) + waiting(replica, stage)));
        return;
      }
      // All forward passes of the group's warm-up hold something, and never more is held.
      EXPECT_EQ(worker->most_in_flight(),
                std::min(replica.stages[seats[0].stage].warm_up,
                         static_cast<int>(seats.size()) * replica.micro_batches));
    });
  }
}

// Every change of one number or word in a plan file either leaves a plan that the checker judges or
// is refused with one line; nothing crashes.
TEST(Pipeline, HostileFilesAreRefusedInOneLine) {
  Rng rng(31);
  Plan plan = random_pipeline(cases()[3], &rng);
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
