// Plans of other planners: what a file says is in the plan, what cannot be is refused with its place,
// and plans of ours that are written as such a file come back.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "capture/capture.h"
#include "core/error.h"
#include "core/printable.h"
#include "export/plan_files.h"
#include "graph/canonical.h"
#include "mutate_text.h"
#include "planner/planner.h"
#include "planner/program_plan.h"
#include "sim/simulate.h"

namespace motley {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string file_of(const std::string& name) {
  return read_file(std::string(MOTLEY_SOURCE_DIR) + "/tests/" + name);
}

Cluster of_devices(int count) {
  return parse_cluster(
      fmt::format("name: some\nlink: {{bandwidth: 10 GB/s, latency: 10 us}}\ngroups:\n  - {{name: "
                  "node, link: {{bandwidth: 10 GB/s, latency: 10 us}}, "
                  "devices: [{{type: V100-16GB, count: {}}}]}}\n",
                  count),
      "some");
}

std::shared_ptr<planner::BatchStep> small_step() {
  static const auto step = std::make_shared<planner::BatchStep>(
      parse_graph(file_of("data/graphs/mlp2.txt"), "mlp2.txt"), 32);
  return step;
}

PlanFile read(const Json& json, const Cluster& cluster, std::shared_ptr<planner::BatchStep> step,
              const std::string& model = "mlp") {
  planner::PlanOptions options;
  options.model = model;
  options.batch = step->batch();
  const std::string name = "sharding.json";
  return plan_reader_of(json, name).read({name, json, cluster, std::move(step), options});
}

Json golden(const std::string& name) {
  return parse_json(file_of("corpus/autoparallel/" + name + ".json"), name);
}

void expect_refused(const Json& json, const std::string& why, int devices = 4) {
  try {
    read(json, of_devices(devices), small_step());
    ADD_FAILURE() << "taken, though: " << why;
  } catch (const UserError& e) {
    EXPECT_THAT(e.what(), HasSubstr("sharding.json"));
    EXPECT_THAT(e.what(), HasSubstr(why));
    EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos);
  }
}

// How a program stores parameters and makes the results of products.
std::string held(const Theory& theory, const Program& program) {
  std::string text;
  const std::vector<Placement> stored = stored_placements(theory, program);
  for (const Parameter& p : theory.graph().parameters)
    text += to_string(stored[p.value.index]) + " ";
  for (const Step& step : program.steps)
    if (step.is_compute() && !step.again) {
      const std::string& op = theory.graph().node(step.node).op;
      if (op.ends_with("mm"))
        text += fmt::format("{}:{} ", op.substr(6),
                            to_string(theory.triples(step.node)[step.triple].out[0]));
    }
  return text;
}

TEST(PlanFiles, HoldWhatTheySay) {
  const std::pair<const char*, const char*> wanted[] = {
      {"data-4", "R R R R addmm:S(0) addmm:S(0) mm:S(0) mm:P mm:P "},
      {"pieces-4", "S(0) S(0) S(0) S(0) addmm:S(0) addmm:S(0) mm:S(0) mm:P mm:P "},
      {"tensors-4", "S(0) S(0) S(1) R addmm:S(1) addmm:P mm:S(1) mm:S(1) mm:S(0) "}};
  for (const auto& [name, text] : wanted) {
    const PlanFile file = read(golden(name), of_devices(4), small_step());
    EXPECT_EQ(held(*file.plan->theory, file.plan->program), text) << name;
    EXPECT_THAT(check(*file.plan), IsEmpty());
    EXPECT_THAT(file.differences, IsEmpty());
    EXPECT_EQ(file.what,
              "one program of 4 devices, 4 parameters and 5 of 5 products are held as it says");
    EXPECT_NEAR(file.own_s, 45.1e-6, 1e-12);
    EXPECT_DOUBLE_EQ(file.plan->predicted_step_s, simulate(*file.plan).step);
  }
}

