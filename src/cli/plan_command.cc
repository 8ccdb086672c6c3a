#include "cli/plan_command.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "bounds/compute_bound.h"
#include "cli/commands.h"
#include "cluster/profile.h"
#include "core/error.h"
#include "core/log.h"
#include "core/parallel.h"
#include "graph/file.h"
#include "graph/precision.h"
#include "planner/calibrated.h"
#include "planner/engines.h"
#include "planner/program_plan.h"
#include "planner/segments.h"
#include "reduce/cluster.h"
#include "sim/simulate.h"
#ifdef MOTLEY_WITH_TORCH
#include "capture/source.h"
#endif

namespace motley {

namespace {

constexpr int64_t kCertifyStates = 20'000'000;  // of --certify all

struct Candidate {
  std::string engine, note;
  Seconds simulated_s = 0;
  double search_s = 0;
  std::unique_ptr<Plan> plan;
};

Json schedule_of(const PipelinePlan& pipeline) {
  Json replicas = Json::array();
  for (const ReplicaPlan& replica : pipeline.replicas) {
    Json stages = Json::array();
    for (const StagePlan& s : replica.stages)
      stages.push_back({{"devices", s.devices},
                        {"ratios", s.ratios},
                        {"warm_up", s.warm_up},
                        {"recompute", s.recompute}});
    replicas.push_back({{"micro_batches", replica.micro_batches}, {"stages", stages}});
  }
  Json schedule = {
      {"kind", pipeline.schedule}, {"micro_batch", pipeline.micro_batch}, {"replicas", replicas}};
  for (const Division& division : pipeline.zero) schedule["zero"].push_back(division.level);
  return schedule;
}

planner::VirtualDevices read_virtual_devices(const std::string& text) {
  planner::VirtualDevices wanted;
  if (text == "auto" || text == "off") return wanted;
  wanted.automatic = false;
  wanted.machine = text == "machine";
  if (wanted.machine) return wanted;
  const char* end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data(), end, wanted.size);
  if (error != std::errc() || at != end || wanted.size < 2 || wanted.size > kMaxDevices)
    throw user_error("plan",
                     "--virtual-devices is '{}'; give auto, off, machine, or a number of devices "
                     "from 2 on",
                     text);
  return wanted;
}

}  // namespace

