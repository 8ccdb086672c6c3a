#include "cli/run_command.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>

#include "cli/commands.h"
#include "cli/elastic.h"
#include "cli/elastic_worker.h"
#include "cli/replanning.h"
#include "cluster/profile.h"
#include "comm/launch.h"
#include "comm/store.h"
#include "core/error.h"
#include "core/fault.h"
#include "core/interrupted.h"
#include "core/units.h"
#include "runtime/recent.h"
#include "runtime/trainer.h"
#include "sim/simulate.h"

namespace motley {

namespace {

// Emulated speeds hold while they add up to less than this part of the machine's cores.
constexpr double kSafeShare = 0.6;

Plan sound_plan(const RunOptions& options, int workers) {
  Plan plan = plan_to_run(options.plan, workers);
  if (!options.profile.empty()) {
    apply(load_profile(options.profile), options.profile, &plan.cluster);
    plan.predicted_step_s = simulate(plan).step;
  }
  return plan;
}

void check_device(const RunOptions& options) {
  if (options.device == "cuda")
    throw user_error("run",
                     "--device cuda: workers on CUDA devices are started through Python: torchrun "
                     "--nproc_per_node=N -m motley.run {}",
                     options.plan);
}

void say_slow(int64_t step, const SlowDevice& device, const Plan& plan) {
  std::fprintf(stderr,
               "motley: [run] step %lld: device %d (%s) computes %.1f times as long as %s; measure "
               "it again (motley calibrate) and plan again, or do without it\n",
               static_cast<long long>(step), device.device,
               plan.cluster.type_of(device.device).name.c_str(), device.factor,
               device.before ? "before" : "planned");
}

// What a worker tells its launcher of slow devices: after which steps of which lengths.
class Progress {
 public:
  void note(const StepReport& step) {
    if (made_++ == 0)
      startup_s_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun_).count();
    in_steps_s_ += step.seconds;
  }
  void tell(int64_t step, const SlowDevice& device) const {
    const auto attempt = attempt_of_worker();
    if (!attempt) return;  // its launcher does not plan again
    const size_t before = recent_losses(attempt->folder, attempt->number, step).size();
    leave_note(attempt->folder, attempt->number,
               {step, static_cast<int64_t>(before) + made_, device.device, device.factor,
                startup_s_, in_steps_s_ / static_cast<double>(made_)});
  }