TEST(PlanFiles, DimensionsThatTakeRowsAreReplicas) {
  const PlanFile file = read(golden("pieces-tensors-2x2"), of_devices(4), small_step());
  ASSERT_TRUE(file.plan->pipeline);
  const PipelinePlan& pipeline = *file.plan->pipeline;
  ASSERT_EQ(pipeline.replicas.size(), 2);
  EXPECT_EQ(pipeline.replicas[0].stages[0].devices, (std::vector<int>{0, 1}));
  EXPECT_EQ(pipeline.replicas[1].stages[0].devices, (std::vector<int>{2, 3}));
  EXPECT_EQ(pipeline.level(0), 2);
  for (const ReplicaPlan& replica : pipeline.replicas)
    EXPECT_EQ(held(pipeline.theory(0), replica.stages[0].program),
              "S(0) S(0) S(1) R addmm:S(1) addmm:P mm:S(1) mm:S(1) mm:S(0) ");
  EXPECT_THAT(check(*file.plan), IsEmpty());
}

// A mesh with its dimensions the other way round, and one with dimensions that say the same.
TEST(PlanFiles, MeshesAreReadInAnyOrder) {
  Json turned = golden("pieces-tensors-2x2"), doubled = golden("data-4");
  for (Json& node : turned["nodes"])
    if (node.contains("placement")) {
      const std::string text = node["placement"];
      const size_t cut = text[0] == 'S' ? 4 : text[0] == 'P' ? 6 : 1;
      node["placement"] = text.substr(cut) + text.substr(0, cut);
    }
  const PlanFile other = read(turned, of_devices(4), small_step());
  ASSERT_TRUE(other.plan->pipeline);
  EXPECT_EQ(other.plan->pipeline->replicas[0].stages[0].devices, (std::vector<int>{0, 2}));
  doubled["mesh"]["shape"] = {2, 1, 2};
  for (Json& node : doubled["nodes"])
    if (node.contains("placement")) {
      const std::string text = node["placement"];
      node["placement"] = text + "R" + text;
    }
  const PlanFile whole = read(doubled, of_devices(4), small_step());
  EXPECT_FALSE(whole.plan->pipeline);
  EXPECT_DOUBLE_EQ(whole.plan->predicted_step_s,
                   read(golden("data-4"), of_devices(4), small_step()).plan->predicted_step_s);
}

// Of a tensor that both dimensions cut, the replicas' pieces are of the program's, in both notations;
// the other way round a program would have pieces.
TEST(PlanFiles, StridedShardsOfReplicasAreEvaluated) {
  const char* const name = "pieces-tensors-2x2";
  const PlanFile plain = read(golden(name), of_devices(4), small_step());
  const auto with = [&](const std::string& both) {
    Json json = golden(name);
    int changed = 0;
    for (Json& node : json["nodes"])
      if (node.contains("placement") && node["placement"] == "S(0)S(0)") {
        node["placement"] = both;
        ++changed;
      }
    EXPECT_GT(changed, 0);
    return json;
  };
  for (const char* both : {"_S(0, 2)S(0)", "_S(0,2)S(0)", "S(0)[1]S(0)[0]"}) {
    SCOPED_TRACE(both);
    const PlanFile file = read(with(both), of_devices(4), small_step());
    ASSERT_TRUE(file.plan->pipeline);
    EXPECT_EQ(
        held(file.plan->pipeline->theory(0), file.plan->pipeline->replicas[0].stages[0].program),
        held(plain.plan->pipeline->theory(0), plain.plan->pipeline->replicas[0].stages[0].program));
    EXPECT_DOUBLE_EQ(file.plan->predicted_step_s, plain.plan->predicted_step_s);
    EXPECT_THAT(file.differences,
                ::testing::Contains(HasSubstr("cut over replicas in strided pieces")));
  }
  // In the order of the mesh none is strided.
  EXPECT_EQ(read(with("S(0)[0]S(0)[1]"), of_devices(4), small_step()).differences,
            plain.differences);
  expect_refused(with("S(0)_S(0, 2)"), "dimension 1 of the mesh cuts pieces of another one");
}

