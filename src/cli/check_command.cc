#include "cli/check_command.h"

#include <cstdio>

#include "cli/commands.h"
#include "core/error.h"
#include "plan/plan.h"
#ifdef MOTLEY_WITH_TORCH
#include "runtime/consistency.h"
#endif

namespace motley {

void add_check_command(Command app) {
  struct CheckArgs {
    std::string plan, memory = "on";
    bool json = false;
  };
  auto args = std::make_shared<CheckArgs>();
  Command command = app.add_subcommand(
      "check", "Check that a plan computes what one device would, and fits into memory");
  command.add_option("plan", args->plan, "Plan file").required();
  command
      .add_option("--memory-limit", args->memory,
                  "Whether device memory is checked too: on (default) or off")
      .check(one_of({"on", "off"}));
  command.add_flag("--json", args->json, "Print one JSON object");
  command.footer(
      "Example:\n"
      "  motley check plan.json");
  command.callback([args] {
#ifndef MOTLEY_WITH_TORCH
    if (has_torch()) become_torch();  // to derive the graph again
#endif
    Plan plan = load_plan(args->plan);
    std::vector<std::string> problems = check(plan, args->memory == "on");
    std::string graph = "its graph as it is, which takes libtorch to check";
#ifdef MOTLEY_WITH_TORCH
    std::string unchecked;
    if (problems.empty()) problems = check_graph(plan, &unchecked);
    graph = is_of_zoo(plan)     ? "the graph is that of " + plan.model
            : unchecked.empty() ? "its gradients are the derivative of its loss"
                                : "its gradients were not all derived again: " + unchecked;
#endif
    if (args->json) print_json({{"valid", problems.empty()}, {"problems", problems}});
    if (!args->json)
      for (const std::string& p : problems) std::printf("%s\n", p.c_str());
    if (!args->json && problems.empty())
      std::printf("%s: sound (%s, %d devices; %s)\n", args->plan.c_str(),
                  plan.pipeline ? fmt::format("{} stages, {} replicas", plan.pipeline->stages(),
                                              plan.pipeline->replicas.size())
                                      .c_str()
                                : fmt::format("{} steps", plan.program.steps.size()).c_str(),
                  plan.cluster.size(), graph.c_str());
    if (!problems.empty())
      throw user_error("check", "{}: {} problem{}, the first: {}", args->plan, problems.size(),
                       problems.size() > 1 ? "s" : "", problems[0]);
  });
}

}  // namespace motley