 private:
  std::chrono::steady_clock::time_point begun_ = std::chrono::steady_clock::now();
  Seconds startup_s_ = 0, in_steps_s_ = 0;
  int64_t made_ = 0;
};

// A worker's part, from where the workers of the plan meet to the end.
void train_at(const Rendezvous& where, const Plan& plan, const RunOptions& options,
              const std::optional<Attempt>& attempt) {
  Progress progress;
  const bool talks = where.rank == 0;
  set_threads(options.threads);
  graph_of_model(plan);
  TrainOptions training;
  const std::unique_ptr<ProcessCommunicator> group = join_group(where);
  training.seed = options.seed;
  training.learning_rate = options.learning_rate;
  training.clip = options.clip;
  training.overlap = options.overlap != "off";
  if (attempt) {
    training.recent = attempt->folder;
    training.attempt = attempt->number;
  }
  training.data = options.data;
  training.checkpoint = options.checkpoint;
  training.checkpoint_every = options.checkpoint_every;
  training.checkpoint_keep = options.checkpoint_keep;
  if (!options.checkpoint.empty()) {
    note_signals();
    training.stop_signal = noted_signal;
  }
  std::string pacing = "off";
  if (options.emulate) {
    const DeviceType& type = plan.cluster.type_of(where.rank);
    if (!(type.speed > 0))
      throw user_error("run", "--emulate: device type {} has speed 0; give its share of a core",
                       type.name);
    training.speed = type.speed;
    pacing = emulate_links(*group, plan.cluster);
    double cores = 0;
    for (int d = 0; d < plan.cluster.size(); ++d) cores += plan.cluster.type_of(d).speed;
    if (talks) {
      std::fprintf(stderr, "emulation: padded speed, %s\n", pacing.c_str());
      if (cores > kSafeShare * std::thread::hardware_concurrency())
        std::fprintf(stderr,
                     "emulation: the speeds add up to %.1f of %u cores; they may not hold\n", cores,
                     std::thread::hardware_concurrency());
    }
  }
  Json slow = Json::array();
  training.slow = [&](int64_t step, const SlowDevice& device) {
    if (!talks) return;
    slow.push_back({{"step", step}, {"device", device.device}, {"factor", device.factor}});
    say_slow(step, device, plan);
    progress.tell(step, device);
  };
  const RunReport report =
      train(plan, *group, training, options.steps, [&](const StepReport& step) {
        progress.note(step);
        if (talks)
          std::fprintf(stderr, "step %lld  loss %.4f  %s\n", static_cast<long long>(step.step),
                       step.loss, format_seconds(step.seconds).c_str());
      });
  group->barrier();
  if (report.stopped != 0)
    throw Interrupted(
        report.stopped,
        talks ? fmt::format("[run] stopped by SIG{} after step {}; --checkpoint {} goes on "
                            "from there",
                            sigabbrev_np(report.stopped), report.steps.back().step,
                            options.checkpoint)
              : "");
  if (!talks) return;
  if (options.json) {
    Json steps = Json::array();
    for (const StepReport& s : report.steps) {
      Json step = {{"step", s.step}, {"loss", s.loss}, {"seconds", s.seconds}};
      if (options.clip > 0) step["gradient_norm"] = s.gradient_norm;
      steps.push_back(step);
    }
    Json communication = Json::array();
    for (const Worker::Communication& c : report.communication)
      communication.push_back({{"comm_s", c.seconds},
                               {"exposed_comm_s", c.waited},
                               {"hidden_comm_s", std::max(0.0, c.seconds - c.waited)}});
    print_json({{"model", plan.model},
                {"workers", where.size},
                {"data", report.data},
                {"emulated", options.emulate},
                {"pacing", pacing},
                {"steps", steps},
                {"in_flight", report.in_flight},
                {"communication", communication},
                {"slow_devices", slow},
                {"median_step_s", report.median_step_s},
                {"predicted_step_s", plan.predicted_step_s}});
  } else if (!report.steps.empty()) {
    std::printf("%zu steps on %s; loss %.4f -> %.4f; median step %s, predicted %s\n",
                report.steps.size(), report.data.c_str(), report.steps.front().loss,
                report.steps.back().loss, format_seconds(report.median_step_s).c_str(),
                format_seconds(plan.predicted_step_s).c_str());
  }
  finish_output();
}

void work(const RunOptions& options, const Rendezvous& where) {
  Watch::say_when_idle();
  if (!options.elastic) {
    const Plan plan = sound_plan(options, where.size);
    const std::optional<Attempt> attempt = attempt_of_worker();
    set_fault_rank(where.rank, attempt ? attempt->number : 0);
    fault_point("rendezvous");
    train_at(where, plan, options, attempt);
    return;
  }
  const Plan whole = sound_plan(options, 0);
  ElasticWorker worker(whole, where);
  worker.prepare();
  if (worker.works())
    train_at(worker.place(), worker.plan(), options, Attempt{worker.folder(), worker.attempt()});
  worker.finish();
}

}  // namespace

std::vector<std::string> RunOptions::arguments() const {
  std::vector<std::string> words = {"run",       plan,
                                    "--steps",   std::to_string(steps),
                                    "--seed",    std::to_string(seed),
                                    "--threads", std::to_string(threads)};
  auto add = [&](const char* name, const std::string& value) {
    words.push_back(name);
    words.push_back(value);
  };
  if (!data.empty()) add("--data", data);
  if (!checkpoint.empty()) add("--checkpoint", checkpoint);
  if (checkpoint_every > 0) add("--checkpoint-every", std::to_string(checkpoint_every));
  if (!checkpoint.empty()) add("--checkpoint-keep", std::to_string(checkpoint_keep));
  if (learning_rate > 0) add("--lr", fmt::format("{}", learning_rate));
  if (clip > 0) add("--clip", fmt::format("{}", clip));
  if (emulate) words.push_back("--emulate");
  if (!profile.empty()) add("--profile", profile);
  if (!overlap.empty()) add("--overlap", overlap);
  add("--device", device);
  if (json) words.push_back("--json");
  return words;
}

void run_command(const RunOptions& options) {
  check_device(options);
  if (options.replan == "auto" && !options.elastic)
    throw user_error("run", "--replan auto starts workers again; give --elastic too");
  if (options.return_after_s > 0 && !options.elastic)
    throw user_error("run", "--return-after is for workers that are lost; give --elastic too");
  if (const auto where = rendezvous_from_environment()) {
    if (options.replan == "auto" || options.return_after_s > 0)
      throw user_error("run",
                       "--replan auto and --return-after are for workers that motley run starts; "
                       "leave them out under {}",
                       "another launcher");
    if (options.hang_s > 0)
      setenv("MOTLEY_HANG_SECONDS", fmt::format("{}", options.hang_s).c_str(), 1);
    run_worker([&] { work(options, *where); });
    return;
  }
  prepare_workers(run_program);
  LaunchOptions launch;
  launch.again = options.elastic;
  const Plan plan = sound_plan(options, 0);
  launch.workers = plan.cluster.size();
  if (launch.workers > kMaxLocalWorkers)
    throw user_error("run",
                     "{}: the plan is for {} devices; more than {} workers are not started on one "
                     "machine, use torchrun or Slurm",
                     options.plan, launch.workers, kMaxLocalWorkers);
  launch.arguments = options.arguments();
  launch.threads = options.threads;
  launch.stops = !options.checkpoint.empty();
  std::unique_ptr<Network> network;
  if (options.emulate) network = network_for(plan.cluster);
  launch.network = network.get();
  if (options.hang_s > 0)
    setenv("MOTLEY_HANG_SECONDS", fmt::format("{}", options.hang_s).c_str(), 1);
  if (options.elastic)
    launch_elastic(options, plan, launch);
  else
    launch_workers(launch);
}

