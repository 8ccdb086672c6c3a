#include "cli/plan_command.h"

#include <CLI/CLI.hpp>
#include <cstdio>

#include "cli/commands.h"
#include "cluster/profile.h"
#include "core/log.h"
#include "spmd/planner.h"
#ifdef MOTLEY_WITH_TORCH
#include "torch/source.h"
#else
#include "graph/file.h"
#endif

namespace motley {

void add_plan_command(CLI::App& app) {
  struct Args {
    std::string model, cluster, output, engine = "auto", memory = "on", optimizer = "adamw",
                                        strategy, profile;
    int scale = 0;
    int64_t batch = 0;
    double time_limit = 1e30;
    uint64_t seed = 0;
    bool json = false;
  };
  auto args = std::make_shared<Args>();
  auto* command =
      app.add_subcommand("plan", "Find the fastest distributed program of a model on a cluster");
  command
      ->add_option("model", args->model,
                   "Zoo model (name or name:key=value,...) or a captured graph file")
      ->required();
  command->add_option("--cluster", args->cluster, "Cluster file, or the name of a shipped cluster")
      ->required();
  command->add_option("--batch", args->batch, "Global batch")
      ->required()
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 24));
  command
      ->add_option("--scale", args->scale,
                   "Plan for the cluster scaled down to at most so many workers of this machine")
      ->check(CLI::Range(1, 64));
  command->add_option("--profile", args->profile, "Measured profile, from motley calibrate");
  command
      ->add_option("--strategy", args->strategy, "Plan one of the baselines instead of searching")
      ->check(CLI::IsMember(spmd::strategies()));
  command->add_option("--engine", args->engine, "auto or spmd")
      ->check(CLI::IsMember({"auto", "spmd"}));
  command->add_option("--memory-limit", args->memory, "on: device memory is a hard limit")
      ->check(CLI::IsMember({"on", "off"}));
  command->add_option("--optimizer", args->optimizer, "adamw or sgd")
      ->check(CLI::IsMember({"adamw", "sgd"}));
  command->add_option("--time-limit", args->time_limit, "Seconds a program search may take");
  command->add_option("--seed", args->seed, "Seed of the search");
  command->add_option("-o,--output", args->output, "Plan file to write");
  command->add_flag("--json", args->json, "Print one JSON object");
  command->callback([args] {
    const Cluster cluster = load_cluster(args->cluster, args->scale, args->profile);
#ifdef MOTLEY_WITH_TORCH
    GraphSource source = load_graph(args->model, args->batch);
    Graph graph = std::move(source.graph);
    double capture_s = source.capture_s;
#else
    if (!is_graph_file(args->model)) become_torch();
    Graph graph = load_graph_file(args->model, args->batch);
    double capture_s = 0;
#endif
    for (const std::string& op : Theory(graph).unknown_ops())
      spdlog::warn("{} is not in the op table: it runs replicated", op);
    spmd::PlanRequest request;
    request.model = args->model;
    request.batch = args->batch;
    parse_optimizer(args->optimizer, &request.synthesis.optimizer);
    request.strategy = args->strategy;
    request.parts = true;
    request.synthesis.memory_limit = args->memory == "on";
    request.synthesis.limits.time_limit_s = args->time_limit;
    request.synthesis.limits.seed = args->seed;
    spmd::PlanResult result = spmd::plan(std::move(graph), cluster, request);
    Json baselines = Json::array();
    for (const spmd::Baseline& b : result.baselines) {
      Json j = {{"name", b.name},
                {"predicted_step_s", b.feasible ? Json(b.predicted_step_s) : Json()},
                {"feasible", b.feasible},
                {"reason", b.reason}};
      baselines.push_back(j);
    }
    if (!result.feasible) {
      if (args->json)
        print_json({{"engine", "spmd"},
                    {"feasible", false},
                    {"reason", result.reason},
                    {"baselines", baselines},
                    {"search_s", result.search_s}});
      throw NoPlan(
          fmt::format("[plan] no plan for {} on {} fits: {}; use more or larger devices, a smaller "
                      "--batch, or --memory-limit off",
                      args->model, cluster.name, result.reason));
    }
    const Plan& plan = result.plan;
    if (!args->output.empty()) save_plan(plan, args->output);
    double gap = (plan.predicted_step_s - plan.lower_bound_s) / plan.predicted_step_s;
    if (args->json) {
      print_json({{"engine", plan.engine},
                  {"feasible", true},
                  {"predicted_step_s", plan.predicted_step_s},
                  {"lower_bound_s", plan.lower_bound_s},
                  {"gap", gap},
                  {"search_s", result.search_s},
                  {"capture_s", capture_s},
                  {"peak_memory_bytes", plan.peak_memory_bytes},
                  {"baselines", baselines},
                  {"candidates", Json::array({{{"engine", "spmd"},
                                               {"predicted_step_s", plan.predicted_step_s}}})},
                  {"ratios", plan.ratios},
                  {"schedule", nullptr},
                  {"stop_reason", result.reason},
                  {"states", result.states},
                  {"solves", result.solves}});
      return;
    }
    std::printf("%s", describe(plan).c_str());
    if (plan.cluster.size() < cluster.size())
      std::printf(
          "  devices     %d of the %d of %s: with the others it would communicate longer than "
          "they save\n",
          plan.cluster.size(), cluster.size(), cluster.name.c_str());
    std::printf(
        "  certificate any program at these shares takes at least %s (gap %.2f%%); %s after %d "
        "searches, %s\n",
        format_seconds(plan.lower_bound_s).c_str(), 100 * gap, result.reason.c_str(), result.solves,
        format_seconds(result.search_s).c_str());
    for (const spmd::Baseline& b : result.baselines) {
      if (b.feasible)
        std::printf("  against     %-16s %s (%.2fx)\n", b.name.c_str(),
                    format_seconds(b.predicted_step_s).c_str(),
                    b.predicted_step_s / plan.predicted_step_s);
      else
        std::printf("  against     %-16s infeasible: %s\n", b.name.c_str(), b.reason.c_str());
    }
    if (!args->output.empty()) std::printf("written to %s\n", args->output.c_str());
  });
}

}  // namespace motley