// As `nodes` of such a file.
Json written(const Plan& plan) {
  const Graph& graph = *plan.graph;
  const std::vector<Placement> stored = stored_placements(*plan.theory, plan.program);
  const auto text = [](Placement p) { return p.is_partial() ? "P(sum)" : to_string(p); };
  Json nodes = Json::array();
  const auto add = [&](const std::string& name, const std::string& op, ValueId value, Placement p,
                       bool backward) {
    nodes.push_back({{"name", name},
                     {"op", op},
                     {"phase", backward ? "backward" : "forward"},
                     {"placement", text(p)},
                     {"shape", graph.spec(value).shape}});
  };
  for (const Parameter& p : graph.parameters)
    add("primals", "placeholder", p.value, stored[p.value.index], false);
  for (const Input& i : graph.inputs)
    add("primals", "placeholder", i.value, stored[i.value.index], false);
  std::vector<Placement> made(graph.nodes.size());
  for (const Step& step : plan.program.steps)
    if (step.is_compute() && !step.again)
      if (const Triple& t = plan.theory->triples(step.node)[step.triple]; !t.out.empty())
        made[step.node.index] = t.out[0];
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    const Node& node = graph.nodes[n];
    if (is_source(node) || node.outputs.empty() || !node.outputs[0].valid()) continue;
    if (made[n].is_shard() && made[n].factor > 0) continue;  // which has no letter
    const size_t dot = node.op.str().find('.');
    add("node", "aten." + node.op.str().substr(6) + (dot == std::string::npos ? ".default" : ""),
        node.outputs[0], made[n], node.phase == Phase::backward);
  }
  return {{"mesh", {{"shape", {plan.cluster.size()}}, {"dim_names", nullptr}}},
          {"nodes", nodes},
          {"summary", {{"total", 3}, {"comm", 1}, {"compute", 2}, {"transition", 0}}}};
}

// Strategies of ours, written as a file of autoparallel: no slower when they come back.
TEST(PlanFiles, PlansOfOursComeBack) {
  const char* models[] = {"mlp:layers=3,in=32,hidden=64,classes=8",
                          "llama:layers=2,hidden=32,heads=4,kv_heads=4,ffn=64,seq=8,vocab=64"};
  for (const char* model : models) {
    const auto step =
        std::make_shared<planner::BatchStep>(canonicalize(capture(model, 16).graph), 16);
    for (const char* strategy : {"dp-ev", "zero", "tensor-parallel"}) {
      SCOPED_TRACE(fmt::format("{} {}", model, strategy));
      planner::ProgramRequest request;
      request.batch = 16;
      request.baselines = false;
      request.strategy = strategy;
      request.alternation.certify = false;
      const planner::ProgramResult ours = planner::plan_program(step, of_devices(4), request);
      ASSERT_TRUE(ours.feasible) << ours.reason;
      const PlanFile again = read(written(ours.plan), of_devices(4), step, model);
      const auto parameters = [](const Plan& plan) {
        std::vector<Placement> list;
        for (const Parameter& p : plan.graph->parameters)
          list.push_back(stored_placements(*plan.theory, plan.program)[p.value.index]);
        return list;
      };
      EXPECT_EQ(parameters(*again.plan), parameters(ours.plan));
      const bool all = again.what.find("8 of 8 products") != std::string::npos;
      if (all) {
        EXPECT_EQ(held(*again.plan->theory, again.plan->program),
                  held(*ours.plan.theory, ours.plan.program));
      }
      EXPECT_TRUE(all || model[0] == 'l') << again.what;
      std::printf("%s %s: %s; %.4f of our time\n", model, strategy, again.what.c_str(),
                  again.plan->predicted_step_s / simulate(ours.plan).step);
      EXPECT_LE(again.plan->predicted_step_s, simulate(ours.plan).step * 1.01);
    }
  }
}

