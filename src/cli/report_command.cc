#include "cli/report_command.h"

#include <CLI/CLI.hpp>
#include <cstdio>

#include "cli/commands.h"
#include "cluster/profile.h"
#include "core/error.h"
#include "report/report.h"

namespace motley {

void add_report_command(CLI::App& app) {
  struct Args {
    std::string plan, output, profile;
    bool json = false;
  };
  auto args = std::make_shared<Args>();
  auto* command = app.add_subcommand("report", "Write a plan as one page for a browser");
  command->add_option("plan", args->plan, "Plan file")->required();
  command->add_option("-o,--output", args->output, "Page to write")->required();
  command->add_option("--profile", args->profile,
                      "Measured profile of the plan's cluster; default: the numbers in the plan");
  command->add_flag("--json", args->json, "Print one JSON object");
  command->footer(
      "Example:\n"
      "  motley report plan.json -o plan.html");
  command->callback([args] {
    require_writable("--output", args->output);
    Plan plan = load_plan(args->plan);
    if (auto problems = check(plan, false); !problems.empty())
      throw user_error("report", "{}: {}", args->plan, problems[0]);
    if (!args->profile.empty()) apply(load_profile(args->profile), args->profile, &plan.cluster);
    write_file(args->output, to_html(plan));
    if (args->json)
      print_json({{"path", args->output}});
    else
      std::printf("written to %s\n", args->output.c_str());
  });
}

}  // namespace motley
