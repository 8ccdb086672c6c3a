#include "cli/schedule_command.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <memory>

#include "cli/commands.h"
#include "core/error.h"
#include "core/file.h"
#include "core/units.h"
#include "pipeline/schedules.h"
#include "pipeline/simulate.h"

namespace motley {

namespace {

using namespace pipeline;

// What a file and a command line may ask for.
constexpr size_t kMaxFile = size_t{16} << 20;
constexpr size_t kMaxStages = 4096;
constexpr int64_t kMaxPasses = 20'000'000;  // stages x micro-batches

Pipeline load_pipeline(const std::string& path) {
  Json json = parse_json(read_file(path, kMaxFile), path);
  Fields file(json, "schedule", path);
  Pipeline pipeline;
  const Json& stages = file.array("stages");
  if (stages.size() > kMaxStages)
    throw file.bad("stages",
                   fmt::format("has {} entries; give at most {}", stages.size(), kMaxStages));
  for (size_t i = 0; i < stages.size(); ++i) {
    Fields stage(stages[i], "schedule", fmt::format("{}: stages[{}]", path, i));
    pipeline.stages.push_back({stage.number("forward_s"), stage.number("backward_s"),
                               stage.find("weights_s") ? stage.number("weights_s") : 0});
  }
  const Json& links = file.array("links");
  if (links.size() > kMaxStages)
    throw file.bad("links",
                   fmt::format("has {} entries; give at most {}", links.size(), kMaxStages));
  for (size_t i = 0; i < links.size(); ++i) {
    Fields link(links[i], "schedule", fmt::format("{}: links[{}]", path, i));
    pipeline.links.push_back({link.number("forward_s"), link.number("backward_s")});
  }
  if (const Json* limits = file.find("in_flight_limit")) {
    if (!limits->is_array())
      throw file.bad("in_flight_limit", "is not an array; give one integer per stage");
    for (const Json& limit : *limits) {
      if (!limit.is_number_integer())
        throw file.bad("in_flight_limit", "has an entry that is not an integer; give integers");
      pipeline.in_flight_limit.push_back(
          static_cast<int>(std::clamp(limit.get<double>(), -1.0, 1e9)));
    }
  }
  for (const auto& [name, value] : json.items())
    if (name != "stages" && name != "links" && name != "in_flight_limit")
      throw file.bad(name.c_str(), "is not known; give stages, links and in_flight_limit");
  validate(pipeline, path);
  return pipeline;
}

void print(const Pipeline& pipeline, const ScheduleRun& run, int micro_batches, int width) {
  const Timeline& t = run.timeline;
  std::printf("%s, %d micro-batches: makespan %s (no schedule is below %s), period %s (least %s)\n",
              run.schedule.kind.c_str(), micro_batches, format_seconds(t.makespan).c_str(),
              format_seconds(run.lower_bound).c_str(), format_seconds(run.period).c_str(),
              format_seconds(least_period(pipeline)).c_str());
  if (run.limited)
    std::printf("the counts of %s exceed in_flight_limit and were cut down to it\n",
                run.schedule.kind.c_str());
  const bool splits = !run.schedule.weights_behind.empty();
  std::printf("\nstage  count  %sin flight  forward     backward    busy     bubbles\n",
              splits ? "behind  " : "");
  for (int i = 0; i < pipeline.size(); ++i)
    std::printf("%5d  %5d  %s%9d  %-10s  %-10s  %5.1f%%  %6.1f%%\n", i + 1, run.schedule.counts[i],
                splits ? fmt::format("{:6}  ", run.schedule.weights_behind[i]).c_str() : "",
                t.in_flight[i], format_seconds(pipeline.stages[i].forward).c_str(),
                format_seconds(pipeline.stages[i].backward).c_str(), 100 * t.busy[i] / t.makespan,
                100 * (1 - t.busy[i] / t.makespan));
  std::printf("\n%s", draw(pipeline, run.schedule, t, width).c_str());
  std::printf("     digits: forward passes, letters: backward passes, %sdots: bubbles\n",
              splits ? "capitals: gradients of weights, " : "");
}

}  // namespace

void add_schedule_command(Command app) {
  struct ScheduleArgs {
    std::string stages, kind = "best";
    int64_t micro_batches = 0, width = 110;
    bool json = false;
  };
  auto args = std::make_shared<ScheduleArgs>();
  Command command = app.add_subcommand(
      "schedule", "Find a pipeline schedule for given times of stages and links, and draw it");
  command.add_option("--stages", args->stages, "JSON file with the times of stages and links")
      .required();
  command.add_option("--micro-batches", args->micro_batches, "How many micro-batches a step has")
      .required()
      .check(in_range(int64_t{1}, int64_t{10'000'000}));
  std::vector<std::string> kinds = {"best"};
  for (const ScheduleDef& def : schedule_table()) kinds.push_back(def.name);
  command.add_option("--kind", args->kind, "Which schedule; best (default): the fastest of all")
      .check(one_of(kinds));
  command.add_option("--width", args->width, "Width of the timeline in characters; default: 110")
      .check(in_range(int64_t{20}, int64_t{10'000}));
  command.add_flag("--json", args->json, "Print one JSON object");
  command.footer(
      "Example:\n"
      "  motley schedule --stages tests/data/stages.json --micro-batches 16 --kind 1f1b\n\n"
      "The file: {\"stages\": [{\"forward_s\": 1, \"backward_s\": 2}, ...], \"links\": "
      "[{\"forward_s\": "
      "0.2, \"backward_s\": 0.2}, ...]},\nwith one link fewer than stages. A stage may have "
      "\"weights_s\": what of backward_s gradients of weights take, which may then come later.");
  command.callback([args] {
    Pipeline pipeline = load_pipeline(args->stages);
    int64_t passes = args->micro_batches * pipeline.size();
    if (passes > kMaxPasses)
      throw user_error("schedule",
                       "--micro-batches {}: with {} stages these are {} passes; give at "
                       "most {}",
                       args->micro_batches, pipeline.size(), passes, kMaxPasses / pipeline.size());
    int micro_batches = static_cast<int>(args->micro_batches);
    ScheduleRun run = args->kind == "best"
                          ? run_best(pipeline, micro_batches)
                          : run_schedule(*find_schedule(args->kind), pipeline, micro_batches);
    if (!args->json) {
      print(pipeline, run, micro_batches, static_cast<int>(args->width));
      return;
    }
    Json bubbles = Json::array();
    for (Seconds busy : run.timeline.busy) bubbles.push_back(1 - busy / run.timeline.makespan);
    Json result = {{"kind", run.schedule.kind},
                   {"counts", run.schedule.counts},
                   {"makespan_s", run.timeline.makespan},
                   {"period_s", run.period},
                   {"lower_bound_s", run.lower_bound},
                   {"in_flight", run.timeline.in_flight},
                   {"least_period_s", least_period(pipeline)},
                   {"busy_s", run.timeline.busy},
                   {"bubbles", bubbles},
                   {"cut_to_limits", run.limited}};
    if (!run.schedule.weights_behind.empty())
      result["weights_behind"] = run.schedule.weights_behind;
    print_json(result);
  });
}

}  // namespace motley
