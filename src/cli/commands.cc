#include "cli/commands.h"

#include <CLI/CLI.hpp>
#include <cstdio>

#include "cli/capture_command.h"
#include "cli/check_command.h"
#include "cli/demo_command.h"
#include "cli/models_command.h"
#include "cli/plan_command.h"
#include "cli/reduce_command.h"
#include "cli/run_command.h"
#include "cli/simulate_command.h"
#include "cli/verify_command.h"

namespace motley {

void add_commands(CLI::App& app) {
  add_capture_command(app);
  add_check_command(app);
  add_demo_command(app);
  add_models_command(app);
  add_plan_command(app);
  add_reduce_command(app);
  add_run_command(app);
  add_simulate_command(app);
  add_verify_command(app);
}

void print_json(const Json& json) { std::printf("%s\n", json.dump().c_str()); }

}  // namespace motley