namespace {

void add_training_options(Command command, RunOptions* options) {
  const std::string group = "Training";
  command.add_option("--steps", options->steps, "How many steps to train; default: 10")
      .check(in_range(int64_t{1}, int64_t{1} << 40))
      .group(group);
  command
      .add_option("--data", options->data,
                  "Text file or folder, for language models; default: license texts of the system")
      .group(group);
  command.add_option("--lr", options->learning_rate, "Learning rate; default: 1e-3, of SGD 1e-2")
      .check(positive_number())
      .group(group);
  command.add_option("--clip", options->clip, "Largest norm of the gradient; default: no clipping")
      .check(positive_number())
      .group(group);
  command
      .add_option("--overlap", options->overlap,
                  "Whether collectives travel while devices compute: on (default), or off, to see "
                  "what it brings")
      .check(one_of({"on", "off"}))
      .group(group);
  command.add_option("--seed", options->seed, "Seed of parameters, data and dropout; default: 0")
      .check(whole_number())
      .group(group);
  command
      .add_option("--checkpoint", options->checkpoint,
                  "Folder to go on from, and to save to: at the end, on the way, and on SIGINT "
                  "and SIGTERM")
      .group(group);
  command
      .add_option("--checkpoint-every", options->checkpoint_every,
                  "Save after so many steps; default: every ten minutes")
      .check(in_range(int64_t{1}, int64_t{1} << 40))
      .group(group);
  command
      .add_option("--checkpoint-keep", options->checkpoint_keep,
                  "How many checkpoints stay in the folder; default: 3")
      .check(in_range(1, 1 << 20))
      .group(group);
}

void add_worker_options(Command command, RunOptions* options) {
  const std::string group = "Workers";
  command
      .add_option("--device", options->device,
                  "cpu: the CPU over gloo, as auto (default); cuda: says how to start workers on "
                  "CUDA devices")
      .check(one_of({"auto", "cpu", "cuda"}))
      .group(group);
  command.add_option("--threads", options->threads, "Threads of each worker; default: 1")
      .check(in_range(1, 1024))
      .group(group);
  command
      .add_flag("--emulate", options->emulate,
                "Emulate the speeds and links of the plan's cluster on this machine")
      .group(group);
  command
      .add_flag("--elastic", options->elastic,
                "When a worker is lost, plan for the devices that are left and go on from the last "
                "step, with the same losses")
      .group(group);
  command
      .add_option("--return-after", options->return_after_s,
                  "With --elastic, try a lost device again after so many seconds, twice as many "
                  "each time that it is lost once more; default: never")
      .check(in_range(0.1, 86400.0))
      .group(group);
  command
      .add_option(
          "--replan", options->replan,
          "When a device is slower than planned: advise (default) says so; auto, with --elastic, "
          "also goes on by a plan for its speed where that pays")
      .check(one_of({"advise", "auto"}))
      .group(group);
  command
      .add_option("--hang-timeout", options->hang_s,
                  "Seconds after which a worker that says nothing is lost; default: 30")
      .check(in_range(0.1, 86400.0))
      .group(group);
  command
      .add_option("--profile", options->profile,
                  "Measured profile of the plan's cluster, for the prediction")
      .group(group);
}

}  // namespace

void add_run_command(Command app) {
  auto options = std::make_shared<RunOptions>();
  Command command = app.add_subcommand("run", "Train by a plan");
  command.add_option("plan", options->plan, "Plan file").required();
  command.add_flag("--json", options->json, "Print one JSON object");
  add_training_options(command, options.get());
  add_worker_options(command, options.get());
  command.footer(
      "Starts one worker for each device of the plan on this machine, or joins a launch of "
      "torchrun,\nSlurm or mpirun through the usual environment variables.\n\n"
      "Examples:\n"
      "  motley run plan.json --steps 100 --data corpus.txt --checkpoint saved\n"
      "  motley run local.json --emulate --profile local.profile");
  command.callback([options] { run_command(*options); });
}

}  // namespace motley
