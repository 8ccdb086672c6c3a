#include "cli/commands.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "cli/advise_command.h"
#include "cli/check_command.h"
#include "cli/cluster_command.h"
#include "cli/explain_command.h"
#include "cli/export_command.h"
#include "cli/import_command.h"
#include "cli/models_command.h"
#include "cli/plan_command.h"
#include "cli/reduce_command.h"
#include "cli/report_command.h"
#include "cli/schedule_command.h"
#include "cli/simulate_command.h"
#include "core/error.h"
#include "cost/cost.h"
#ifdef MOTLEY_WITH_TORCH
#include "cli/calibrate_command.h"
#include "cli/capture_command.h"
#include "cli/demo_command.h"
#include "cli/emulate_command.h"
#include "cli/run_command.h"
#include "cli/verify_command.h"
#endif

namespace motley {

namespace {

char** arguments = nullptr;

// In the environment of a program that become_plain() started: seconds that capturing took.
constexpr const char* kCaptured = "MOTLEY_CAPTURED";

}  // namespace

void add_commands(Command app) {
  add_advise_command(app);
  add_check_command(app);
  add_cluster_command(app);
  add_explain_command(app);
  add_export_command(app);
  add_import_command(app);
  add_models_command(app);
  add_plan_command(app);
  add_reduce_command(app);
  add_report_command(app);
  add_schedule_command(app);
  add_simulate_command(app);
#ifdef MOTLEY_WITH_TORCH
  add_calibrate_command(app);
  add_capture_command(app);
  add_demo_command(app);
  add_emulate_command(app);
  add_run_command(app);
  add_verify_command(app);
#else
  auto elsewhere = [&](const char* name, const char* summary) {
    CLI::App* command = app.app().add_subcommand(name, summary)->prefix_command();
    command->set_help_flag("");
    command->callback([] { become_torch(); });
  };
  elsewhere("calibrate", "Measure devices and links and write a profile");
  elsewhere("capture", "Write the training step of a model as a graph file");
  elsewhere("demo", "Plan and train a small GPT on four emulated workers of unequal speed");
  elsewhere("emulate", "Run a program once for each device of an emulated cluster");
  elsewhere("run", "Train by a plan");
  elsewhere("verify", "Run one step by a plan and one on a single device, and compare them");
#endif
  const auto group = [&](const char* title, std::initializer_list<const char*> names) {
    for (const char* name : names) app.app().get_subcommand(name)->group(title);
  };
  group("Plan", {"models", "capture", "plan", "check", "explain", "advise", "simulate", "report",
                 "export", "import"});
  group("Train", {"demo", "run", "verify"});
  group("Measure and emulate", {"cluster", "calibrate", "emulate"});
  group("Study by themselves", {"reduce", "schedule"});
  app.footer(
      "Examples:\n"
      "  motley plan gpt --cluster hapt-case --batch 64 -o plan.json\n"
      "  motley report plan.json -o plan.html\n"
      "  motley run plan.json --steps 100\n\n"
      "motley COMMAND --help says more. Exit codes: 0 done, 1 a failure of motley, 2 a mistake in "
      "the input,\n3 no plan fits.");
}

Option add_optimizer(Command command, std::string& optimizer) {
  return command
      .add_option(
          "--optimizer", optimizer,
          "How much state a parameter has: adamw (default), amsgrad or sgd; fused-adamw and "
          "so on have no temporaries")
      .check(one_of(optimizer_names()));
}

void print_json(const Json& json) {
  std::printf("%s\n",
              json.dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace).c_str());
}

void remember_arguments(char** argv) { arguments = argv; }

std::string torch_program() {
  std::error_code code;
  return std::filesystem::read_symlink("/proc/self/exe", code).parent_path() / "motley-torch";
}

bool has_torch() { return access(torch_program().c_str(), X_OK) == 0; }

void become_torch() {
  const std::string program = torch_program();
  std::fflush(nullptr);
  setenv("GLOG_minloglevel", "3",
         0);  // errors come as exceptions; libtorch's log would repeat them
  execv(program.c_str(), arguments);
  throw user_error("motley", "{}: {}; this command needs libtorch: build with MOTLEY_TORCH=ON",
                   program, std::strerror(errno));
}

void become_plain(double captured_s) {
  if (std::getenv(kCaptured) != nullptr || arguments == nullptr) return;
  const std::string program = std::filesystem::path(torch_program()).replace_filename("motley");
  if (access(program.c_str(), X_OK) != 0) return;
  setenv(kCaptured, fmt::format("{}", captured_s).c_str(), 1);
  std::fflush(nullptr);
  execv(program.c_str(), arguments);
}

double captured_before() {
  const char* said = std::getenv(kCaptured);
  return said == nullptr ? 0 : std::max(0.0, std::atof(said));
}

}  // namespace motley
