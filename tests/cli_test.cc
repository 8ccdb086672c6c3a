// The command line as users and scripts see it: fields of --json, exit codes, and one clear line
// for every mistake.
#include "cli.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <map>
#include <set>

#include "core/file.h"
#include "core/units.h"

namespace motley {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
namespace fs = std::filesystem;

TEST_F(Cli, HelpAndVersion) {
  for (const char* option : {"--help", "--version", "plan --help"}) {
    const Outcome o = motley(option);
    EXPECT_EQ(o.code, 0) << option;
    EXPECT_THAT(o.out, HasSubstr("motley")) << option;
    EXPECT_EQ(o.err, "") << option;
  }
}

// One program and a pipeline, both in bf16: recorded, described, run as one device runs it. Where
// memory is short, blocks are computed again.
TEST_F(Cli, PrecisionAndRecomputation) {
  const std::string model = "gpt:layers=2,hidden=32,heads=4,vocab=64,seq=16";
  for (const char* engine : {"--engine spmd", "--engine grid --fix pp=2,dp=2"}) {
    SCOPED_TRACE(engine);
    const Outcome made =
        motley(fmt::format("plan {} --cluster local-mixed-4 --batch 8 --precision bf16 {} -o {}",
                           model, engine, path("bf16.json")));
    ASSERT_EQ(made.code, 0) << made.err;
    EXPECT_THAT(made.out, HasSubstr("precision   bf16"));
    EXPECT_EQ(parse_json(read_file(path("bf16.json")), "plan")["precision"], "bf16");
    for (const char* dtype : {"f64", "bf16"}) {
      const Outcome verified =
          motley(fmt::format("verify {} --dtype {} --json", path("bf16.json"), dtype));
      ASSERT_EQ(verified.code, 0) << verified.err;
      EXPECT_EQ(verified.json()["equivalent"], true);
    }
  }
  ASSERT_EQ(motley("plan mlp --cluster local-mixed-4 --batch 8 --engine spmd --precision fp16 -o " +
                   path("f16.json"))
                .code,
            0);
  expect_mistake("run " + path("f16.json"), "plan with --precision bf16");
  expect_mistake("verify " + path("f16.json") + " --dtype bf16", "computes in f16, not bf16");

  std::string cluster = read_file(std::string(MOTLEY_SOURCE_DIR) + "/clusters/local-mixed-4.yaml");
  for (const char* memory : {"memory: 2 GiB", "memory: 1 GiB"}) {
    const size_t at = cluster.find(memory);
    ASSERT_NE(at, std::string::npos);
    cluster.replace(at, std::string(memory).size(), "memory: 5 MiB");
  }
  write_file(path("small.yaml"), cluster);
  const std::string deep =
      "plan gpt:layers=6,hidden=32,heads=4,vocab=64,seq=64 --batch 16 --engine spmd --cluster " +
      path("small.yaml");
  // In one pass, and in several micro-batches, of which nothing has to be computed again.
  EXPECT_EQ(motley(deep + " --micro-batch 16 --recompute off").code, 3);
  const Outcome parts = motley(deep + " --recompute off");
  ASSERT_EQ(parts.code, 0) << parts.err;
  EXPECT_THAT(parts.out, Not(HasSubstr("recomputes")));
  EXPECT_THAT(parts.out, HasSubstr("1 replica, micro-batches of"));
  const Outcome lean = motley(deep + " --micro-batch 16 -o " + path("lean.json"));
  ASSERT_EQ(lean.code, 0) << lean.err;
  EXPECT_THAT(lean.out, HasSubstr("recomputes"));
  EXPECT_EQ(motley("check " + path("lean.json")).code, 0);
  const Outcome verified = motley("verify " + path("lean.json") + " --json");
  ASSERT_EQ(verified.code, 0) << verified.err;
  EXPECT_LT(verified.json()["gradient_error"].get<double>(), 1e-9);
}

TEST_F(Cli, CapturePlanCheckSimulate) {
  Outcome models = motley("models --json");
  ASSERT_EQ(models.code, 0) << models.err;
  const Json listed = models.json();
  for (const Json& m : listed["models"]) EXPECT_TRUE(m.contains("name") && m.contains("params"));

  Outcome capture =
      motley("capture mlp:layers=2,hidden=64,in=16 --batch 16 --json -o " + path("g.json"));
  ASSERT_EQ(capture.code, 0) << capture.err;
  for (const char* field : {"nodes", "parameters", "parameter_bytes", "flops", "capture_s"})
    EXPECT_TRUE(capture.json().contains(field)) << field;

  Outcome plan =
      motley(fmt::format("plan {} --cluster hap-a100-p100 --engine spmd --batch 16 --json -o {}",
                         path("g.json"), path("p.json")));
  ASSERT_EQ(plan.code, 0) << plan.err;
  Json j = plan.json();
  for (const char* field :
       {"engine", "predicted_step_s", "lower_bound_s", "gap", "search_s", "peak_memory_bytes",
        "baselines", "candidates", "ratios", "schedule", "stop_reason"})
    EXPECT_TRUE(j.contains(field)) << field;
  EXPECT_EQ(j["ratios"].size(), 4u);
  EXPECT_EQ(j["peak_memory_bytes"].size(), 4u);
  EXPECT_LE(j["lower_bound_s"].get<double>(), j["predicted_step_s"].get<double>());
  // A zoo model and its captured graph give the same plan.
  Outcome again = motley(
      "plan mlp:layers=2,hidden=64,in=16 --engine spmd --cluster hap-a100-p100 --batch 16 --json");
  EXPECT_EQ(again.json()["predicted_step_s"], j["predicted_step_s"]);

  Outcome check = motley("check --json " + path("p.json"));
  EXPECT_EQ(check.code, 0) << check.err;
  EXPECT_EQ(check.json()["valid"], true);

  Outcome simulate =
      motley(fmt::format("simulate --json {} --trace {}", path("p.json"), path("t.json")));
  ASSERT_EQ(simulate.code, 0) << simulate.err;
  // So small a model is faster on some of the devices; the others have nothing.
  size_t used = 0;
  for (const Json& ratio : j["ratios"]) used += ratio.get<double>() > 0;
  EXPECT_EQ(simulate.json()["devices"].size(), used);
  for (const char* field : {"busy_s", "comm_s", "exposed_comm_s", "idle_s", "peak_memory_bytes"})
    EXPECT_TRUE(simulate.json()["devices"][0].contains(field)) << field;
  EXPECT_TRUE(parse_json(read_file(path("t.json")), "t").contains("traceEvents"));

  // Every device adds up to the step.
  Json s = simulate.json();
  for (const Json& d : s["devices"])
    EXPECT_NEAR(
        d["busy_s"].get<double>() + d["exposed_comm_s"].get<double>() + d["idle_s"].get<double>(),
        s["step_s"].get<double>(), 1e-9);
}

TEST_F(Cli, MistakesAreOneLine) {
  expect_mistake("run /no.json --device cuda",
                 "torchrun --nproc_per_node=N -m motley.run /no.json");
  expect_mistake("plan mlp --cluster nowhere --batch 8",
                 "'nowhere' is neither a file nor a shipped cluster");
  write_file(path("c.yaml"), "link: {bandwidth: 1 GB/s}\ndevices: [{type: T5}]\n");
  expect_mistake("plan mlp --batch 8 --cluster " + path("c.yaml"),
                 "c.yaml: devices[0].type is 'T5', which is not a known device type");
  write_file(path("c.yaml"), "link: {bandwidth: [}");
  expect_mistake("plan mlp --batch 8 --cluster " + path("c.yaml"), "c.yaml: line 1");
  expect_mistake("plan nomodel --cluster hap-64 --batch 8", "nomodel");
  expect_mistake("plan gpt:layers=0 --cluster hap-64 --batch 8", "layers");
  expect_mistake("plan gpt:depth=3 --cluster hap-64 --batch 8", "depth");
  expect_mistake("plan gpt:hidden=100,heads=12 --cluster hap-64 --batch 8", "heads");
  expect_mistake("plan mlp --cluster hap-64 --batch 0", "--batch");
  for (const char* seed : {"-1", "1.5", "1e3", "99999999999999999999"})
    expect_mistake(fmt::format("plan mlp --cluster hap-64 --batch 8 --seed {}", seed),
                   fmt::format("--seed: is '{}'; give a whole number from 0 on", seed));
  expect_mistake("plan mlp --cluster local-mixed-4 --batch 16 --engine spmd --fix pp=2",
                 "fixed choices (--fix) are of the grid engine");
  expect_mistake("plan mlp --cluster hap-64", "--batch is missing; give the number of samples");
  expect_mistake("check " + path("none.json"), "No such file");
  write_file(path("p.json"), "{\"motley_plan\": 1}");
  expect_mistake("check " + path("p.json"), "field 'engine' is missing");
  write_file(path("p.json"), "not json");
  expect_mistake("simulate " + path("p.json"), "not valid JSON");
  expect_mistake("report " + path("p.json") + " -o " + path("p.html"), "not valid JSON");
  expect_mistake("run " + path("p.json") + " --steps 1", "not valid JSON");
  expect_mistake("capture mlp -o /nonexistent/g.json", "cannot write");
  expect_mistake("frobnicate", "frobnicate");
}

TEST_F(Cli, NoPlanFitsIsThree) {
  Outcome o = motley("plan gpt:layers=48,hidden=8192,heads=64 --cluster hap-a100-p100 --batch 8");
  EXPECT_EQ(o.code, 3);
  EXPECT_THAT(o.err, HasSubstr("lacks"));
  EXPECT_THAT(o.err, HasSubstr("no plan"));
  EXPECT_FALSE(fs::exists(path("none")));
}

TEST_F(Cli, EditedPlansAreChecked) {
  ASSERT_EQ(
      motley(
          "plan mlp:layers=2,hidden=64,in=16 --cluster hap-a100-p100 --engine spmd --batch 16 -o " +
          path("p.json"))
          .code,
      0);
  Json j = parse_json(read_file(path("p.json")), "p");
  Json shorter = j;
  shorter["program"].erase(shorter["program"].size() - 1);
  write_file(path("q.json"), shorter.dump());
  Outcome o = motley("check --json " + path("q.json"));
  EXPECT_EQ(o.code, 2);
  EXPECT_EQ(o.json()["valid"], false);
  EXPECT_GE(o.json()["problems"].size(), 1u);
  EXPECT_EQ(motley("run " + path("q.json") + " --steps 1").code, 2);
  EXPECT_FALSE(fs::exists(path("none")));
}

TEST_F(Cli, PlansOfGraphFilesNeedNoLibtorch) {
  ASSERT_EQ(motley("capture mlp:layers=2,hidden=64,in=16 --batch 16 -o " + path("g.json")).code, 0);
  const std::string plan = "plan " + path("g.json") + " --cluster hap-64 --batch 48 --json";
  const Outcome all = motley(plan), pipeline = motley(plan + " --engine pipeline");
  ASSERT_EQ(all.code, 0) << all.err;
  EXPECT_GT(all.json()["candidates"].size(), 2u);
  ASSERT_EQ(pipeline.code, 0) << pipeline.err;
  // The same as from the model itself.
  const Outcome zoo =
      motley("plan mlp:layers=2,hidden=64,in=16 --cluster hap-64 --batch 48 --json");
  EXPECT_EQ(all.json()["predicted_step_s"], zoo.json()["predicted_step_s"]);
  // Of the batch that was captured, unless another is asked for.
  const Outcome captured =
      motley("plan " + path("g.json") + " --cluster hap-64 --engine spmd -o " + path("p.json"));
  ASSERT_EQ(captured.code, 0) << captured.err;
  EXPECT_EQ(parse_json(read_file(path("p.json")), "p")["batch"], 16);
  // A file of one batch is of a step, which pipelines divide.
  Json file = parse_json(read_file(path("g.json")), "g.json");
  file.erase("other");
  write_file(path("one.json"), file.dump());
  const std::string one = "plan " + path("one.json") + " --cluster hap-64 --batch ";
  expect_mistake(one + "17", "field 'batch' is 16; give --batch 16");
  const Outcome parts = motley(one + "16 --micro-batch 4 --engine pipeline --json");
  ASSERT_EQ(parts.code, 0) << parts.err;
  EXPECT_EQ(parts.json()["schedule"]["micro_batch"], 4);
  expect_mistake(one + "64 --engine pipeline", "field 'batch' is 16");
  expect_mistake(one + "16 --micro-batch 7 --engine pipeline",
                 "--batch 16 is not a multiple of micro-batches of 7");
}

// The text of a plan, its JSON and its simulation give one number, also where gradients are hidden.
TEST_F(Cli, OnePredictionForOnePlan) {
  for (const char* what :
       {"gpt:layers=4,hidden=256,heads=8,seq=128,vocab=1000 --cluster hap-a100-p100 "
        "--batch 64 --engine spmd",
        "mlp:layers=6,hidden=512 --cluster local-mixed-4 --batch 64 --engine grid"}) {
    const std::string command = std::string("plan ") + what;
    const Json found = motley(command + " --json -o " + path("one.json")).json();
    const double step = found["predicted_step_s"];
    EXPECT_NE(motley(command).out.find("predicted   " + format_seconds(step) + " a step"),
              std::string::npos)
        << motley(command).out;
    EXPECT_NEAR(motley("simulate --json " + path("one.json")).json()["step_s"], step, 1e-9 * step);
  }
}

// Where gradients and activations are reduced over groups that cross the nodes, the axes are
// numbered anew by what the plan's own programs send, and the simulator chooses.
TEST_F(Cli, AxesOfGridsArePlacedJointly) {
  for (const char* what : {"mlp:layers=6,hidden=4096,in=4096 --batch 64 --cluster amp-v100x16 "
                           "--engine grid --fix pp=1,dp=4,tp=4,zero=0",
                           "gpt:layers=4,hidden=1024,heads=16,seq=64 --batch 16 "
                           "--cluster amp-v100x16 --engine grid --fix pp=1,dp=4,tp=4,zero=0"}) {
    const Outcome plan = motley(std::string("plan --json ") + what + " -o " + path("j.json"));
    ASSERT_EQ(plan.code, 0) << plan.err;
    const Json candidates = plan.json()["candidates"];
    std::map<std::string, double> seconds;
    for (const Json& c : candidates) seconds[c["what"]] = c["simulated_step_s"].get<double>();
    int faster = 0;
    for (const auto& [name, step] : seconds)
      if (auto jointly = seconds.find(name + " placed jointly"); jointly != seconds.end())
        faster += jointly->second < 0.97 * step;
    EXPECT_GT(faster, 0) << what;
    EXPECT_EQ(motley("check " + path("j.json")).code, 0);
  }
}

// Machines as single devices are planned for beside one program over all devices or some of them,
// and the fastest is chosen.
TEST_F(Cli, VirtualDevices) {
  auto planned = [&](const std::string& what, const std::string& options) {
    const Outcome o = motley("plan " + what + " --json " + options);
    EXPECT_EQ(o.code, 0) << what << options << "\n" << o.err;
    return o.json();
  };
  const std::string some = "mlp:layers=8,hidden=2048,in=512 --cluster hap-64 --batch 512 ",
                    all = "vit:layers=2 --cluster hap-64 --batch 512 ";
  const double one = planned(some, "--engine spmd")["predicted_step_s"];
  const Json forced = planned(some, "--virtual-devices machine -o " + path("v.json"));
  EXPECT_EQ(forced["engine"], "virtual");
  EXPECT_EQ(motley("check " + path("v.json")).code, 0);
  EXPECT_NEAR(motley("simulate --json " + path("v.json")).json()["step_s"].get<double>(),
              forced["predicted_step_s"].get<double>(), 1e-12);
  const Json chosen = planned(some, ""), off = planned(some, "--virtual-devices off");
  EXPECT_LE(chosen["predicted_step_s"].get<double>(),
            std::min(one, forced["predicted_step_s"].get<double>()) * (1 + 1e-9));
  // They are planned where others are not much faster.
  const Json near =
      planned("mlp:layers=8,hidden=512,in=512 --cluster hap-64 --batch 4096 ", "--time-limit 100");
  int candidates = 0;
  for (const Json& c : near["candidates"]) candidates += c["engine"] == "virtual";
  EXPECT_GT(candidates, 0);
  for (const Json& c : off["candidates"]) EXPECT_NE(c["engine"], "virtual");
  EXPECT_NE(planned(all, "")["engine"], "virtual");
  EXPECT_GT(planned(all, "--virtual-devices 8")["predicted_step_s"].get<double>(),
            planned(all, "--engine spmd")["predicted_step_s"].get<double>());
  // Run: as one device.
  const std::string small =
      "plan gpt:layers=2,hidden=32,heads=4,seq=8,vocab=64 --batch 8 --cluster ";
  ASSERT_EQ(motley(small + "local-mixed-4 --virtual-devices 2 -o " + path("v.json")).code, 0);
  const Outcome verify = motley("verify --json " + path("v.json"));
  ASSERT_EQ(verify.code, 0) << verify.err;
  EXPECT_LT(verify.json()["gradient_error"].get<double>(), 1e-9);
  expect_mistake(small + "local-mixed-4 --virtual-devices two", "--virtual-devices is 'two'");
  expect_mistake(small + "local-mixed-4 --virtual-devices 3", "give a divisor of 2");
  expect_mistake(small + "hap-64 --virtual-devices 16", "give a divisor of 8");
  expect_mistake("plan mlp --batch 7 --cluster hap-64 --virtual-devices machine", "--batch 7");
  expect_mistake(small + "hap-64 --virtual-devices 2 --engine spmd",
                 "cannot be combined with an engine");
}

// Replicas that divide experts are one stage group, whose program is searched.
TEST_F(Cli, ExpertParallelGridsArePlans) {
  const std::string what =
      "plan bert-moe:layers=2,hidden=32,heads=4,experts=4,every=1,seq=8,vocab=64 --cluster "
      "local-mixed-4 "
      "--batch 8 --json -o " +
      path("p.json") + " --fix pp=1,tp=1,mbs=1,";
  for (const char* fix : {"dp=4,ep=4", "dp=2,cp=2,ep=2", "dp=4,ep=2"}) {
    const Outcome plan = motley(what + fix);
    ASSERT_EQ(plan.code, 0) << fix << ": " << plan.err;
    const Json schedule = plan.json()["schedule"];
    EXPECT_EQ(schedule["replicas"].size(), fix == std::string("dp=4,ep=4") ? 1u : 2u);
    const Outcome verify = motley("verify --json " + path("p.json"));
    ASSERT_EQ(verify.code, 0) << fix << ": " << verify.err;
    EXPECT_TRUE(verify.json()["equivalent"].get<bool>());
  }
  EXPECT_EQ(motley(what + "dp=4,ep=3").code, 3);
}

// Plans of every engine are plans: planned, checked, simulated, verified and trained by.
TEST_F(Cli, PipelinesAndGridsAreOrdinaryPlans) {
  const std::string model = "gpt:layers=2,hidden=32,heads=4,seq=8,vocab=64",
                    where = " --cluster local-mixed-4 --batch 8 --json ";
  Outcome one = motley("plan " + model + " --engine spmd" + where + "-o " + path("one.json"));
  ASSERT_EQ(one.code, 0) << one.err;
  Outcome reference = motley("run --json --steps 3 --lr 0.01 " + path("one.json"));
  ASSERT_EQ(reference.code, 0) << reference.err;
  for (const std::string& engine :
       {std::string("--engine pipeline"), std::string("--fix pp=2,dp=1,tp=2,mbs=2"),
        std::string("--fix pp=2,dp=1,tp=2,mbs=1,interleave=2"),
        std::string("--fix pp=2,dp=1,tp=1,cp=2,mbs=2")}) {
    Outcome plan = motley("plan " + model + " " + engine + where + "-o " + path("p.json"));
    ASSERT_EQ(plan.code, 0) << plan.err;
    EXPECT_FALSE(plan.json()["schedule"].is_null());
    const double step = plan.json()["predicted_step_s"], bound = plan.json()["lower_bound_s"];
    EXPECT_GT(bound, 0);
    EXPECT_LT(bound, step);
    EXPECT_NEAR(plan.json()["gap"].get<double>(), 1 - bound / step, 1e-9);
    Outcome check = motley("check --json " + path("p.json"));
    EXPECT_EQ(check.code, 0) << check.err;
    Outcome simulate = motley("simulate --json " + path("p.json"));
    ASSERT_EQ(simulate.code, 0) << simulate.err;
    EXPECT_NEAR(simulate.json()["step_s"].get<double>(),
                plan.json()["predicted_step_s"].get<double>(), 1e-12);
    Outcome report =
        motley("report --json --time-limit 1 " + path("p.json") + " -o " + path("p.html"));
    ASSERT_EQ(report.code, 0) << report.err;
    EXPECT_EQ(report.json()["path"], path("p.html"));
    EXPECT_THAT(read_file(path("p.html")), HasSubstr("as predicted when planned"));
    const Json simulated = simulate.json();
    for (const Json& d : simulated["devices"])
      EXPECT_NEAR(
          d["busy_s"].get<double>() + d["exposed_comm_s"].get<double>() + d["idle_s"].get<double>(),
          simulate.json()["step_s"].get<double>(), 1e-9);
    Outcome verify = motley("verify --json " + path("p.json"));
    EXPECT_EQ(verify.code, 0) << verify.err;
    Outcome emulated = motley("verify --json --emulate " + path("p.json"));
    ASSERT_EQ(emulated.code, 0) << emulated.err;
    EXPECT_TRUE(emulated.json()["emulated"].get<bool>());
    EXPECT_LT(emulated.json()["gradient_error"].get<double>(), 1e-9);
    Outcome run = motley("run --json --steps 3 --lr 0.01 " + path("p.json"));
    ASSERT_EQ(run.code, 0) << run.err;
    for (int i = 0; i < 3; ++i)
      EXPECT_NEAR(run.json()["steps"][i]["loss"].get<double>(),
                  reference.json()["steps"][i]["loss"].get<double>(), 2e-5);
  }
  Outcome all = motley("plan " + model + where);
  ASSERT_EQ(all.code, 0) << all.err;
  std::set<std::string> engines;
  double least = 1e300;
  const Json candidates = all.json()["candidates"];
  for (const Json& c : candidates) {
    engines.insert(c["engine"]);
    least = std::min(least, c["simulated_step_s"].get<double>());
  }
  EXPECT_EQ(engines.size(), 4u);  // with the best opponent; virtual devices are far slower
  EXPECT_EQ(candidates[0]["simulated_step_s"].get<double>(), least);
  expect_mistake("plan " + model + " --fix pp=x" + where, "pp=x");
}

// Layers of a tiny model are measured on workers by themselves and on equal and unequal ones
// together, and a plan is made and run by them.
TEST_F(Cli, CalibrateStages) {
  write_file(path("two.yaml"), R"(
name: two
link: {bandwidth: 1 Gbps, latency: 100 us}
devices: [{type: fast, count: 2}, {type: slow}]
device_types:
  - {name: fast, like: cpu-core, flops: 20 GFLOPS, memory: 2 GiB, speed: 0.4}
  - {name: slow, like: cpu-core, flops: 10 GFLOPS, memory: 2 GiB, speed: 0.2}
)");
  const std::string model = "mlp:layers=6,hidden=64,in=64,classes=64";
  Outcome o = motley(fmt::format(
      "calibrate --cluster {0} --emulate --stages --model {1} --batch 8 --micro-batch 4 -o {2} "
      "--json",
      path("two.yaml"), model, path("two.profile")));
  ASSERT_EQ(o.code, 0) << o.err;
  std::map<std::string, std::set<std::string>> shapes;  // by type
  std::map<std::string, double> seconds;
  std::map<std::string, int> together;  // by types: devices
  const Json result = o.json();
  for (const Json& stage : result["stages"]) {
    const std::string type = stage["type"];
    EXPECT_EQ(stage["micro_batch"], 4);
    EXPECT_GT(stage["forward_s"], 0);
    EXPECT_GT(stage["backward_s"], 0);
    EXPECT_EQ(stage["nodes"], 1);
    if (stage["devices"] != 1) {
      together[type] = stage["devices"];
      continue;
    }
    EXPECT_TRUE(shapes[type].insert(stage["shape"]).second);
    seconds[type] += stage["forward_s"].get<double>() + stage["backward_s"].get<double>();
  }
  EXPECT_EQ(together, (std::map<std::string, int>{
                          {"fast", 2}, {"fast x1 + slow x1", 2}, {"fast x2 + slow x1", 3}}));
  ASSERT_EQ(shapes.size(), 2U);
  EXPECT_EQ(shapes["fast"], shapes["slow"]);
  EXPECT_GE(shapes["fast"].size(), 2U);
  EXPECT_LE(shapes["fast"].size(), 5U);  // equal layers once
  EXPECT_GT(seconds["slow"], 1.3 * seconds["fast"]);

  const std::string plan =
      fmt::format("plan {} --cluster {} --batch 32 --micro-batch 4 --engine pipeline ", model,
                  path("two.yaml"));
  o = motley(
      fmt::format("{} --profile {} -o {} --json", plan, path("two.profile"), path("two.json")));
  ASSERT_EQ(o.code, 0) << o.err;
  EXPECT_GT(o.json()["predicted_step_s"], 0);
  o = motley(fmt::format("run {} --steps 2 --json", path("two.json")));
  ASSERT_EQ(o.code, 0) << o.err;
  EXPECT_EQ(o.json()["steps"].size(), 2U);

  // A profile whose layers took a hundred times as long makes a slower plan.
  const double before = parse_json(read_file(path("two.json")), "plan")["predicted"]["step_s"];
  Json profile = parse_json(read_file(path("two.profile")), "profile");
  for (Json& stage : profile["stages"])
    for (const char* field : {"forward_s", "backward_s"})
      stage[field] = 100 * stage[field].get<double>();
  write_file(path("slower.profile"), profile.dump());
  o = motley(fmt::format("{} --profile {} --json", plan, path("slower.profile")));
  ASSERT_EQ(o.code, 0) << o.err;
  EXPECT_GT(o.json()["predicted_step_s"], 5 * before);

  profile["stages"][0]["backward_s"] = -1;
  write_file(path("bad.profile"), profile.dump());
  expect_mistake(fmt::format("{} --profile {}", plan, path("bad.profile")),
                 "stages[0]: field 'backward_s' is -1; give a number from 0");
  expect_mistake(fmt::format("calibrate --cluster {} --emulate --stages -o {}", path("two.yaml"),
                             path("x.profile")),
                 "--stages without --model");
  expect_mistake(plan + "--layers fine", "--layers");
}

// Planned for a framework, exported, imported: the same; a plan that it cannot say: 3, and the nearest.
TEST_F(Cli, PlansForFrameworks) {
  const std::string model = "gpt:layers=4,hidden=64,heads=4,vocab=128,seq=32";
  const Outcome made = motley(fmt::format(
      "plan {} --cluster local-mixed-4 --batch 8 --for megatron --time-limit 6 --json -o {}", model,
      path("p.json")));
  ASSERT_EQ(made.code, 0) << made.err;
  const Json cost = made.json()["for"];
  EXPECT_EQ(cost["target"], "megatron");
  EXPECT_LE(cost["free_step_s"].get<double>(), cost["predicted_step_s"].get<double>());
  if (cost["default_step_s"].is_number()) {
    EXPECT_LE(cost["predicted_step_s"].get<double>(),
              cost["default_step_s"].get<double>() * (1 + 1e-9));
  }
  const Outcome out =
      motley(fmt::format("export {} --to megatron -o {} --json", path("p.json"), path("run")));
  ASSERT_EQ(out.code, 0) << out.err;
  const Json said = out.json();
  for (const Json& file : said["files"])
    EXPECT_TRUE(fs::exists(path("run") + "/" + file.get<std::string>())) << file;
  EXPECT_EQ(out.json()["exact"].get<bool>(), out.json()["differences"].empty());
  const Outcome in = motley(fmt::format("import {} --json -o {}", path("run"), path("again.json")));
  ASSERT_EQ(in.code, 0) << in.err;
  EXPECT_NEAR(in.json()["predicted_step_s"].get<double>(),
              made.json()["predicted_step_s"].get<double>(), 1e-9);
  EXPECT_EQ(motley("check " + path("again.json")).code, 0);
  expect_mistake(fmt::format("export {} --to megatron -o {}", path("p.json"), path("run")),
                 "is not empty; give another name, or --force");
  expect_mistake(fmt::format("export {} --to jax -o {}", path("p.json"), path("other")), "jax");
  expect_mistake("import " + path("nowhere"), "motley.json");
  expect_mistake(fmt::format("import {} --batch 8", path("run")),
                 "is a directory, which says both");
  ASSERT_EQ(motley(fmt::format("plan {} --cluster local-mixed-4 --batch 8 --engine grid --fix "
                               "pp=2,dp=2 -o {}",
                               model, path("grid.json")))
                .code,
            0);
  const Outcome refused = motley(fmt::format("export {} --to ddp -o {} --time-limit 4 --json",
                                             path("grid.json"), path("ddp")));
  EXPECT_EQ(refused.code, 3) << refused.err;
  EXPECT_THAT(refused.err, HasSubstr("DDP cannot say this plan: it has 2 stages; the nearest"));
  EXPECT_TRUE(refused.json()["nearest_predicted_step_s"].is_number());
  EXPECT_FALSE(fs::exists(path("ddp")));
  EXPECT_EQ(motley(fmt::format("export {} --to ddp -o {} --time-limit 4 --nearest",
                               path("grid.json"), path("ddp")))
                .code,
            0);
  ASSERT_EQ(motley(fmt::format(
                       "plan mlp --cluster local-mixed-4 --batch 64 --engine spmd --strategy dp-ev "
                       "-o {}",
                       path("mlp.json")))
                .code,
            0);
  expect_mistake(fmt::format("export {} --to megatron -o {}", path("mlp.json"), path("m")),
                 "has to be told the sizes of mlp, which the plan does not know");
}

const char* const kConfig = R"({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
  "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 500,
  "max_position_embeddings": 64})";

