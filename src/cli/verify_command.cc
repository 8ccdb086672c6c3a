#include "cli/verify_command.h"

#include <CLI/CLI.hpp>
#include <cstdio>

#include "cli/commands.h"
#include "core/error.h"
#include "torch/trainer.h"

namespace motley {

void add_verify_command(CLI::App& app) {
  struct Args {
    std::string plan, dtype = "f64";
    uint64_t seed = 0;
    bool json = false;
  };
  auto args = std::make_shared<Args>();
  auto* command = app.add_subcommand(
      "verify", "Run one step of a plan on threads and on one device, and compare");
  command->add_option("plan", args->plan, "Plan file")->required();
  command->add_option("--dtype", args->dtype, "f64 or f32")->check(CLI::IsMember({"f64", "f32"}));
  command->add_option("--seed", args->seed, "Seed of parameters and batch");
  command->add_flag("--json", args->json, "Print one JSON object");
  command->callback([args] {
    const Plan plan = load_plan(args->plan);
    const std::vector<std::string> problems = check(plan, /*memory_limit=*/false);
    if (!problems.empty())
      throw user_error("verify", "{}: the plan is not sound: {}; see motley check", args->plan,
                       problems[0]);
    DType dtype = DType::f64;
    parse_dtype(args->dtype, &dtype);
    const Verification v = verify_plan(plan, dtype, args->seed);
    if (args->json)
      print_json({{"loss_error", v.loss_error},
                  {"gradient_error", v.gradient_error},
                  {"worst_parameter", v.worst_parameter},
                  {"dtype", to_string(v.dtype)},
                  {"reference", v.reference},
                  {"equivalent", v.equivalent}});
    else
      std::printf("%s: %s to %s in %s; error of the loss %.2e, of gradients %.2e (%s)\n",
                  args->plan.c_str(), v.equivalent ? "equivalent" : "NOT equivalent",
                  v.reference.c_str(), to_string(v.dtype), v.loss_error, v.gradient_error,
                  v.worst_parameter.c_str());
    if (!v.equivalent)
      throw user_error("verify", "{}: the plan is not equivalent to one device", args->plan);
  });
}

}  // namespace motley
