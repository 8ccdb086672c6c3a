#include "cli/explain_command.h"

#include <cstdio>

#include "cli/commands.h"
#include "cluster/profile.h"
#include "core/error.h"
#include "explain/explain.h"

namespace motley {

void add_explain_command(Command app) {
  struct ExplainArgs {
    std::string plan, profile;
    explain::Options options;
    bool json = false;
  };
  auto args = std::make_shared<ExplainArgs>();
  Command command =
      app.add_subcommand("explain", "Say what limits a plan's step, and what would help");
  command.add_option("plan", args->plan, "Plan file").required();
  command.add_option("--profile", args->profile,
                     "Measured profile of the plan's cluster; default: the numbers in the plan");
  command.add_flag("--replan", args->options.replan,
                   "Plan anew for 10% more of each resource, besides simulating the same plan");
  command
      .add_option(
          "--tensors", args->options.tensors,
          "Groups of tensors whose other placements are tried, the largest first; default: 8")
      .check(in_range(0, 1000));
  command
      .add_option("--time-limit", args->options.seconds,
                  "Seconds that other placements and replanning may take; default: 10")
      .check(positive_number());
  command.add_flag("--json", args->json, "Print one JSON object");
  command.footer(
      "Example:\n"
      "  motley explain plan.json --replan --time-limit 60");
  command.callback([args] {
    Plan plan = load_plan(args->plan);
    if (auto problems = check(plan, false); !problems.empty())
      throw user_error("explain", "{}: {}", args->plan, problems[0]);
    if (!args->profile.empty()) apply(load_profile(args->profile), args->profile, &plan.cluster);
    const explain::Explanation explanation = explain::explain(&plan, args->options);
    if (args->json)
      print_json(to_json(explanation, args->options));
    else
      std::printf("%s", to_text(plan, explanation, args->options).c_str());
  });
}

}  // namespace motley
