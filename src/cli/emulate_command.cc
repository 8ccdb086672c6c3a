#include "cli/emulate_command.h"

#include "cli/commands.h"
#include "cluster/profile.h"
#include "comm/launch.h"
#include "core/error.h"
#include "runtime/emulate.h"

namespace motley {

void add_emulate_command(Command app) {
  struct EmulateArgs {
    std::string cluster;
    int scale = 0;
    std::vector<std::string> command;
  };
  auto args = std::make_shared<EmulateArgs>();
  Command command =
      app.add_subcommand("emulate", "Run a program once for each device of an emulated cluster");
  command.add_option("--cluster", args->cluster, "Cluster file, or the name of a shipped cluster")
      .required();
  command
      .add_option("--scale", args->scale,
                  "Emulate the cluster scaled down to at most so many workers of this machine")
      .check(in_range(1, kMaxLocalWorkers));
  command
      .add_option("command", args->command,
                  "Program and arguments, after --; it is given torchrun's variables and "
                  "MOTLEY_SPEEDS, the shares of a core of all ranks")
      .required();
  command.footer(
      "Example:\n"
      "  motley emulate --cluster local-mixed-4 -- python3 train.py");
  command.callback([args] {
    const Cluster cluster = load_cluster(args->cluster, args->scale, "");
    if (cluster.size() > kMaxLocalWorkers)
      throw user_error("emulate", "--cluster {}: has {} devices; give --scale {} or less",
                       args->cluster, cluster.size(), kMaxLocalWorkers);
    LaunchOptions launch;
    launch.program = args->command[0];
    launch.arguments.assign(args->command.begin() + 1, args->command.end());
    launch.workers = cluster.size();
    std::string speeds;
    for (int d = 0; d < cluster.size(); ++d)
      speeds += fmt::format("{}{}", d > 0 ? "," : "", cluster.type_of(d).speed);
    launch.environment["MOTLEY_SPEEDS"] = speeds;
    launch.environment["TORCHELASTIC_RESTART_COUNT"] = "0";
    const std::unique_ptr<Network> network = network_for(cluster);
    launch.network = network.get();
    launch_workers(launch);
  });
}

}  // namespace motley
