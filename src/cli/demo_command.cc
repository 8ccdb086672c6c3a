#include "cli/demo_command.h"

#include <unistd.h>

#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "capture/source.h"
#include "cli/commands.h"
#include "cli/run_command.h"
#include "comm/launch.h"
#include "core/error.h"
#include "core/units.h"
#include "planner/planner.h"
#include "runtime/trainer.h"

namespace motley {

namespace {

constexpr int64_t kFitBatch = 8;  // of the larger step that the measurement is fitted to

struct DemoOptions {
  std::string cluster = "local-mixed-4";
  std::string model = "gpt:layers=4,hidden=256,heads=4,seq=64,vocab=256";
  int64_t batch = 48, steps = 30;
  bool measure = false;  // this process is a worker that measures
  bool json = false;
};

char folder_path[4096] = "";  // of the folder, for remove_and_end
constexpr const char* kFiles[] = {"cluster.yaml", "plan.json"};

// On a signal: removes the folder's files and the folder, by calls that a handler may make.
void remove_and_end(int signal) {
  const size_t size = std::strlen(folder_path);
  if (size > 0 && size + 32 < sizeof folder_path) {
    for (const char* file : kFiles) {
      folder_path[size] = '/';
      std::strcpy(folder_path + size + 1, file);
      unlink(folder_path);
    }
    folder_path[size] = 0;
    rmdir(folder_path);
  }
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

// A folder that goes with the object, or with the process if a signal ends it. There is one.
class Folder {
 public:
  Folder() {
    std::string name = std::filesystem::temp_directory_path().string() + "/motley-demo-XXXXXX";
    if (mkdtemp(name.data()) == nullptr)
      throw user_error("demo", "no folder can be made in {}; set TMPDIR",
                       std::filesystem::temp_directory_path().string());
    path_ = name;
    std::strncpy(folder_path, name.c_str(), sizeof folder_path - 1);
    for (int signal : {SIGINT, SIGTERM, SIGHUP}) std::signal(signal, remove_and_end);
  }
  ~Folder() {
    for (int signal : {SIGINT, SIGTERM, SIGHUP}) std::signal(signal, SIG_DFL);
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  std::string file(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

// What a worker does for measure_cluster: prints the calibrated cluster.
void measure_as_worker(const DemoOptions& options) {
  const auto where = rendezvous_from_environment();
  MOTLEY_CHECK(where.has_value(), "measuring is for workers");
  const Cluster cluster = load_cluster(options.cluster);
  set_threads(1);
  const auto group = join_group(*where);
  const std::string pacing = limit_bandwidth(*group, cluster);
  const double speed = cluster.type_of(where->rank).speed;
  Measured mine = measure(*group, speed);
  fit_to_model(*group, speed, options.model, kFitBatch, &mine);
  const Cluster result = calibrated(*group, cluster, mine);
  if (where->rank == 0)
    std::printf("%s\n", Json({{"pacing", pacing}, {"cluster", to_yaml(result)}}).dump().c_str());
  finish_output();
  group->barrier();
}

struct Trained {
  std::string name;
  Json report;
  Seconds predicted = 0, measured = 0;
};

class Demo {
 public:
  explicit Demo(const DemoOptions& options) : options_(options) {}

  void run() {
    const auto start = std::chrono::steady_clock::now();
    prepare_workers(run_program);
    measure_cluster();
    plan();
    describe_plans();
    Trained planned = train("planned", planned_, options_.steps);
    const int64_t few = std::min<int64_t>(options_.steps, 6);
    Trained even = train("even data parallelism", even_, few);
    Trained alone = train("one device", alone_, std::min<int64_t>(options_.steps, 4));
    report(planned, even, alone,
           std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }

 private:
  template <typename... Args>
  void say(fmt::format_string<Args...> format, Args&&... args) {
    std::fprintf(options_.json ? stderr : stdout, "%s\n",
                 fmt::format(format, std::forward<Args>(args)...).c_str());
    std::fflush(options_.json ? stderr : stdout);
  }

  // `cluster` with what its workers measured. Sets *pacing to the mode in effect.
  Cluster measured(const Cluster& cluster, std::string* pacing) {
    const std::string file = folder_.file("cluster.yaml");
    write_file(file, to_yaml(cluster));
    LaunchOptions launch;
    launch.arguments = {"demo", "--cluster", file, "--model", options_.model, "--measure"};
    launch.workers = cluster.size();
    launch.capture = launch.again = true;
    const Json result = parse_json(launch_workers(launch), "measurement");
    *pacing = result["pacing"].get<std::string>();
    return parse_cluster(result["cluster"].get<std::string>(), "measured cluster");
  }

  void measure_cluster() {
    const Cluster nominal = load_cluster(options_.cluster);
    for (const DeviceType& type : nominal.types)
      if (!(type.speed > 0))
        throw user_error("demo",
                         "--cluster {}: device type {} has speed 0; give its share of a core",
                         options_.cluster, type.name);
    say("1. Measuring this machine, {} workers at once, padded to their speeds: products, "
        "elementwise ops, a step of the model, the ring ...",
        nominal.size());
    std::string pacing;
    cluster_ = measured(nominal, &pacing);
    for (const DeviceType& t : cluster_.types)
      say("   {:<6} {:.0f}% of a core: {}/s in matrix products, {}/s elementwise, {} per operator",
          t.name, 100 * t.speed, format_flops(t.flops), format_bytes(t.memory_bandwidth),
          format_seconds(t.overhead));
    const CollectiveModel net(cluster_);
    say("   ring through all workers: {}/s, {} a hop ({})", format_bytes(net.ring_bandwidth()),
        format_seconds(net.latency_of_ring()), pacing);
    first_ = measured(flat_cluster({nominal.type_of(0)}, {1}, nominal.groups[0].link), &pacing);
    say("   {} without the others: {}/s in matrix products", first_.types[0].name,
        format_flops(first_.types[0].flops));
  }

  void plan() {
    say("2. Planning {} with a global batch of {} ...", options_.model, options_.batch);
    GraphSource source = load_graph(options_.model, options_.batch);
    planner::PlanOptions options;
    options.model = options_.model;
    options.batch = options_.batch;
    options.baselines = false;
    const auto search = [&](const Cluster& cluster) {
      planner::PlanReport report =
          planner::plan([&](int64_t) { return source.graph; }, cluster, options);
      if (report.candidates.empty())
        throw NoPlan(fmt::format("[demo] no plan fits: {}", report.reason));
      return std::move(*report.candidates[0].plan);
    };
    planned_ = search(cluster_);
    alone_ = search(first_);
    options.strategy = "dp-ev";
    even_ = search(cluster_);
  }

  void describe_plans() {
    say("{}", describe(planned_));
    say("   Even data parallelism is predicted to take {} a step, {} alone {}.\n",
        format_seconds(even_.predicted_step_s), cluster_.type_of(0).name,
        format_seconds(alone_.predicted_step_s));
  }

  Trained train(const std::string& name, const Plan& plan, int64_t steps) {
    say("{}. Training, {}: {} steps on {} worker{}", ++section_ + 2, name, steps,
        plan.cluster.size(), plan.cluster.size() > 1 ? "s" : "");
    RunOptions run;
    run.plan = folder_.file("plan.json");
    save_plan(plan, run.plan);
    run.steps = steps;
    run.emulate = run.json = true;
    LaunchOptions launch;
    launch.arguments = run.arguments();
    launch.workers = plan.cluster.size();
    launch.capture = launch.again = true;
    Trained trained;
    trained.name = name;
    trained.report = parse_json(launch_workers(launch), "report of the run");
    trained.measured = trained.report["median_step_s"];
    trained.predicted = plan.predicted_step_s;
    return trained;
  }

  void report(const Trained& planned, const Trained& even, const Trained& alone, Seconds seconds) {
    say("\n{:<24}{:>12}{:>12}{:>8}   {}", "", "predicted", "measured", "error", "losses");
    double largest = 0;
    Json runs = Json::array();
    for (const Trained* t : {&planned, &even, &alone}) {
      const Json& steps = t->report["steps"];
      std::string losses;
      for (size_t i = 0; i < steps.size(); ++i) {
        const double loss = steps[i]["loss"], exact = planned.report["steps"][i]["loss"];
        largest = std::max(largest, std::abs(loss - exact) / exact);
        if (i < 4) losses += fmt::format("{:.5f} ", loss);
      }
      if (steps.size() > 4) losses += fmt::format("... {:.5f}", steps.back()["loss"].get<double>());
      say("{:<24}{:>12}{:>12}{:>7.0f}%   {}", t->name, format_seconds(t->predicted),
          format_seconds(t->measured), 100 * (t->predicted / t->measured - 1), losses);
      runs.push_back({{"name", t->name},
                      {"predicted_step_s", t->predicted},
                      {"median_step_s", t->measured},
                      {"steps", steps}});
    }
    const double speedup = even.measured / planned.measured;
    say("\nThe planned run is {:.2f}x as fast as even data parallelism (predicted {:.2f}x); losses "
        "differ by at most {:.1e} relative.\n{} in all.",
        speedup, even.predicted / planned.predicted, largest, format_seconds(seconds));
    if (options_.json)
      print_json({{"runs", runs},
                  {"speedup", speedup},
                  {"predicted_speedup", even.predicted / planned.predicted},
                  {"largest_loss_difference", largest},
                  {"seconds", seconds}});
  }

  const DemoOptions& options_;
  Folder folder_;
  Cluster cluster_, first_;  // all devices, and the first alone, as measured
  Plan planned_, even_, alone_;
  int section_ = 0;
};

}  // namespace

void add_demo_command(Command app) {
  auto options = std::make_shared<DemoOptions>();
  Command command = app.add_subcommand(
      "demo", "Plan and train a small GPT on four emulated workers of unequal speed");
  command.add_option("--cluster", options->cluster,
                     "Cluster to emulate on this machine; default: local-mixed-4");
  command.add_option("--model", options->model, "Language model of the zoo; default: a small gpt");
  command.add_option("--batch", options->batch, "Global batch, in samples; default: 48")
      .check(in_range(int64_t{1}, int64_t{1} << 20));
  command.add_option("--steps", options->steps, "Steps of the planned run; default: 30")
      .check(in_range(int64_t{1}, int64_t{1} << 20));
  command.add_flag("--measure", options->measure, "For the demo's own workers").group("");
  command.add_flag("--json", options->json, "Print one JSON object");
  command.callback([options] {
    if (options->measure)
      run_worker([&] { measure_as_worker(*options); });
    else
      Demo(*options).run();
  });
}

}  // namespace motley
