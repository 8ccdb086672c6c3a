#include "cli/commands.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "cli/check_command.h"
#include "cli/models_command.h"
#include "cli/plan_command.h"
#include "cli/reduce_command.h"
#include "cli/report_command.h"
#include "cli/schedule_command.h"
#include "cli/simulate_command.h"
#include "core/error.h"
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

}  // namespace

void add_commands(CLI::App& app) {
  add_check_command(app);
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
    CLI::App* command = app.add_subcommand(name, summary)->prefix_command();
    command->set_help_flag("");
    command->callback([] { become_torch(); });
  };
  elsewhere("calibrate", "Measure devices and links and write a profile");
  elsewhere("capture", "Write the captured training step of a model");
  elsewhere("demo", "Plan and train a language model on emulated workers of unequal speed");
  elsewhere("emulate", "Run a command once per device inside the emulated cluster");
  elsewhere("run", "Train by a plan");
  elsewhere("verify", "Run a plan and one device on the same batch and compare");
#endif
}

void print_json(const Json& json) {
  std::printf("%s\n",
              json.dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace).c_str());
}

std::function<std::string(const std::string&)> positive_number() {
  return [](const std::string& text) -> std::string {
    char* end = nullptr;
    const double value = std::strtod(text.c_str(), &end);
    if (end == text.c_str() || *end != 0 || !std::isfinite(value) || !(value > 0))
      return "is '" + text + "'; give a number greater than 0";
    return "";
  };
}

void remember_arguments(char** argv) { arguments = argv; }

namespace {

std::string torch_program() {
  std::error_code code;
  return std::filesystem::read_symlink("/proc/self/exe", code).parent_path() / "motley-torch";
}

}  // namespace

bool has_torch() { return access(torch_program().c_str(), X_OK) == 0; }

void become_torch() {
  const std::string program = torch_program();
  std::fflush(nullptr);
  execv(program.c_str(), arguments);
  throw user_error("motley", "{}: {}; this command needs libtorch: build with MOTLEY_TORCH=ON",
                   program, std::strerror(errno));
}

}  // namespace motley
