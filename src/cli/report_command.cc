#include "cli/report_command.h"

#include <cstdio>

#include "cli/commands.h"
#include "cluster/profile.h"
#include "core/error.h"
#include "report/report.h"

namespace motley {

namespace {

struct ReportArgs {
  std::string plan, output, profile;
  std::vector<std::string> edits;
  double time_limit = 10;
  bool json = false, quick = false;
};

Plan read_plan(const ReportArgs& args) {
  Plan plan = load_plan(args.plan);
  if (auto problems = check(plan, false); !problems.empty())
    throw user_error("report", "{}: {}", args.plan, problems[0]);
  if (!args.profile.empty()) apply(load_profile(args.profile), args.profile, &plan.cluster);
  return plan;
}

void run(const ReportArgs& args) {
  require_writable("--output", args.output);
  if (args.quick && !args.edits.empty())
    throw user_error("report", "--quick plans nothing anew, which --what-if needs; leave one out");
  Plan plan = read_plan(args);
  ReportParts parts;
  parts.explained.tensors = args.quick ? 0 : 8;
  parts.explained.seconds = 0.3 * args.time_limit;
  const explain::Explanation explanation = explain::explain(&plan, parts.explained);
  parts.explanation = &explanation;
  advise::Question question;
  advise::Advice advice;
  if (!args.quick) {
    question.graph_of = [&](int64_t) { return *plan.graph; };
    question.options.model = plan.model;
    question.options.batch = plan.batch;
    question.options.optimizer = plan.optimizer;
    question.options.redundancy = plan.redundancy;
    question.options.baselines = false;
    question.options.limits.deadline = Deadline::in(0.7 * args.time_limit);
    question.cluster = plan.cluster;
    question.edits = args.edits;
    if (const Group& root = plan.cluster.groups[0]; args.edits.empty() && !root.children.empty())
      question.edits.push_back(fmt::format("cross-link {:.6g} GB/s", 2e-9 * root.link.bandwidth));
    advice = advise::advise(question, std::make_unique<Plan>(read_plan(args)));
    parts.question = &question;
    parts.advice = &advice;
  }
  write_file(args.output, to_html(plan, parts));
  if (args.json)
    print_json({{"path", args.output}});
  else
    std::printf("written to %s\n", args.output.c_str());
}

}  // namespace

void add_report_command(Command app) {
  auto args = std::make_shared<ReportArgs>();
  Command command = app.add_subcommand("report", "Write a plan as one page for a browser");
  command.add_option("plan", args->plan, "Plan file").required();
  command.add_option("-o,--output", args->output, "Page to write").required();
  command.add_option("--profile", args->profile,
                     "Measured profile of the plan's cluster; default: the numbers in the plan");
  command
      .add_option("--what-if", args->edits,
                  "Another cluster, as of motley advise; default: twice the bandwidth between the "
                  "outermost groups. May be given again and again")
      .take_all();
  command
      .add_option("--time-limit", args->time_limit,
                  "Seconds for other placements and for planning what-ifs; default: 10")
      .check(positive_number());
  command.add_flag("--quick", args->quick, "Search for nothing: no what-ifs, no other placements");
  command.add_flag("--json", args->json, "Print one JSON object");
  command.footer(
      "Example:\n"
      "  motley report plan.json -o plan.html --what-if 'add 8 H100-80GB'");
  command.callback([args] { run(*args); });
}

}  // namespace motley
