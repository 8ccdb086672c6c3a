#include "cli/verify_command.h"

#include <algorithm>
#include <cstdio>
#include <vector>

#include "cli/commands.h"
#include "comm/launch.h"
#include "core/error.h"
#include "runtime/emulate.h"
#include "runtime/trainer.h"
#include "runtime/verify.h"

namespace motley {

namespace {

struct VerifyOptions {
  std::string plan, dtype = "f64";
  uint64_t seed = 0;
  bool emulate = false, json = false;
};

Plan sound_plan(const std::string& path, DType dtype) {
  Plan plan = load_plan(path);
  const std::vector<std::string> problems = check(plan, /*memory_limit=*/false);
  if (!problems.empty())
    throw user_error("verify", "{}: the plan is not sound: {}; see motley check", path,
                     problems[0]);
  if (dtype == DType::bf16 && plan.precision != dtype)
    throw user_error("verify", "{} computes in {}, not bf16; give --dtype f64 or f32", path,
                     to_string(plan.precision));
  return plan;
}

// Of 16 bits, whose tolerances hide much, what the same plan computes in f64 is judged too, first.
void print(const VerifyOptions& options, const std::vector<Verification>& list) {
  const auto wrong =
      std::find_if(list.begin(), list.end(), [](const Verification& v) { return !v.equivalent; });
  const Verification& v = wrong != list.end() ? *wrong : list.back();
  if (options.json)
    print_json({{"loss_error", v.loss_error},
                {"gradient_error", v.gradient_error},
                {"worst_parameter", v.worst_parameter},
                {"buffer_error", v.buffer_error},
                {"worst_buffer", v.worst_buffer},
                {"dtype", to_string(v.dtype)},
                {"reference", v.reference},
                {"emulated", options.emulate},
                {"equivalent", v.equivalent}});
  else
    for (const Verification& one : list)
      std::printf("%s: %s to %s in %s; error of the loss %.2e, of gradients %.2e (%s)%s\n",
                  options.plan.c_str(), one.equivalent ? "equivalent" : "NOT equivalent",
                  one.reference.c_str(), to_string(one.dtype), one.loss_error, one.gradient_error,
                  one.worst_parameter.c_str(),
                  one.worst_buffer.empty()
                      ? ""
                      : fmt::format(", of buffers {:.2e} ({})", one.buffer_error, one.worst_buffer)
                            .c_str());
  finish_output();
  if (!v.equivalent)
    throw user_error("verify", "{}: the plan is not equivalent to one device", options.plan);
}

std::vector<DType> judged_in(DType dtype) {
  if (dtype == DType::f64 || dtype == DType::f32) return {dtype};
  return {DType::f64, dtype};
}

void work(const VerifyOptions& options, DType dtype, const Rendezvous& where) {
  const Plan plan = sound_plan(options.plan, dtype);
  if (where.size != plan.cluster.size())
    throw user_error("verify", "{}: the plan is for {} devices, but {} workers were started",
                     options.plan, plan.cluster.size(), where.size);
  set_threads(1);
  const std::unique_ptr<ProcessCommunicator> group = join_group(where);
  if (options.emulate) {
    const std::string pacing = emulate_links(*group, plan.cluster);
    if (where.rank == 0) std::fprintf(stderr, "emulation: %s\n", pacing.c_str());
  }
  std::vector<Verification> list;
  for (DType type : judged_in(dtype)) list.push_back(verify_plan(plan, type, options.seed, *group));
  group->barrier();
  if (where.rank == 0) print(options, list);
}

void verify(const VerifyOptions& options) {
  DType dtype = DType::f64;
  parse_dtype(options.dtype, &dtype);
  if (const auto where = rendezvous_from_environment()) {
    run_worker([&] { work(options, dtype, *where); });
    return;
  }
  if (options.emulate) prepare_workers(run_program);
  const Plan plan = sound_plan(options.plan, dtype);
  if (!options.emulate) {
    std::vector<Verification> list;
    for (DType type : judged_in(dtype)) list.push_back(verify_plan(plan, type, options.seed));
    print(options, list);
    return;
  }
  LaunchOptions launch;
  launch.workers = plan.cluster.size();
  if (launch.workers > kMaxLocalWorkers)
    throw user_error("verify",
                     "{}: the plan is for {} devices; more than {} are not emulated on one machine",
                     options.plan, launch.workers, kMaxLocalWorkers);
  launch.arguments = {"verify",      options.plan, "--dtype",
                      options.dtype, "--seed",     std::to_string(options.seed),
                      "--emulate"};
  if (options.json) launch.arguments.push_back("--json");
  const std::unique_ptr<Network> network = network_for(plan.cluster);
  launch.network = network.get();
  launch_workers(launch);
}

}  // namespace

void add_verify_command(Command app) {
  auto options = std::make_shared<VerifyOptions>();
  Command command = app.add_subcommand(
      "verify", "Run one step by a plan and one on a single device, and compare them");
  command.add_option("plan", options->plan, "Plan file").required();
  command
      .add_option("--dtype", options->dtype,
                  "Type to compute in: f64 (default), f32, or bf16 for plans in mixed precision")
      .check(one_of({"f64", "f32", "bf16"}));
  command.add_option("--seed", options->seed, "Seed of parameters and batch; default: 0")
      .check(whole_number());
  command.add_flag("--emulate", options->emulate,
                   "Start a worker for each device in the emulated network of the plan's cluster; "
                   "without: threads of this process");
  command.add_flag("--json", options->json, "Print one JSON object");
  command.footer(
      "Examples:\n"
      "  motley verify plan.json\n"
      "  motley verify plan.json --dtype f32 --emulate");
  command.callback([options] { verify(*options); });
}

}  // namespace motley