TEST(PlanFiles, WhatCannotBeSaidIsRefused) {
  const auto changed = [](const char* pointer, const Json& value, const char* name = "data-4") {
    Json json = golden(name);
    json[Json::json_pointer(pointer)] = value;
    return json;
  };
  expect_refused(golden("data-4"), "mesh.shape [4] is of 4 devices", 8);
  expect_refused({{"mesh", 1}}, "is no plan of another planner");
  expect_refused(changed("/mesh/shape", 4), "mesh.shape is 4; give the sizes of");
  expect_refused(changed("/mesh/shape", {4, 1}), "the mesh has 2 dimensions; give one letter for");
  expect_refused(changed("/mesh/shape/0", -4), "mesh.shape[0] is -4; give a whole number from 1");
  expect_refused(changed("/mesh/shape", {131072, 131072}), "131072 devices at most");
  expect_refused(changed("/nodes", Json::array()), "nodes are 0; give an array");
  expect_refused(changed("/nodes/0/shape/1", 65),
                 "nodes[0] (primals_1).shape: is [128, 65], parameter 0 of the model, "
                 "hidden0.weight, is [128, 64]; give --model");
  expect_refused(changed("/nodes/0/placement", "S(2)"), "the tensor has 2 dimensions");
  expect_refused(changed("/nodes/0/placement", "Q(0)"), "motley reads R, S(d), _S(d, pieces) and");
  expect_refused(changed("/nodes/0/placement", "_S(0, 0)"),
                 "a strided shard is of pieces; give _S");
  expect_refused(changed("/nodes/0/placement", "_S(2, 2)"),
                 "the tensor has 2 dimensions; give one");
  expect_refused(changed("/nodes/0/placement", "S(0)[a]"), "the order of cuts is a number; give");
  expect_refused(changed("/nodes/0/placement", "_S(0, 2)"),
                 "dimension 0 of the mesh cuts pieces of another one (a strided shard)");
  expect_refused(changed("/nodes/0/placement", "P(sum)"), "is held in partial sums");
  expect_refused(changed("/nodes/6/placement", "P(max)"), "motley's partial results are sums");
  expect_refused(changed("/nodes/6/phase", "sideways"), "phase is 'sideways'");
  expect_refused(changed("/nodes/4/shape/0", 64),
                 "no placeholder behind the parameters is [32, 64]");
  expect_refused(changed("/summary/comm", -1), "summary.comm is -1; give microseconds");
  expect_refused(changed("/nodes/6/placement", "S(1)R", "pieces-tensors-2x2"),
                 "dimensions 0 and 1 of the mesh both divide other things than rows", 4);
  Json few = golden("data-4");
  for (const int n : {4, 3}) few["nodes"].erase(n);
  expect_refused(few, "nodes have 3 placeholders, the model has 4 parameters");
}

TEST(PlanFiles, DamagedFilesAreReadOrRefused) {
  int taken = 0, refused = 0;
  for (const char* name : {"data-4", "pieces-4", "tensors-4", "pieces-tensors-2x2"}) {
    const std::string text = file_of(fmt::format("corpus/autoparallel/{}.json", name));
    for (uint64_t i = 0; i < 100; ++i) {
      SCOPED_TRACE(fmt::format("{} {}", name, i));
      try {
        const Json json = parse_json(mutated_text(text, mix64(i)), "sharding.json");
        EXPECT_THAT(check(*read(json, of_devices(4), small_step()).plan, false), IsEmpty());
        ++taken;
      } catch (const UserError& e) {
        EXPECT_EQ(printable(e.what(), /*line=*/true).find('\n'), std::string::npos);
        ++refused;
      }
    }
  }
  EXPECT_GT(taken, 20);
  EXPECT_GT(refused, 100);
}

}  // namespace
}  // namespace motley
