#include "cli/plan_command.h"

#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "cli/commands.h"
#include "cli/model_graphs.h"
#include "cli/plan_output.h"
#include "cluster/profile.h"
#include "core/error.h"
#include "core/interrupted.h"
#include "core/parallel.h"
#include "core/process.h"
#include "core/terminal.h"
#include "planner/planner.h"
#include "planner/targets.h"

namespace motley {

namespace {

struct PlanArgs {
  std::string model, cluster, output, fix, target,
      engine = "auto", memory = "on", optimizer = "adamw", strategy, profile, precision = "fp32",
      recompute = "auto", virtual_devices = "auto", segments = "1", layers, duplex = "auto";
  int scale = 0, threads = 0;
  int64_t batch = 0, micro_batch = 0;
  double time_limit = 0;  // 0: not given
  int64_t work_limit = 0;
  uint64_t seed = 0;
  int redundancy = 0;
  bool json = false, certify = false, no_comparison = false;
};

void add_question(Command command, PlanArgs* args) {
  command
      .add_option("model", args->model,
                  "Model of the zoo (name or name:key=value,...), a graph file, or a Hugging Face "
                  "config.json")
      .required();
  command.add_option("--cluster", args->cluster, "Cluster file, or the name of a shipped cluster")
      .required();
  command
      .add_option("--batch", args->batch,
                  "Global batch, in samples; of a graph file by default that of its capture")
      .check(in_range(int64_t{1}, int64_t{1} << 24));
  command.add_option("-o,--output", args->output, "Plan file to write");
  command.add_flag("--json", args->json, "Print one JSON object");
}

void add_search_options(Command command, PlanArgs* args) {
  const std::string group = "Search";
  command
      .add_option("--engine", args->engine, "Which engine plans; auto (default): the best of all")
      .check(one_of(planner::engine_names()))
      .group(group);
  command
      .add_option(
          "--for", args->target,
          "Only plans that this training framework can say, so that motley export can write "
          "them; tells what that costs: " +
              planner::target_names())
      .group(group);
  command
      .add_flag("--no-comparison", args->no_comparison,
                "With --for: do not plan without its limits too, which takes as long again")
      .group(group);
  command
      .add_option("--strategy", args->strategy,
                  "Plan one of the usual strategies as it is, without a search")
      .check(one_of(planner::strategies()))
      .group(group);
  command
      .add_option("--fix", args->fix,
                  "Choices that the grid keeps, such as pp=4,dp=4,tp=1,mbs=1,layers=6/6/6/6")
      .group(group);
  command
      .add_option(
          "--virtual-devices", args->virtual_devices,
          "Machines as single devices with data parallelism inside. auto (default): tried too; "
          "machine, or a number of devices of each: nothing else is; off: never")
      .group(group);
  command
      .add_option(
          "--segments", args->segments,
          "Parts of the model with shares of their own: a number (default: 1), auto, or names "
          "of modules, such as features,classifier")
      .group(group);
  command
      .add_option("--duplex", args->duplex,
                  "Parts of the batch that take turns, one communicating while another computes: "
                  "auto (default): two where that is faster; a number; off")
      .group(group);
  command
      .add_option(
          "--micro-batch", args->micro_batch,
          "Samples of a micro-batch of pipelines and grids; default: those that are fastest")
      .check(in_range(int64_t{1}, int64_t{1} << 24))
      .group(group);
  command
      .add_option(
          "--layers", args->layers,
          "About how many pieces the pipeline engine cuts the model into; auto: finer until plans "
          "stop getting better; default: the finest, up to 160")
      .check(in_range_or(1, 2000, "auto"))
      .group(group);
  command
      .add_option("--time-limit", args->time_limit,
                  "Seconds from the start of the program, after which the best plan found is "
                  "given; default: 5 for up to 64 devices and 20,000 operators, else 10, none "
                  "with --work-limit. "
                  "Ctrl-C ends it too")
      .check(positive_number())
      .group(group);
  command
      .add_option("--work-limit", args->work_limit,
                  "How much planning may do, in states that are searched, about: the same plan on "
                  "every machine, on one thread")
      .check(in_range(int64_t{1}, int64_t{1} << 60))
      .group(group);
  command
      .add_flag("--certify", args->certify,
                "Look for lower bounds until they are close; default: for a tenth of the search")
      .group(group);
  command.add_option("--seed", args->seed, "Seed of the search; default: 0")
      .check(whole_number())
      .group(group);
  command
      .add_option("--threads", args->threads,
                  "Threads that plan layers and stages; default: one per core")
      .check(in_range(1, 1024))
      .group(group);
}

void add_training_options(Command command, PlanArgs* args) {
  const std::string group = "Training";
  add_optimizer(command, args->optimizer).group(group);
  command
      .add_option(
          "--precision", args->precision,
          "Type to compute in: fp32 (default), bf16 or fp16; parameters and optimizer state "
          "stay in 32 bits")
      .check(one_of({"fp32", "bf16", "fp16"}))
      .group(group);
  command
      .add_option(
          "--recompute", args->recompute,
          "Whether activations are computed again where memory is short: auto (default) or off")
      .check(one_of({"auto", "off"}))
      .group(group);
  command
      .add_option("--redundancy", args->redundancy,
                  "How many more devices keep what one device holds alone of parameters and "
                  "optimizer state: 0 (default), or 1, so that a lost worker loses nothing; of "
                  "plans of one program")
      .group(group);
  command
      .add_option("--memory-limit", args->memory,
                  "Whether device memory is a hard limit: on (default) or off")
      .check(one_of({"on", "off"}))
      .group(group);
}

void add_cluster_options(Command command, PlanArgs* args) {
  const std::string group = "Cluster";
  command.add_option("--profile", args->profile, "Measured profile, from motley calibrate")
      .group(group);
  command
      .add_option("--scale", args->scale,
                  "Plan for the cluster scaled down to at most so many workers of this machine")
      .check(in_range(1, 64))
      .group(group);
}

planner::PlanOptions options_of(const PlanArgs& args) {
  planner::PlanOptions options;
  options.model = args.model;
  options.engine = args.engine;
  options.target = args.target;
  options.strategy = args.strategy;
  options.fix = args.fix;
  options.virtual_devices = planner::parse_virtual_devices(args.virtual_devices);
  options.segments = planner::parse_segments(args.segments);
  options.duplex = planner::parse_duplex(args.duplex);
  parse_optimizer(args.optimizer, &options.optimizer);
  options.redundancy = args.redundancy;
  options.precision = args.precision == "bf16"   ? DType::bf16
                      : args.precision == "fp16" ? DType::f16
                                                 : DType::f32;
  options.memory_limit = args.memory == "on";
  options.recompute = args.recompute == "auto";
  if (args.micro_batch > 0) options.micro_batches = {args.micro_batch};
  options.layers = planner::parse_layers(args.layers);
  if (!args.profile.empty()) options.measured = load_profile(args.profile).stages;
  options.limits.seed = args.seed;
  options.certify = args.certify;
  options.threads = args.work_limit > 0 ? 1 : args.threads;
  return options;
}

// Set by Ctrl-C while a plan is looked for.
std::atomic<bool> interrupted = false;

// While it lives, Ctrl-C ends planning with what there is; once more, it ends the program.
class EndsPlanning {
 public:
  EndsPlanning() {
    struct sigaction action = {};
    action.sa_handler = [](int) { interrupted = true; };
    action.sa_flags = static_cast<int>(SA_RESETHAND);
    sigaction(SIGINT, &action, &before_);
  }
  ~EndsPlanning() { sigaction(SIGINT, &before_, nullptr); }

