#include "cli/cluster_command.h"

#include <cstdio>

#include "cli/commands.h"
#include "cli/layer_speed.h"
#include "core/error.h"
#include "readers/assemble.h"

namespace motley {

namespace {

struct ClusterArgs {
  std::string name = "cluster", topo, query, nodes, hostfile, topology, layers, overlap, model,
              output;
  std::vector<std::string> nccl;
  bool json = false;
};

std::optional<readers::Source> source(const std::string& path) {
  if (path.empty()) return std::nullopt;
  return readers::Source{path, read_file(path, size_t{1} << 26)};
}

// What of the devices was measured, where there is one type.
void read_device(const ClusterArgs& args, readers::Sources* sources) {
  if (args.layers.empty() != args.model.empty())
    throw user_error("cluster", "--from-layers and --model go together; give both, or neither");
  if (args.layers.empty() && args.overlap.empty()) return;
  const Cluster cluster = readers::assemble(*sources).cluster;
  const std::string& name = args.layers.empty() ? args.overlap : args.layers;
  if (cluster.types.size() != 1) {
    std::vector<std::string> types;
    for (const DeviceType& type : cluster.types) types.push_back(type.name);
    throw user_error("cluster",
                     "{}: does not say on which of {} it was measured; give the machines of one "
                     "type, and put what is found into the file of all",
                     name, fmt::join(types, ", "));
  }
  DeviceType type = cluster.types[0];
  if (!args.layers.empty()) {
    const readers::Source file = *source(args.layers);
    const LayerSpeed found =
        speed_from(readers::parse_layer_times(file.text, file.name), file.name, args.model, type);
    type = found.type;
    sources->of_device.push_back(fmt::format(
        "speed of {}: {}, {} times of a layer of {} over {} tokens: {:.3g} times as long as "
        "assumed (fit {:.1f}% off)",
        type.name, file.name, found.points, args.model, found.tokens, found.slower,
        100 * found.error));
  }
  if (!args.overlap.empty()) {
    const readers::Source file = *source(args.overlap);
    type.interference = readers::parse_overlap(file.text, file.name);
    sources->of_device.push_back(
        fmt::format("interference of {}: {}, {:.3g}", type.name, file.name, type.interference));
  }
  sources->device = type;
}

void run(const ClusterArgs& args) {
  if (!args.output.empty()) require_writable("--output", args.output);
  readers::Sources sources;
  sources.cluster = args.name;
  sources.topo = source(args.topo);
  sources.query = source(args.query);
  sources.nodes = source(args.nodes);
  sources.hostfile = source(args.hostfile);
  sources.topology = source(args.topology);
  for (const std::string& path : args.nccl) sources.nccl.push_back(*source(path));
  read_device(args, &sources);
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

void add_cluster_command(Command app) {
  auto args = std::make_shared<ClusterArgs>();
  Command command =
      app.add_subcommand("cluster", "Write a cluster file from what other tools print");
  command.add_option("--from-topo", args->topo, "Output of nvidia-smi topo -m, of one machine");
  command.add_option("--from-query", args->query,
                     "Output of nvidia-smi --query-gpu=name,memory.total --format=csv, likewise");
  command
      .add_option("--from-nccl", args->nccl,
                  "Output of an nccl-tests program, as text or -J JSON, or what Galvatron "
                  "(allreduce_bandwidth_*.json, p2p_bandwidth_*.json, sp_time_*.json) or nnScaler "
                  "(intra_*.json) "
                  "measured; may be "
                  "given again, of other collectives and levels")
      .take_all();
  command.add_option("--from-slurm", args->topology, "Slurm's topology.conf or topology.yaml");
  command.add_option("--from-nodes", args->nodes, "Output of scontrol show node");
  command.add_option("--from-hostfile", args->hostfile, "Hostfile: HOST slots=8 [type=A100]");
  command.add_option("--from-layers", args->layers,
                     "Times of layers that Galvatron measured (computation_profiling_*.json), of "
                     "--model; devices of one type");
  command.add_option("--model", args->model, "The model whose layers these are");
  command.add_option("--from-overlap", args->overlap,
                     "What Galvatron measured of computation beside communication "
                     "(overlap_coefficient.json); devices of one type");
  command.add_option("--name", args->name, "Name of the cluster; default: cluster");
  command.add_option("-o,--output", args->output,
                     "Cluster file to write; default: standard output");
  command.add_flag("--json", args->json, "Print one JSON object");
  command.footer(
      "Example:\n"
      "  nvidia-smi topo -m > topo.txt; mpirun ... all_reduce_perf -b 8 -e 1G -f 2 > nccl.txt\n"
      "  motley cluster --from-topo topo.txt --from-nccl nccl.txt -o my.yaml");
  command.callback([args] { run(*args); });
}

}  // namespace motley
