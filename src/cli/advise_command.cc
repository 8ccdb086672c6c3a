#include "cli/advise_command.h"

#include <cmath>
#include <cstdio>
#include <map>

#include "advise/advise.h"
#include "cli/commands.h"
#include "cli/model_graphs.h"
#include "cluster/profile.h"
#include "core/error.h"

namespace motley {

namespace {

constexpr int kSamples = 8;  // of a device, where no batch is given

struct AdviseArgs {
  std::string model, cluster, objective = "seconds", deadline, optimizer = "adamw", profile,
                              precision = "fp32", output;
  std::vector<std::string> edits;
  int64_t batch = 0, steps = 1;
  double time_limit = 60;
  int threads = 0;
  uint64_t seed = 0;
  bool json = false, no_groups = false;
};

// "90 s", "3 h", "2.5 days".
Seconds duration(const std::string& text) {
  static const std::map<std::string, double> units = {
      {"", 1},     {"us", 1e-6}, {"ms", 1e-3},   {"s", 1},       {"min", 60},
      {"h", 3600}, {"d", 86400}, {"day", 86400}, {"days", 86400}};
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  std::string unit = end;
  std::erase(unit, ' ');
  const auto it = units.find(unit);
  if (end == text.c_str() || it == units.end() || !std::isfinite(value) || value <= 0)
    throw user_error("advise",
                     "--deadline is '{}'; give a time such as 200 ms, 90 s, 3 h or 2 days", text);
  return value * it->second;
}

advise::Question question_of(const AdviseArgs& args) {
  advise::Question q;
  q.cluster = load_cluster(args.cluster, 0, args.profile);
  q.tariffs = load_tariffs(args.cluster);
  q.edits = args.edits;
  q.groups = !args.no_groups;
  q.options.model = args.model;
  q.options.batch = args.batch > 0 ? args.batch : int64_t{kSamples} * q.cluster.size();
  parse_optimizer(args.optimizer, &q.options.optimizer);
  q.options.precision = args.precision == "bf16"   ? DType::bf16
                        : args.precision == "fp16" ? DType::f16
                                                   : DType::f32;
  q.options.baselines = false;
  q.options.threads = args.threads;
  q.options.limits.seed = args.seed;
  if (!args.profile.empty()) q.options.measured = load_profile(args.profile).stages;
  q.options.limits.deadline = Deadline::in(args.time_limit);
  if (!args.deadline.empty())
    q.deadline = duration(args.deadline) / static_cast<double>(args.steps);
  q.objective = args.objective == "money"    ? advise::Objective::money
                : args.objective == "energy" ? advise::Objective::energy
                                             : advise::Objective::seconds;
  const auto given = [&](double advise_needs(const Tariff&)) {
    for (const auto& [type, tariff] : q.tariffs)
      if (advise_needs(tariff) > 0) return true;
    return false;
  };
  if (q.objective == advise::Objective::money && !given([](const Tariff& t) { return t.price; }))
    throw user_error("advise",
                     "--objective money: no device type of {} has a price; give "
                     "device_types: [{{name: A100-40GB, price: 1.10}}] in its file",
                     args.cluster);
  if (q.objective == advise::Objective::energy && !given([](const Tariff& t) { return t.watts; }))
    throw user_error("advise",
                     "--objective energy: no device type of {} has watts; give "
                     "device_types: [{{name: A100-40GB, watts: 400}}] in its file",
                     args.cluster);
  return q;
}

void run(const AdviseArgs& args) {
  if (!args.output.empty()) require_writable("--output", args.output);
  ModelGraphs graphs(args.model);
  advise::Question question = question_of(args);
  const Graph graph = graphs.at(question.options.batch);
  question.graph_of = [&](int64_t samples) { return graphs.at(samples); };
  question.options.limits.deadline = Deadline::in(args.time_limit);
  const advise::Advice advice = advise::advise(question);
  if (args.json)
    print_json(to_json(question, advice));
  else
    std::printf("%s", to_text(question, advice).c_str());
  if (!args.output.empty() && advice.plan) save_plan(*advice.plan, args.output);
  bool fits = advice.now.found;
  for (const advise::Answer& a : advice.edits) fits = fits || a.found;
  if (!fits)
    throw NoPlan(fmt::format("[advise] {} fits on no cluster that was asked about: {}", args.model,
                             advice.now.reason));
}

}  // namespace

void add_advise_command(Command app) {
  auto args = std::make_shared<AdviseArgs>();
  Command command = app.add_subcommand(
      "advise", "Say whether a model fits, how fast, and what changes would give");
  command.add_option("model", args->model, "Model, as of motley plan").required();
  command.add_option("--cluster", args->cluster, "Cluster file, or the name of a shipped cluster")
      .required();
  command.add_option("--batch", args->batch, "Global batch, in samples; default: 8 for each device")
      .check(in_range(int64_t{1}, int64_t{1} << 24));
  command
      .add_option("--what-if", args->edits,
                  "Another cluster: 'add 8 H100-80GB', 'drop v100', 'replace v100 with A100-40GB', "
                  "'cross-link 100 Gbps', 'link NAME 600 GB/s', 'memory v100 32 GiB', 'speed v100 "
                  "1.5'; several joined by ';'. May be given again and again")
      .take_all();
  command
      .add_option("--objective", args->objective,
                  "What is best: seconds (default), money or energy of a step")
      .check(one_of({"seconds", "money", "energy"}));
  command.add_option("--deadline", args->deadline,
                     "Also look for the cheapest devices that take no longer, such as 200 ms for a "
                     "step, or with --steps 3 days for all");
  command.add_option("--steps", args->steps, "Steps of the deadline; default: 1")
      .check(in_range(int64_t{1}, int64_t{1} << 40));
  command.add_flag("--no-groups", args->no_groups,
                   "Do not look at what each group of devices is worth");
  add_optimizer(command, args->optimizer);
  command.add_option("--precision", args->precision, "fp32 (default), bf16 or fp16")
      .check(one_of({"fp32", "bf16", "fp16"}));
  command.add_option("--profile", args->profile, "Measured profile, from motley calibrate");
  command
      .add_option("--time-limit", args->time_limit,
                  "Seconds for all plans together; default: 60. Start comes on top")
      .check(positive_number());
  command.add_option("--seed", args->seed, "Seed of the searches; default: 0")
      .check(whole_number());
  command.add_option("--threads", args->threads, "Threads that plan; default: one per core")
      .check(in_range(1, 1024));
  command.add_option("-o,--output", args->output, "File for the plan on the cluster as it is");
  command.add_flag("--json", args->json, "Print one JSON object");
  command.footer(
      "Examples:\n"
      "  motley advise gpt --cluster hapt-64 --what-if 'add 8 H100-80GB' --what-if 'cross-link 100 "
      "Gbps'\n"
      "  motley advise bert --cluster my.yaml --batch 256 --objective money --deadline '2 days' "
      "--steps 100000");
  command.callback([args] { run(*args); });
}

}  // namespace motley