 private:
  struct sigaction before_ = {};
};

// One line that is written over and over, ten times a second at most; nothing on what is no
// terminal.
class ProgressLine {
 public:
  ~ProgressLine() {
    if (shown_) std::fputs("\r\033[K", stderr);
  }
  void show(const planner::Progress& now) {
    if (!terminal_ || now.seconds < next_) return;
    next_ = now.seconds + 0.1;
    shown_ = true;
    std::string line = fmt::format("{:.1f} s: ", now.seconds);
    if (!now.engine.empty())
      line += fmt::format("best {} ({}), ", format_seconds(now.best), now.engine);
    if (now.bound > 0) line += fmt::format("none below {}, ", format_seconds(now.bound));
    std::fprintf(stderr, "\r\033[K%sat %s", line.c_str(), now.trying.c_str());
    std::fflush(stderr);
  }

 private:
  const bool terminal_ = isatty(STDERR_FILENO) != 0;
  bool shown_ = false;
  double next_ = 0;
};

// Seconds that planning may take from the start of the program; 0: any.
double time_limit_of(const PlanArgs& args, int64_t batch, const Cluster& cluster,
                     ModelGraphs* graphs) {
  if (args.time_limit > 0 || args.work_limit > 0) return args.time_limit;
  return planner::usual_time_limit(cluster, graphs->at(batch));
}

std::string limit_of(const PlanArgs& args, double seconds) {
  return seconds > 0 ? fmt::format("{} s", seconds) : fmt::format("{} states", args.work_limit);
}

// Since the program was started, seconds: libraries are loaded before main(). 0: nobody knows.
double running() {
  const double ticks = std::atof(process_field(getpid(), 22).c_str());
  timespec now;
  if (ticks <= 0 || clock_gettime(CLOCK_BOOTTIME, &now) != 0) return 0;
  return std::max(0.0, static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec) -
                           ticks / static_cast<double>(sysconf(_SC_CLK_TCK)));
}

Deadline deadline_of(const PlanArgs& args, double seconds) {
  constexpr double kLeast = 0.1, kOutput = 0.05;  // that it has, that follows: parts of the limit
  Deadline::Limits limits;
  limits.interrupted = &interrupted;
  if (args.work_limit > 0) limits.work = args.work_limit;
  if (seconds > 0) limits.seconds = std::max(kLeast * seconds, (1 - kOutput) * seconds - running());
  return Deadline(limits);
}

planner::PlanReport find_plan(const Cluster& cluster, ModelGraphs* graphs,
                              planner::PlanOptions* options) {
  const EndsPlanning ends;
  ProgressLine line;
  options->record =
      std::make_shared<planner::Record>([&](const planner::Progress& now) { line.show(now); });
  return planner::plan([&](int64_t samples) { return graphs->at(samples); }, cluster, *options);
}

// Thrown once parameters are known that fit nowhere.
struct TooLarge {
  std::string why;
};

void run(const PlanArgs& args) {
  if (!args.output.empty()) require_writable("--output", args.output);
  const Cluster cluster = load_cluster(args.cluster, args.scale, args.profile);
  planner::PlanOptions options = options_of(args);
  start_threads(options.threads);
  ModelGraphs graphs(args.model, [&](const Graph& parameters) {
    if (std::string why = planner::too_large(parameters, cluster, options); !why.empty())
      throw TooLarge{std::move(why)};
  });
  double seconds = 0;
  planner::PlanReport report;
  options.batch = args.batch > 0 ? args.batch : graphs.samples();
  if (options.batch == 0)
    throw user_error("plan", "--batch is missing; give the number of samples in a step");
  try {
    graphs.at(options.batch);  // before anything that would have to be done again
    seconds = time_limit_of(args, options.batch, cluster, &graphs);
    options.limits.deadline = deadline_of(args, seconds);
    report = find_plan(cluster, &graphs, &options);
  } catch (const TooLarge& refused) {
    report.reason = refused.why;
  }
  if (interrupted && report.candidates.empty())
    throw Interrupted(SIGINT, "[plan] interrupted before a plan was found");
  if (report.candidates.empty()) {
    if (args.json) print_json(no_plan_json(report, options));
    leave(fail(3, no_plan(report, cluster, options, limit_of(args, seconds))));
  }
  if (interrupted)
    std::fprintf(stderr, "motley: [plan] interrupted: this is the best plan found in %.1f s\n",
                 options.record->now().seconds);
  else if (report.out_of_time)
    std::fprintf(stderr,
                 "motley: [plan] this is the best plan found in %s; a longer limit may find a "
                 "better one\n",
                 limit_of(args, seconds).c_str());
  planner::PlanReport free;  // any plan, for comparison, in as much time again
  if (!options.target.empty() && !interrupted && !args.no_comparison) {
    planner::PlanOptions any = options;
    any.target.clear();
    any.fix.clear();
    any.limits.deadline = deadline_of(args, seconds > 0 ? seconds + running() : 0);
    free = find_plan(cluster, &graphs, &any);
  }
  std::string words;
  parallel_for(2, options.threads, [&](int i) {
    if (i == 0 && !args.output.empty())
      save_plan(*report.best().plan, args.output, options.threads);
    if (i == 1 && !args.json) words = describe_search(report, cluster);
  });
  if (args.json) {
    Json json = plan_json(report, cluster, graphs.capture_s(), *options.record);
    if (!options.target.empty()) json["for"] = target_json(report, free, options.target);
    print_json(json);
  } else {
    std::printf("%s", words.c_str());
    if (!options.target.empty())
      std::printf("%s", describe_target(report, free, options.target).c_str());
    if (!args.output.empty()) std::printf("written to %s\n", args.output.c_str());
  }
  leave(0);
}

}  // namespace

void add_plan_command(Command app) {
  auto args = std::make_shared<PlanArgs>();
  Command command = app.add_subcommand("plan", "Find the fastest plan for a model on a cluster");
  add_question(command, args.get());
  add_search_options(command, args.get());
  add_training_options(command, args.get());
  add_cluster_options(command, args.get());
  command.footer(
      "Examples:\n"
      "  motley plan gpt:layers=4,hidden=512 --cluster local-mixed-4 --batch 32 -o plan.json\n"
      "  motley plan bert-moe --cluster hap-64 --batch 256 --engine spmd --json\n"
      "  motley plan gpt --cluster amp-mixed --batch 64 --fix pp=4,dp=4 --precision bf16\n"
      "  motley plan llama --cluster hap-64 --batch 256 --for megatron -o plan.json");
  command.callback([args] { run(*args); });
}

}  // namespace motley