TEST_F(Cli, AHuggingFaceConfigIsPlannedCheckedAndExplained) {
  write_file(path("config.json"), kConfig);
  const std::string plan = path("p.json");
  Outcome o = motley(fmt::format("plan {}:seq=32 --cluster hapt-case --batch 16 -o {} --json",
                                 path("config.json"), plan));
  ASSERT_EQ(o.code, 0) << o.err;
  const double step = o.json()["candidates"][0]["simulated_step_s"];
  EXPECT_EQ(motley("check " + plan).code, 0);
  o = motley("explain " + plan + " --json");
  ASSERT_EQ(o.code, 0) << o.err;
  const Json e = o.json();
  EXPECT_NEAR(e["step_s"].get<double>(), step, 1e-9);
  for (const char* field : {"verdict", "critical_path", "sensitivity", "memory"})
    EXPECT_FALSE(e[field].empty()) << field;
  EXPECT_THAT(motley("explain " + plan).out, HasSubstr("10% more of each resource"));
  expect_mistake("explain " + path("config.json"), "config.json");
  expect_mistake(fmt::format("plan {}:seq=x --cluster hapt-case --batch 8", path("config.json")),
                 "give seq=N or layers=N");
  write_file(path("other.json"), R"({"model_type": "mamba"})");
  expect_mistake(fmt::format("plan {} --cluster hapt-case --batch 8", path("other.json")),
                 "model_type is \"mamba\"; give one of albert");
}

TEST_F(Cli, AdvisesOnAClusterAndItsEdits) {
  write_file(path("config.json"), kConfig);
  const std::string question =
      "advise " + path("config.json") + " --cluster hapt-case --time-limit 8";
  Outcome o = motley(question +
                     " --batch 16 --what-if 'add 2 A100-40GB' --what-if 'drop v100' "
                     "--deadline 1s --json");
  ASSERT_EQ(o.code, 0) << o.err;
  const Json a = o.json();
  ASSERT_TRUE(a["now"]["fits"]);
  EXPECT_EQ(a["what_if"].size(), 2u);
  EXPECT_LE(a["what_if"][0]["step_s"], a["now"]["step_s"]);
  EXPECT_GE(a["what_if"][1]["step_s"], a["now"]["step_s"]);
  EXPECT_EQ(a["groups"].size(), 2u);
  EXPECT_TRUE(a["cheapest"]["fits"]);
  expect_mistake(question + " --what-if 'add 8 B300'", "'B300', which is no known device type");
  expect_mistake(question + " --objective money", "no device type of hapt-case has a price");
  expect_mistake(question + " --deadline soon", "--deadline is 'soon'");
}

}  // namespace
}  // namespace motley