void add_plan_command(CLI::App& app) {
  struct Args {
    std::string model, cluster, output, fix,
        engine = "auto", memory = "on", optimizer = "adamw", strategy, profile, precision = "fp32",
        recompute = "auto", virtual_devices = "auto", segments = "1", certify = "own";
    int scale = 0;
    int64_t batch = 0, micro_batch = 0;
    std::string layers;
    int threads = 0;
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
  command->add_option("--engine", args->engine, "spmd, pipeline, grid; auto: the best of all")
      ->check(CLI::IsMember({"auto", "spmd", "pipeline", "grid"}));
  command->add_option("--virtual-devices", args->virtual_devices,
                      "auto: also machines as single devices, with data parallelism inside; "
                      "machine, or devices of each: nothing else; off");
  command->add_option("--segments", args->segments,
                      "Parts of the model with shares of their own: how many, auto, or names of "
                      "modules, such as features,classifier");
  command->add_option("--fix", args->fix,
                      "Choices of the grid, such as pp=4,dp=4,tp=1,mbs=1,layers=6/6/6/6");
  command
      ->add_option("--micro-batch", args->micro_batch,
                   "Samples of a micro-batch of pipelines and grids; default: searched")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 24));
  command
      ->add_option(
          "--layers", args->layers,
          "Pieces that the pipeline engine cuts the model into, about; auto: finer until neither "
          "balance nor time gains; default: the finest, up to 160")
      ->check(CLI::Range(1, 2000) | CLI::IsMember({"auto"}));
  command->add_option("--memory-limit", args->memory, "on: device memory is a hard limit")
      ->check(CLI::IsMember({"on", "off"}));
  command
      ->add_option("--recompute", args->recompute,
                   "auto: where memory is short, activations are computed again; off")
      ->check(CLI::IsMember({"auto", "off"}));
  command->add_option("--optimizer", args->optimizer, "adamw or sgd")
      ->check(CLI::IsMember({"adamw", "sgd"}));
  command
      ->add_option("--precision", args->precision,
                   "bf16 or fp16: compute in 16 bits, parameters and optimizer state in 32")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}));
  command
      ->add_option("--time-limit", args->time_limit,
                   "Seconds that the search may take; the best plan found in them is given")
      ->check(positive_number());
  command
      ->add_option(
          "--certify", args->certify,
          "own: a lower bound of programs on the plan's devices at its shares; all: also at "
          "other shares and on other devices, which may take a minute")
      ->check(CLI::IsMember({"own", "all"}));
  command->add_option("--seed", args->seed, "Seed of the search");
  command
      ->add_option("--threads", args->threads,
                   "Threads that plan layers and stages; default: one per core")
      ->check(CLI::Range(1, 1024));
  command->add_option("-o,--output", args->output, "Plan file to write");
  command->add_flag("--json", args->json, "Print one JSON object");
  command->callback([args] {
    if (!args->output.empty()) require_writable("--output", args->output);
    Cluster cluster = load_cluster(args->cluster, args->scale, args->profile);
    const Deadline deadline = Deadline::in(args->time_limit);
    const bool captured = is_graph_file(args->model);
    GraphFile file;
    if (captured) file = load_graph_file(args->model);
#ifndef MOTLEY_WITH_TORCH
    if (!captured) become_torch();
#endif
    double capture_s = 0;
    std::mutex capturing;             // engines ask at the same time
    std::map<int64_t, Graph> graphs;  // captured
    const auto graph_in_f32 = [&](int64_t samples) -> Graph {
      if (captured) return file.at(samples);
      const std::lock_guard lock(capturing);
      const auto [it, fresh] = graphs.try_emplace(samples);
#ifdef MOTLEY_WITH_TORCH
      if (fresh) {
        GraphSource source = load_graph(args->model, samples);
        capture_s += source.capture_s;
        it->second = std::move(source.graph);
      }
#endif
      return it->second;
    };
    const DType precision = args->precision == "bf16"   ? DType::bf16
                            : args->precision == "fp16" ? DType::f16
                                                        : DType::f32;
    const auto graph_of = [&](int64_t samples) {
      Graph graph = graph_in_f32(samples);
      return precision == DType::f32 ? graph : with_precision(graph, precision);
    };
    planner::Request pipelines;
    pipelines.model = args->model;
    pipelines.batch = args->batch;
    pipelines.layers = args->layers.empty()     ? 0
                       : args->layers == "auto" ? planner::kAutomaticLayers
                                                : std::stoi(args->layers);
    pipelines.threads = args->threads;
    if (!args->profile.empty()) pipelines.measured = load_profile(args->profile).stages;
    if (!pipelines.measured.empty()) cluster = planner::corrected(cluster, pipelines, graph_of);
    spmd::PlanRequest request;
    request.model = args->model;
    request.batch = args->batch;
    parse_optimizer(args->optimizer, &request.synthesis.optimizer);
    std::string reasons;
    request.strategy = args->strategy;
    request.parts = true;
    request.reductions = reduce::reductions_of_all;
    if (args->certify == "all") request.elsewhere_states = kCertifyStates;
    request.synthesis.memory_limit = args->memory == "on";
    request.synthesis.recompute = args->recompute == "auto";
    request.synthesis.limits.deadline = deadline;
    request.synthesis.limits.seed = args->seed;
    // What an engine found; the simulator decides.
    std::vector<Candidate> candidates;
    spmd::PlanResult result;
    Seconds pipeline_bound = 0;
    planner::VirtualDevices virtual_devices = read_virtual_devices(args->virtual_devices);
    const bool forced = args->virtual_devices != "auto" && args->virtual_devices != "off";
    if (forced && (args->engine != "auto" || !args->fix.empty() || !args->strategy.empty()))
      throw user_error(
          "plan",
          "--virtual-devices {} stands beside --engine, --fix or --strategy; leave one "
          "of them out",
          args->virtual_devices);
    const planner::SegmentRequest segments = planner::parse_segments(args->segments);
    if (!segments.one() && (!args->strategy.empty() || !args->fix.empty() || forced ||
                            args->engine == "pipeline" || args->engine == "grid"))
      throw user_error(
          "plan",
          "--segments {} is of programs that are searched by the spmd engine; leave out "
          "--strategy, --fix and other engines",
          args->segments);
    std::vector<planner::Segmented> tried;
    const bool all = args->engine == "auto" && args->strategy.empty() && !forced;
    const bool spmd_wanted =
        args->fix.empty() && !forced && (all || args->engine == "spmd" || args->engine == "auto");
    // Each engine has its own result. The second ones need not look hard for what is slower than
    // those of the first.
    std::vector<std::function<void()>> first, second;
    result.feasible = false;
    if (spmd_wanted)
      first.push_back([&, graph = graph_of(args->batch)] {
        for (const std::string& op : Theory(graph).unknown_ops())
          spdlog::warn("{} is not in the op table: it runs replicated", op);
        result = spmd::plan(graph, cluster, request);
        result = plan_segments(std::move(result), graph, cluster, request, segments, &tried);
      });
    std::optional<planner::EngineResult> by_pipeline, by_grid, by_virtual;
    if (args->strategy.empty()) {
      pipelines.optimizer = request.synthesis.optimizer;
      pipelines.memory_limit = request.synthesis.memory_limit;
      pipelines.recompute = request.synthesis.recompute;
      pipelines.limits = request.synthesis.limits;
      pipelines.seed = args->seed;
      if (args->micro_batch > 0) pipelines.micro_batches = {args->micro_batch};
      for (int64_t size : pipelines.micro_batches)
        if (args->batch % size != 0)
          throw user_error("plan",
                           "--batch {} is not a multiple of micro-batches of {}; give one that is",
                           args->batch, size);
      const grid::Fixed fixed = grid::parse_fixed(args->fix);
      if (args->fix.empty() && (all || args->engine == "pipeline"))
        second.push_back([&] { by_pipeline = plan_pipeline(pipelines, cluster, graph_of); });
      if (all || args->engine == "grid" || !args->fix.empty())
        first.push_back([&, fixed] { by_grid = plan_grid(pipelines, cluster, graph_of, fixed); });
      if (forced || (all && args->fix.empty() && args->virtual_devices == "auto"))
        second.push_back([&] {
          if (result.feasible) virtual_devices.known = result.plan.predicted_step_s;
          if (by_grid.has_value() && !by_grid->plans.empty())
            virtual_devices.known =
                std::min(virtual_devices.known, by_grid->plans[0]->predicted_step_s);
          by_virtual = plan_virtual(pipelines, cluster, graph_of, virtual_devices);
        });
    }
    for (const auto& searches : {first, second})
      parallel_for(static_cast<int>(searches.size()), args->threads, [&](int i) { searches[i](); });
    if (result.feasible)
      candidates.push_back({"spmd", result.reason, simulate(result.plan).step, result.search_s,
                            std::make_unique<Plan>(std::move(result.plan))});
    else if (spmd_wanted)
      reasons += "spmd: " + result.reason;
    const auto bound_of_computation = [&] {
      const Graph graph = graph_of(args->batch);
      return planner::compute_bound(Theory(graph), CostModel(cluster), 1);
    };
    std::string left_out;  // why plans that do not compute what one device would are left out
    for (auto* found : {&by_pipeline, &by_grid, &by_virtual}) {
      if (!found->has_value()) continue;
      planner::EngineResult& engine = **found;
      if (engine.plans.empty())
        reasons +=
            fmt::format("{}{}: {}", reasons.empty() ? "" : "; ", engine.engine, engine.reason);
      else if (pipeline_bound == 0)
        pipeline_bound = bound_of_computation();
      for (size_t i = 0; i < engine.plans.size(); ++i) {
        const MicroBatch& part = engine.plans[i]->pipeline->part();
        if (!part.exact() && all) {
          if (left_out.empty()) left_out = normalised_by_part(*engine.plans[i]->graph, part);
          continue;
        }
        engine.plans[i]->lower_bound_s = pipeline_bound;
        candidates.push_back({engine.engine, engine.notes[i], engine.plans[i]->predicted_step_s,
                              engine.search_s, std::move(engine.plans[i])});
      }
    }
    Json baselines = Json::array();
    for (const spmd::Baseline& b : result.baselines) {
      Json j = {{"name", b.name},
                {"predicted_step_s", b.feasible ? Json(b.predicted_step_s) : Json()},
                {"feasible", b.feasible},
                {"reason", b.reason}};
      baselines.push_back(j);
    }
    if (!left_out.empty()) {
      left_out +=
          ", unlike on one device; such plans are left out unless an --engine or "
          "--virtual-devices asks for them";
      spdlog::info("{}", left_out);
    }
    if (candidates.empty()) {
      if (!left_out.empty()) reasons += (reasons.empty() ? "" : "; ") + left_out;
      if (args->json)
        print_json({{"engine", args->engine},
                    {"feasible", false},
                    {"reason", reasons},
                    {"baselines", baselines},
                    {"search_s", result.search_s}});
      if (deadline.over())
        throw NoPlan(fmt::format(
            "[plan] no plan for {} on {} was found in {} s: {}; give a longer --time-limit",
            args->model, cluster.name, args->time_limit, reasons));
      throw NoPlan(
          fmt::format("[plan] no plan for {} on {} fits: {}; use more or larger devices, a smaller "
                      "--batch, or --memory-limit off",
                      args->model, cluster.name, reasons));
    }
    std::stable_sort(
        candidates.begin(), candidates.end(),
        [](const Candidate& a, const Candidate& b) { return a.simulated_s < b.simulated_s; });
    for (Candidate& c : candidates) c.plan->precision = precision;
    const Candidate& best = candidates[0];
    for (size_t c = 1; c < candidates.size(); ++c)
      best.plan->alternatives.push_back(
          {candidates[c].engine, candidates[c].note, false, true, candidates[c].simulated_s});
    for (const spmd::Baseline& b : result.baselines)
      best.plan->alternatives.push_back(
          {b.name, b.feasible ? "" : b.reason, true, b.feasible, b.predicted_step_s});
    const Plan& plan = *best.plan;
    if (plan.pipeline && !plan.pipeline->part().exact())
      spdlog::warn("{}, unlike on one device; --engine spmd computes the same as one device",
                   normalised_by_part(*plan.graph, plan.pipeline->part()));
    if (!args->output.empty()) save_plan(plan, args->output);
    const bool spmd = !plan.pipeline;
    const double gap = 1 - plan.lower_bound_s / plan.predicted_step_s;
    if (args->json) {
      // Of every device of the cluster; 0 of those that the plan leaves out.
      auto spread = [&](const std::vector<double>& of_plan) {
        if (!spmd) return of_plan;
        std::vector<double> of_all(cluster.size(), 0);
        for (size_t i = 0; i < of_plan.size(); ++i) of_all[result.devices[i]] = of_plan[i];
        return of_all;
      };
      const auto bound_or_null = [&](Seconds bound) {
        return spmd && args->certify == "all" && bound > 0 ? Json(bound) : Json();
      };
      Json ratios = Json::array();  // of several segments a list of each
      if (spmd && plan.ratios.size() == 1)
        ratios = spread(plan.ratios[0]);
      else if (spmd)
        for (const auto& of_segment : plan.ratios) ratios.push_back(spread(of_segment));
      Json tries = Json::array();  // ways to cut the model into segments that were planned for
      for (const planner::Segmented& s : tried)
        tries.push_back({{"what", s.what},
                         {"segments", s.segments},
                         {"simulated_step_s", s.feasible ? Json(s.simulated_s) : Json()},
                         {"search_s", s.search_s}});
      Json list = Json::array();
      for (const Candidate& c : candidates)
        list.push_back({{"engine", c.engine},
                        {"what", c.note},
                        {"predicted_step_s", c.plan->predicted_step_s},
                        {"simulated_step_s", c.simulated_s},
                        {"search_s", c.search_s}});
      print_json({{"engine", plan.engine},
                  {"feasible", true},
                  {"predicted_step_s", plan.predicted_step_s},
                  {"lower_bound_s", plan.lower_bound_s},
                  {"gap", gap},
                  {"other_shares_bound_s", bound_or_null(result.shares_bound_s)},
                  {"other_devices_bound_s", bound_or_null(result.elsewhere_bound_s)},
                  {"search_s", best.search_s},
                  {"capture_s", capture_s},
                  {"peak_memory_bytes", spread(plan.peak_memory_bytes)},
                  {"baselines", baselines},
                  {"candidates", list},
                  {"ratios", spmd ? ratios : Json()},
                  {"segments", tries},
                  {"schedule", spmd ? Json() : schedule_of(*plan.pipeline)},
                  {"stop_reason", spmd ? result.reason : best.note},
                  {"states", result.states},
                  {"solves", result.solves}});
      return;
    }
    std::printf("%s", describe(plan).c_str());
    if (spmd && result.hidden_s > 0.005 * plan.predicted_step_s)
      std::printf("  overlap     gradients travel beside the backward pass: %s less, %s a step\n",
                  format_seconds(result.hidden_s).c_str(),
                  format_seconds(plan.predicted_step_s).c_str());
    if (plan.cluster.size() < cluster.size())
      std::printf("  devices     %s\n",
                  spmd::part_in_words(result.devices, cluster.size(), cluster.name).c_str());
    std::string apart;
    if (const Seconds bound = result.synchronised_bound_s; bound > 0)
      apart = fmt::format(", {} if nothing overlaps (gap {:.2f}%)", format_seconds(bound),
                          100 * (1 - bound / (plan.predicted_step_s + result.hidden_s)));
    if (spmd)
      std::printf(
          "  certificate any program at these shares takes at least %s (gap %.2f%%)%s; %s after %d "
          "searches, %s\n",
          format_seconds(plan.lower_bound_s).c_str(), 100 * gap, apart.c_str(),
          result.reason.c_str(), result.solves, format_seconds(result.search_s).c_str());
    if (spmd && args->certify == "all" && result.elsewhere_bound_s > 0)
      for (const auto& [where, bound] : {std::pair("at other shares", result.shares_bound_s),
                                         std::pair("on other devices", result.elsewhere_bound_s)})
        std::printf("              %s any takes at least %s (gap %.2f%%)\n", where,
                    format_seconds(bound).c_str(), 100 * (1 - bound / plan.predicted_step_s));
    if (!spmd)
      std::printf("  certificate computation alone takes any plan at least %s (gap %.1f%%)\n",
                  format_seconds(plan.lower_bound_s).c_str(), 100 * gap);
    for (size_t c = 1; c < candidates.size(); ++c)
      std::printf("  beside      %-16s %s (%.2fx)  %s\n", candidates[c].engine.c_str(),
                  format_seconds(candidates[c].simulated_s).c_str(),
                  candidates[c].simulated_s / best.simulated_s, candidates[c].note.c_str());
    for (const planner::Segmented& s : tried)
      std::printf("  tried       %s: %s\n", s.what.c_str(),
                  s.feasible        ? (format_seconds(s.simulated_s) + " simulated").c_str()
                  : s.segments == 1 ? "is one segment"
                                    : "does not fit");
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
