#include "cli/simulate_command.h"

#include <algorithm>
#include <cstdio>

#include "cli/commands.h"
#include "cluster/profile.h"
#include "core/error.h"
#include "sim/simulate.h"

namespace motley {

void add_simulate_command(Command app) {
  struct SimulateArgs {
    std::string plan, trace, profile;
    bool json = false;
  };
  auto args = std::make_shared<SimulateArgs>();
  Command command = app.add_subcommand("simulate", "Simulate one step of a plan on every device");
  command.add_option("plan", args->plan, "Plan file").required();
  command.add_option("--trace", args->trace, "Timeline to write, for ui.perfetto.dev");
  command.add_option("--profile", args->profile,
                     "Measured profile of the plan's cluster; default: the numbers in the plan");
  command.add_flag("--json", args->json, "Print one JSON object");
  command.footer(
      "Example:\n"
      "  motley simulate plan.json --trace trace.json");
  command.callback([args] {
    if (!args->trace.empty()) require_writable("--trace", args->trace);
    Plan plan = load_plan(args->plan);
    if (auto problems = check(plan, false); !problems.empty())
      throw user_error("simulate", "{}: {}", args->plan, problems[0]);
    if (!args->profile.empty()) apply(load_profile(args->profile), args->profile, &plan.cluster);
    Simulation sim = simulate(plan, args->trace.empty() ? Spans::none : Spans::all);
    if (!args->trace.empty()) write_file(args->trace, to_trace(plan, sim));
    if (args->json) {
      Json devices = Json::array();
      for (const DeviceTime& d : sim.devices)
        devices.push_back({{"busy_s", d.busy},
                           {"comm_s", d.comm},
                           {"exposed_comm_s", d.exposed_comm},
                           {"hidden_comm_s", std::max(0.0, d.comm - d.exposed_comm)},
                           {"idle_s", d.idle},
                           {"peak_memory_bytes", d.peak_memory},
                           {"allocated_bytes", d.allocated}});
      print_json({{"step_s", sim.step},
                  {"devices", devices},
                  {"overlap", sim.overlap},
                  {"load_balance", sim.load_balance}});
      return;
    }
    std::printf("%s a step, load balance %.1f%%\n", format_seconds(sim.step).c_str(),
                100 * sim.load_balance);
    std::printf("  %-6s %-12s %10s %10s %10s %10s %12s\n", "device", "type", "busy", "comm",
                "hidden", "idle", "peak memory");
    for (int d = 0; d < plan.cluster.size(); ++d) {
      const DeviceTime& t = sim.devices[d];
      std::printf("  %-6d %-12s %10s %10s %10s %10s %12s\n", d,
                  plan.cluster.type_of(d).name.c_str(), format_seconds(t.busy).c_str(),
                  format_seconds(t.comm).c_str(),
                  format_seconds(std::max(0.0, t.comm - t.exposed_comm)).c_str(),
                  format_seconds(t.idle).c_str(), format_bytes(t.peak_memory).c_str());
    }
    if (!args->trace.empty())
      std::printf("timeline written to %s; open it in ui.perfetto.dev\n", args->trace.c_str());
  });
}

}  // namespace motley
