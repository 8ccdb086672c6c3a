#include "cli/cluster_command.h"

#include <CLI/CLI.hpp>
#include <cstdio>

#include "cli/commands.h"
#include "core/error.h"
#include "readers/assemble.h"

namespace motley {

namespace {

struct Args {
  std::string name = "cluster", topo, query, nodes, hostfile, topology, output;
  std::vector<std::string> nccl;
  bool json = false;
};

std::optional<readers::Source> source(const std::string& path) {
  if (path.empty()) return std::nullopt;
  return readers::Source{path, read_file(path, size_t{1} << 26)};
}

void run(const Args& args) {
  if (!args.output.empty()) require_writable("--output", args.output);
  readers::Sources sources;
  sources.cluster = args.name;
  sources.topo = source(args.topo);
  sources.query = source(args.query);
  sources.nodes = source(args.nodes);
  sources.hostfile = source(args.hostfile);
  sources.topology = source(args.topology);
  for (const std::string& path : args.nccl) sources.nccl.push_back(*source(path));
  const readers::Assembled found = readers::assemble(sources);
  if (!args.output.empty()) write_file(args.output, found.yaml);
  if (args.json) {
    print_json({{"devices", found.cluster.size()},
                {"types", found.cluster.types.size()},
                {"groups", found.cluster.groups.size()},
                {"read", found.read},
                {"assumed", found.assumed},
                {"cluster", found.yaml}});
    return;
  }
  if (args.output.empty()) {
    std::printf("%s", found.yaml.c_str());
    return;
  }
  for (const std::string& line : found.read) std::printf("read     %s\n", line.c_str());
  for (const std::string& line : found.assumed) std::printf("assumed  %s\n", line.c_str());
  std::printf("written to %s\n", args.output.c_str());
}

}  // namespace

void add_cluster_command(CLI::App& app) {
  auto args = std::make_shared<Args>();
  auto* command = app.add_subcommand("cluster", "Write a cluster file from what other tools print");
  command->add_option("--from-topo", args->topo, "Output of nvidia-smi topo -m, of one machine");
  command->add_option("--from-query", args->query,
                      "Output of nvidia-smi --query-gpu=name,memory.total --format=csv, likewise");
  command
      ->add_option("--from-nccl", args->nccl,
                   "Output of an nccl-tests program, as text or -J JSON, or what Galvatron "
                   "(allreduce_bandwidth_*.json, sp_time_*.json) or nnScaler (intra_*.json) "
                   "measured; may be "
                   "given again, of other collectives and levels")
      ->expected(1)
      ->take_all();
  command->add_option("--from-slurm", args->topology, "Slurm's topology.conf or topology.yaml");
  command->add_option("--from-nodes", args->nodes, "Output of scontrol show node");
  command->add_option("--from-hostfile", args->hostfile, "Hostfile: HOST slots=8 [type=A100]");
  command->add_option("--name", args->name, "Name of the cluster; default: cluster");
  command->add_option("-o,--output", args->output,
                      "Cluster file to write; default: standard output");
  command->add_flag("--json", args->json, "Print one JSON object");
  command->footer(
      "Example:\n"
      "  nvidia-smi topo -m > topo.txt; mpirun ... all_reduce_perf -b 8 -e 1G -f 2 > nccl.txt\n"
      "  motley cluster --from-topo topo.txt --from-nccl nccl.txt -o my.yaml");
  command->callback([args] { run(*args); });
}

}  // namespace motley
