#include "cli/import_command.h"

#include <cstdio>
#include <filesystem>

#include "cli/commands.h"
#include "cli/model_graphs.h"
#include "core/error.h"
#include "export/export.h"
#include "export/plan_files.h"
#include "graph/precision.h"
#include "planner/planner.h"

namespace motley {

namespace {

struct ImportArgs {
  std::string path, model, cluster, output, optimizer = "adamw", precision = "fp32";
  int64_t batch = 0;
  double time_limit = 10;
  bool json = false;
};

void import_directory(const ImportArgs& args) {
  if (!args.model.empty() || args.batch > 0)
    throw user_error("import",
                     "--model and --batch are of a plan file; {} is a directory, which says both",
                     args.path);
  std::unique_ptr<Cluster> cluster;
  if (!args.cluster.empty()) cluster = std::make_unique<Cluster>(load_cluster(args.cluster));
  const std::unique_ptr<Plan> plan = import_plan(args.path, cluster.get(), nullptr);
  std::string reason;
  const auto arrangement = planner::read_arrangement(*plan, &reason);
  const std::string what = arrangement ? planner::to_string(*arrangement) : reason;
  if (!args.output.empty()) save_plan(*plan, args.output);
  if (args.json)
    print_json({{"target", plan->engine},
                {"model", plan->model},
                {"batch", plan->batch},
                {"arrangement", what},
                {"predicted_step_s", plan->predicted_step_s},
                {"path", args.output}});
  else
    std::printf("%s on %s for %s: %s, predicted %s a step\n", plan->model.c_str(),
                plan->cluster.name.c_str(), plan->engine.c_str(), what.c_str(),
                format_seconds(plan->predicted_step_s).c_str());
}

planner::PlanOptions options_of(const ImportArgs& args) {
  planner::PlanOptions options;
  options.model = args.model;
  options.batch = args.batch;
  MOTLEY_CHECK(parse_optimizer(args.optimizer, &options.optimizer));
  options.precision = args.precision == "bf16"   ? DType::bf16
                      : args.precision == "fp16" ? DType::f16
                                                 : DType::f32;
  options.limits.deadline = Deadline::in(args.time_limit);
  return options;
}

void print(const ImportArgs& args, const std::string& planner, const PlanFile& theirs,
           const planner::PlanReport& ours) {
  const planner::Candidate* best = ours.candidates.empty() ? nullptr : &ours.best();
  const Plan& plan = *theirs.plan;
  if (args.json) {
    print_json({{"target", planner},
                {"model", plan.model},
                {"batch", plan.batch},
                {"arrangement", theirs.what},
                {"predicted_step_s", plan.predicted_step_s},
                {"own_step_s", theirs.own_s},
                {"best_step_s", best ? Json(best->simulated_s) : Json()},
                {"best_engine", best ? Json(best->plan->engine) : Json()},
                {"best", best ? Json(best->note) : Json()},
                {"differences", theirs.differences},
                {"path", args.output}});
    return;
  }
  std::printf("%s on %s by %s: %s\n", plan.model.c_str(), plan.cluster.name.c_str(),
              planner.c_str(), theirs.what.c_str());
  const auto line = [](const std::string& who, Seconds step, const std::string& what) {
    std::printf("  %-13s %10s a step%s\n", who.c_str(), format_seconds(step).c_str(),
                what.empty() ? "" : (", " + what).c_str());
  };
  line(planner, plan.predicted_step_s, "in motley's simulator");
  if (best)
    line("motley", best->simulated_s,
         fmt::format("{:.2f} times as fast ({}: {})", plan.predicted_step_s / best->simulated_s,
                     best->plan->engine, best->note));
  else
    std::printf("  %-13s no plan: %s\n", "motley", ours.reason.c_str());
  line("its own", theirs.own_s, theirs.own_what);
  for (const std::string& difference : theirs.differences)
    std::printf("  difference    %s\n", difference.c_str());
  if (!args.output.empty()) std::printf("written to %s\n", args.output.c_str());
}

void import_file(const ImportArgs& args) {
  const std::pair<const char*, bool> needed[] = {{"--model", args.model.empty()},
                                                 {"--cluster", args.cluster.empty()},
                                                 {"--batch", args.batch == 0}};
  for (const auto& [option, missing] : needed)
    if (missing)
      throw user_error("import", "{} is a plan file, which does not say everything; give {}",
                       args.path, option);
  const Json json = parse_json(read_file(args.path, size_t{1} << 28), args.path);
  const PlanReader& reader = plan_reader_of(json, args.path);
  const Cluster cluster = load_cluster(args.cluster);
  ModelGraphs graphs(args.model);
  planner::PlanOptions options = options_of(args);
  Graph graph = graphs.at(args.batch);
  if (options.precision != DType::f32) {
    check_precision(graph, options.precision);
    graph = with_precision(graph, options.precision);
  }
  const auto step = std::make_shared<planner::BatchStep>(std::move(graph), args.batch);
  PlanFile theirs;
  try {
    theirs = reader.read({args.path, json, cluster, step, options});
  } catch (const TimeIsUp&) {
    throw NoPlan(
        fmt::format("[import] {}: no program that holds to it was found in {} s; give a "
                    "longer --time-limit",
                    args.path, args.time_limit));
  }
  options.limits.deadline = Deadline::in(args.time_limit);
  const planner::PlanReport ours =
      planner::plan([&](int64_t samples) { return graphs.at(samples); }, cluster, options);
  if (!args.output.empty()) save_plan(*theirs.plan, args.output);
  print(args, reader.planner, theirs, ours);
}

}  // namespace

void add_import_command(Command app) {
  auto args = std::make_shared<ImportArgs>();
  Command command = app.add_subcommand(
      "import", "Read a directory that was exported, or another planner's plan, as a plan");
  command
      .add_option("path", args->path,
                  "Directory, as motley export writes them, or a plan that autoparallel wrote "
                  "(get_json() as a file)")
      .required();
  command.add_option("--cluster", args->cluster,
                     "Cluster file, or the name of a shipped cluster; default: the exported "
                     "plan's");
  command.add_option("-o,--output", args->output, "Plan file to write");
  command.add_flag("--json", args->json, "Print one JSON object");
  const std::string group = "Of a plan file";
  command
      .add_option("--model", args->model,
                  "The model that it is of: of the zoo, a graph file or a Hugging Face config.json")
      .group(group);
  command.add_option("--batch", args->batch, "Global batch, in samples")
      .check(in_range(int64_t{1}, int64_t{1} << 24))
      .group(group);
  add_optimizer(command, args->optimizer).group(group);
  command.add_option("--precision", args->precision, "fp32 (default), bf16 or fp16")
      .check(one_of({"fp32", "bf16", "fp16"}))
      .group(group);
  command
      .add_option("--time-limit", args->time_limit,
                  "Seconds to read it, and again to plan for comparison; default: 10")
      .check(positive_number())
      .group(group);
  command.footer(
      "Examples:\n"
      "  motley import run -o plan.json\n"
      "  motley import sharding.json --model llama --cluster amp-v100x16 --batch 64");
  command.callback([args] {
    if (!args->output.empty()) require_writable("--output", args->output);
    std::error_code code;
    if (std::filesystem::is_regular_file(args->path, code))
      import_file(*args);
    else
      import_directory(*args);
  });
}

}  // namespace motley
