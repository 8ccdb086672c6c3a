#include "cli/export_command.h"

#include <cstdio>

#include "cli/commands.h"
#include "core/error.h"
#include "export/export.h"
#include "planner/planner.h"

namespace motley {

namespace {

std::vector<std::string> names_of_targets() {
  std::vector<std::string> names;
  for (const planner::Target& target : planner::targets()) names.emplace_back(target.name);
  return names;
}

// The fastest plan of the same model, batch and devices that the target can say; null: none fits.
std::unique_ptr<Plan> nearest_of(const Plan& plan, const std::string& target, double seconds,
                                 std::string* note) {
  planner::PlanOptions options;
  options.model = plan.model;
  options.batch = plan.batch;
  options.optimizer = plan.optimizer;
  options.target = target;
  Deadline::Limits limits;
  limits.seconds = seconds;
  options.limits.deadline = Deadline(limits);
  planner::PlanReport report =
      planner::plan([&](int64_t) { return *plan.graph; }, plan.cluster, options);
  if (report.candidates.empty()) return nullptr;
  *note = report.candidates[0].note;
  report.candidates[0].plan->precision = plan.precision;
  return std::move(report.candidates[0].plan);
}

struct ExportArgs {
  std::string plan, target, output;
  double time_limit = 10;
  bool json = false, force = false, nearest = false;
};

void print(const ExportArgs& args, const Exported& exported) {
  if (args.json) {
    Json files = Json::array();
    for (const ExportedFile& file : exported.files) files.push_back(file.path);
    print_json({{"path", args.output},
                {"target", args.target},
                {"files", files},
                {"exact", exported.differences.empty()},
                {"differences", exported.differences}});
    return;
  }
  std::printf("%zu files for %s written to %s\n", exported.files.size(),
              planner::find_target(args.target)->title, args.output.c_str());
  for (const std::string& difference : exported.differences)
    std::printf("  difference  %s\n", difference.c_str());
}

void run(const ExportArgs& args) {
  const planner::Target& target = *planner::find_target(args.target);
  const Exporter& exporter = *find_exporter(args.target);
  const Plan plan = load_plan(args.plan);
  if (auto problems = check(plan, false); !problems.empty())
    throw user_error("export", "{}: {}", args.plan, problems[0]);
  if (plan.redundancy > 0)
    throw user_error("export",
                     "{}: redundancy is 1, which no other framework has; plan without --redundancy",
                     args.plan);
  std::string reason;
  Exported exported = export_plan(plan, exporter, &reason);
  if (reason.empty()) {
    write_directory(exported, args.output, args.force);
    print(args, exported);
    return;
  }
  std::string note;
  const std::unique_ptr<Plan> nearest = nearest_of(plan, args.target, args.time_limit, &note);
  const double loss = nearest ? nearest->predicted_step_s / plan.predicted_step_s - 1 : 0;
  std::string sentence = fmt::format("[export] {} cannot say this plan: {}", target.title, reason);
  if (nearest)
    sentence += fmt::format("; the nearest that it can say is {}: {} a step, {:.1f}% {} than {}",
                            note, format_seconds(nearest->predicted_step_s), 100 * std::abs(loss),
                            loss < 0 ? "less" : "more", format_seconds(plan.predicted_step_s));
  if (nearest && args.nearest) {
    exported = export_plan(*nearest, exporter, &reason);
    MOTLEY_CHECK(reason.empty(), "{}", reason);
    exported.differences.insert(exported.differences.begin(),
                                sentence.substr(sentence.find(' ') + 1));
    write_directory(exported, args.output, args.force);
    print(args, exported);
    return;
  }
  if (args.json)
    print_json({{"target", args.target},
                {"exact", false},
                {"files", Json::array()},
                {"differences", {reason}},
                {"nearest", nearest ? Json(note) : Json()},
                {"nearest_predicted_step_s", nearest ? Json(nearest->predicted_step_s) : Json()},
                {"loss", nearest ? Json(loss) : Json()}});
  throw NoPlan(sentence +
               (nearest ? "; --nearest exports that one" : "; and no plan that it can say fits"));
}

}  // namespace

void add_export_command(Command app) {
  auto args = std::make_shared<ExportArgs>();
  Command command =
      app.add_subcommand("export", "Write a plan as the files of a training framework");
  command.add_option("plan", args->plan, "Plan file").required();
  command.add_option("--to", args->target, "Framework: " + planner::target_names())
      .required()
      .check(one_of(names_of_targets()));
  command.add_option("-o,--output", args->output, "Directory to write").required();
  command.add_flag("--force", args->force, "Replace a directory that is not empty");
  command.add_flag("--nearest", args->nearest,
                   "Where the framework cannot say the plan, export the fastest one that it can");
  command
      .add_option("--time-limit", args->time_limit,
                  "Seconds to look for the nearest plan; default: 10")
      .check(positive_number());
  command.add_flag("--json", args->json, "Print one JSON object");
  command.footer(
      "Examples:\n"
      "  motley plan gpt --cluster amp-mixed --batch 64 --for megatron -o plan.json\n"
      "  motley export plan.json --to megatron -o run");
  command.callback([args] { run(*args); });
}

}  // namespace motley
