#include "cli/calibrate_command.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>

#include "capture/source.h"
#include "cli/commands.h"
#include "cluster/profile.h"
#include "comm/launch.h"
#include "core/error.h"
#include "core/units.h"
#include "measure/calibrate.h"
#include "planner/calibrated.h"
#include "runtime/emulate.h"

namespace motley {

namespace {

struct CalibrateArgs {
  std::string cluster, output, device = "auto";
  std::vector<std::string> models;
  std::vector<int64_t> micro_batches;
  int layers = 0;
  int64_t batch = 8;
  int scale = 0;
  bool stages = false, emulate = false, json = false;
  std::string precision = "fp32";

  // The command line of workers.
  std::vector<std::string> words() const {
    std::vector<std::string> list = {"calibrate", "--cluster",          cluster, "-o", output,
                                     "--batch",   std::to_string(batch)};
    for (const std::string& model : models) {
      list.push_back("--model");
      list.push_back(model);
    }
    if (scale > 0) {
      list.push_back("--scale");
      list.push_back(std::to_string(scale));
    }
    if (stages) list.push_back("--stages");
    list.push_back("--precision");
    list.push_back(precision);
    for (int64_t size : micro_batches) {
      list.push_back("--micro-batch");
      list.push_back(std::to_string(size));
    }
    if (layers > 0) {
      list.push_back("--layers");
      list.push_back(std::to_string(layers));
    }
    if (emulate) list.push_back("--emulate");
    if (json) list.push_back("--json");
    return list;
  }
};

void report(const Profile& profile, const CalibrateArgs& args) {
  double least = 1;
  Json devices = Json::array(), collectives = Json::array();
  for (const ProfiledDevice& d : profile.devices) {
    Json classes = Json::array();
    for (const ProfiledClass& c : d.classes) {
      classes.push_back({{"class", c.name},
                         {"dtype", c.dtype},
                         {"overhead_s", c.overhead},
                         {"rate", c.rate},
                         {"r2", c.fit.r2}});
      least = std::min(least, c.fit.r2);
    }
    double error = 0;
    for (const ProfiledOp& op : d.ops) error += op.fit.error / static_cast<double>(d.ops.size());
    devices.push_back({{"type", d.type},
                       {"flops", d.flops},
                       {"half_flops", d.half_flops},
                       {"memory_bandwidth", d.memory_bandwidth},
                       {"overhead_s", d.overhead},
                       {"ops", d.ops.size()},
                       {"mean_op_error", error},
                       {"classes", classes}});
    if (!args.json)
      std::printf(
          "%-10s %s/s in products, %s/s elementwise, %s per operator; %zu operators, mean "
          "error of a call %.0f%%\n",
          d.type.c_str(), format_flops(d.flops).c_str(), format_bytes(d.memory_bandwidth).c_str(),
          format_seconds(d.overhead).c_str(), d.ops.size(), 100 * error);
  }
  for (const ProfiledGroup& g : profile.groups)
    for (size_t i = 0; i < g.collectives.size(); ++i) {
      const CollectiveRate& r = g.collectives[i];
      least = std::min(least, g.fits[i].r2);
      collectives.push_back({{"group", g.path},
                             {"devices", g.types.size()},
                             {"form", to_string(r.collective)},
                             {"latency_s", r.latency},
                             {"bandwidth", r.bandwidth},
                             {"least_s", r.least},
                             {"r2", g.fits[i].r2}});
      if (!args.json)
        std::printf("%-10s %-15s %s/s, %s a round, R2 %.4f\n",
                    fmt::format("[{}]", fmt::join(g.path, ",")).c_str(), to_string(r.collective),
                    format_bytes(r.bandwidth).c_str(), format_seconds(r.latency).c_str(),
                    g.fits[i].r2);
    }
  Json stages = Json::array();
  // By device type and number of devices.
  std::map<std::pair<std::string, int>, std::pair<int, Seconds>> layers;
  for (const ProfiledStage& s : profile.stages) {
    stages.push_back(to_json(s));
    auto& [count, sum] = layers[{s.type, s.devices}];
    ++count;
    sum += s.forward + s.backward;
  }
  if (!args.json)
    for (const auto& [of, sum] : layers) {
      const auto& [type, count] = of;
      const bool several = type.find(" + ") != std::string::npos;
      std::printf(
          "%-10s %d distinct %s, %s forward and backward in all\n",
          count > 1 && !several ? fmt::format("{} x {}", count, type).c_str() : type.c_str(),
          sum.first, count > 1 ? "stretches of layers" : "layers",
          format_seconds(sum.second).c_str());
    }
  if (args.json)
    print_json({{"profile", args.output},
                {"emulated", profile.emulated},
                {"seconds", profile.seconds},
                {"devices", devices},
                {"collectives", collectives},
                {"stages", stages},
                {"fit_r2", least}});
  else
    std::printf("written to %s after %s\n", args.output.c_str(),
                format_seconds(profile.seconds).c_str());
  finish_output();
}

void work(const CalibrateArgs& args, const Rendezvous& where) {
  const Cluster cluster = load_cluster(args.cluster, args.scale, "");
  if (where.size != cluster.size())
    throw user_error("calibrate", "--cluster {} has {} devices, but {} workers were started",
                     args.cluster, cluster.size(), where.size);
  set_threads(1);
  CalibrateOptions options;
  // Smaller ones tell what a call takes anyhow from what grows with the batch, and what two parts of
  // it lose.
  for (const std::string& model : args.models)
    for (const int64_t part : {4, 2, 1})
      if (args.batch >= part || part == 1) options.steps.emplace_back(model, args.batch / part);
  options.half = args.precision == "bf16";
  std::vector<std::unique_ptr<planner::LayerShapes>> shapes;
  for (const std::string& model : args.models) {
    if (!args.stages) break;
    planner::PlanOptions request;
    request.model = model;
    request.micro_batches = args.micro_batches;
    if (request.micro_batches.empty()) request.micro_batches = {args.batch};
    request.layers = args.layers;
    shapes.push_back(std::make_unique<planner::LayerShapes>(request, cluster, [&](int64_t samples) {
      return std::move(load_graph(model, samples).graph);
    }));
    for (const auto& s : shapes.back()->shapes)
      options.stages.push_back(
          {s.shape, model, s.micro_batch, s.theory, s.devices, s.nodes, &s.program, s.ratios});
  }
  const std::unique_ptr<ProcessCommunicator> group = join_group(where);
  std::string mode;
  if (args.emulate) {
    options.speed = cluster.type_of(where.rank).speed;
    mode = emulate_links(*group, cluster);
  }
  options.subgroup = [&](const std::vector<int>& ranks, const std::string& name) {
    return join_group(part_of(where, ranks, name));
  };
  if (where.rank == 0)
    options.progress = [](const std::string& what) {
      std::fprintf(stderr, "measuring %s\n", what.c_str());
    };
  Profile profile = calibrate(*group, cluster, options);
  group->barrier();
  if (where.rank != 0) return;
  profile.emulated = mode;
  save_profile(profile, args.output);
  report(profile, args);
}

void calibrate_command(CalibrateArgs args) {
  if (args.stages && args.models.empty())
    throw user_error("calibrate", "--stages without --model; give the model to be planned");
  const auto where = rendezvous_from_environment();
  if (!where) prepare_workers(run_program);
  const Cluster cluster = load_cluster(args.cluster, args.scale, "");
  if (args.emulate)
    for (const DeviceType& type : cluster.types)
      if (!(type.speed > 0))
        throw user_error("calibrate",
                         "--cluster {}: device type {} has speed 0; give its share of a core, or "
                         "--scale",
                         args.cluster, type.name);
  if (args.device == "cuda")
    throw user_error("calibrate",
                     "--device cuda: CUDA devices cannot be measured yet; give --device cpu, or "
                     "make a cluster file of what nccl-tests print: motley cluster --help");
  if (where) {
    run_worker([&] { work(args, *where); });
    return;
  }
  if (cluster.size() > kMaxLocalWorkers)
    throw user_error("calibrate",
                     "--cluster {}: has {} devices; start the workers with torchrun or Slurm, or "
                     "give --emulate --scale",
                     args.cluster, cluster.size());
  LaunchOptions launch;
  launch.arguments = args.words();
  launch.workers = cluster.size();
  std::unique_ptr<Network> network;
  if (args.emulate) network = network_for(cluster);
  launch.network = network.get();
  launch_workers(launch);
}

void add_measured_options(Command command, CalibrateArgs* args) {
  const std::string group = "What is measured";
  command
      .add_option("--model", args->models,
                  "Model whose operators are measured; may be given again; default: small ones "
                  "of the zoo")
      .group(group);
  command
      .add_option(
          "--batch", args->batch,
          "Batch of --model on each device; half and a quarter of it are measured too; default: 8")
      .check(in_range(int64_t{1}, int64_t{1} << 20))
      .group(group);
  command
      .add_option("--precision", args->precision,
                  "bf16: operators in 16 bits too, for plans with --precision; default: fp32 alone")
      .check(one_of({"fp32", "bf16"}))
      .group(group);
  command
      .add_flag("--stages", args->stages,
                "Also measure the layers that pipelines of --model are made of, one by one on "
                "every device and together on sub-meshes")
      .group(group);
  command
      .add_option("--micro-batch", args->micro_batches,
                  "With --stages: samples of a micro-batch; may be given again; default: --batch")
      .check(in_range(int64_t{1}, int64_t{1} << 20))
      .group(group);
  command
      .add_option("--layers", args->layers,
                  "With --stages: number of pieces that the model is cut into, as for motley plan")
      .check(in_range(1, 2000))
      .group(group);
}

void add_worker_options(Command command, CalibrateArgs* args) {
  const std::string group = "Workers";
  command
      .add_option("--device", args->device,
                  "cpu: the CPU over gloo, as auto (default); cuda: not yet")
      .check(one_of({"auto", "cpu", "cuda"}))
      .group(group);
  command.add_flag("--emulate", args->emulate, "Emulate the cluster on this machine").group(group);
  command
      .add_option("--scale", args->scale,
                  "Measure the cluster scaled down to at most so many workers of this machine")
      .check(in_range(1, kMaxLocalWorkers))
      .group(group);
}

}  // namespace

void add_calibrate_command(Command app) {
  auto args = std::make_shared<CalibrateArgs>();
  Command command =
      app.add_subcommand("calibrate", "Measure devices and links and write a profile");
  command.add_option("--cluster", args->cluster, "Cluster file, or the name of a shipped cluster")
      .required();
  command.add_option("-o,--output", args->output, "Profile to write").required();
  command.add_flag("--json", args->json, "Print one JSON object");
  add_measured_options(command, args.get());
  add_worker_options(command, args.get());
  command.footer(
      "Examples:\n"
      "  motley calibrate --cluster local-mixed-4 --emulate -o local.profile\n"
      "  motley calibrate --cluster my.yaml --model bert --batch 32 -o my.profile\n"
      "  motley calibrate --cluster my.yaml --stages --model bert --micro-batch 8 -o my.profile");
  command.callback([args] { calibrate_command(*args); });
}

}  // namespace motley
