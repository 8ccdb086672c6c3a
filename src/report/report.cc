#include "report/report.h"

#include <algorithm>
#include <map>

#include "cluster/part.h"
#include "report/assets.h"
#include "report/html.h"
#include "report/insight.h"
#include "report/picture.h"
#include "report/timeline.h"
#include "report/words.h"
#include "sim/simulate.h"

namespace motley {

namespace {

using namespace report;

constexpr size_t kBars = 40000;                     // of the timeline
constexpr int kDeviceRows = 1024, kCommRows = 200;  // of tables
constexpr size_t kFolded = 64;                      // rows of devices, from which on they are
constexpr int kParameterRows = 2000;                //

std::string shape_text(const Shape& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

std::string fact(const std::string& value, const std::string& what) {
  return fmt::format("<div class=\"fact\"><b>{}</b><span>{}</span></div>\n", escape(value),
                     escape(what));
}

std::string legend(const std::vector<std::pair<std::string, std::string>>& entries) {
  std::string out = "<div class=\"legend\">";
  for (const auto& [colour, what] : entries)
    out += fmt::format("<span><i style=\"background:{}\"></i>{}</span>", colour, escape(what));
  return out + "</div>\n";
}

std::string more(size_t all, size_t shown) {
  return all > shown ? fmt::format("<p class=\"soft\">and {} more</p>\n", all - shown) : "";
}

// ---- stages

// What a replica's stages have in columns "shares" to "once a step".
std::vector<std::vector<std::string>> stage_cells(const Plan& plan, const ReplicaPlan& replica) {
  const PipelinePlan& pipeline = *plan.pipeline;
  std::vector<std::vector<std::string>> cells;
  for (int s = 0; s < pipeline.stages(); ++s) {
    const StagePlan& stage = replica.stages[s];
    const CostModel model(part_of(plan.cluster, stage.devices),
                          programs_for(plan.reductions, stage.devices, plan.cluster.size()));
    const Shares shares(stage.ratios);
    const PhaseSeconds seconds =
        phase_seconds(pipeline.theory(s), stage.program, model,
                      Fractions(model.cluster(), shares, plan.redundancy), plan.optimizer);
    const double again = computed_again(pipeline.theory(s), stage);
    std::vector<std::string> parts;
    for (double ratio : stage.ratios) parts.push_back(fmt::format("{:.1f}%", 100 * ratio));
    const bool even = std::all_of(parts.begin(), parts.end(),
                                  [&](const std::string& p) { return p == parts[0]; });
    cells.push_back(
        {even ? parts[0] + (parts.size() > 1 ? " each" : "")
              : fmt::format("{}", fmt::join(parts, " / ")),
         std::to_string(stage.warm_up),
         fmt::format("{} of {} micro-batches{}{}", in_flight(replica, s), replica.micro_batches,
                     again > 0 ? fmt::format(", {:.0f}% computed again", 100 * again) : "",
                     has_later(stage.program)
                         ? fmt::format("; gradients of weights {} behind", stage.weights_behind)
                         : ""),
         format_seconds(seconds.forward),
         format_seconds(seconds.backward + (stage.recompute ? seconds.forward : 0)),
         format_seconds(seconds.reduction + seconds.update)});
  }
  return cells;
}

// "4 × A100-40GB", and which.
std::pair<std::string, std::string> stage_devices(const Plan& plan, const StagePlan& stage) {
  std::map<std::string, std::vector<int>> by_type;
  for (int d : stage.devices) by_type[plan.cluster.type_of(d).name].push_back(d);
  std::vector<std::string> types, numbers;
  for (const auto& [type, list] : by_type) {
    types.push_back(fmt::format("{} × {}", list.size(), type));
    numbers.push_back(ranges(list));
  }
  return {escape(fmt::format("{}", fmt::join(types, " + "))),
          fmt::format("{}", fmt::join(numbers, ", "))};
}

// Replicas that differ in their devices' numbers alone are one.
std::string stage_section(const Plan& plan) {
  if (!plan.pipeline) return "";
  const PipelinePlan& pipeline = *plan.pipeline;
  std::string out = fmt::format(
      "<h2>Stages</h2>\n<p>{} stages, {} replica{}, micro-batches of {} sample{}; schedule "
      "{}.</p>\n",
      pipeline.stages(), pipeline.replicas.size(), pipeline.replicas.size() > 1 ? "s" : "",
      pipeline.micro_batch, pipeline.micro_batch > 1 ? "s" : "", escape(pipeline.schedule));
  out += "<div class=\"wide\"><table>\n" +
         row({"replica", "stage", "layers", "devices", "shares", "warm-up", "holds", "forward",
              "backward", "once a step"},
             true);
  using Cells = std::vector<std::vector<std::string>>;
  std::vector<std::pair<Cells, std::vector<int>>> kinds;  // of replicas: what each stage has, which
  for (size_t r = 0; r < pipeline.replicas.size(); ++r) {
    Cells cells = stage_cells(plan, pipeline.replicas[r]);
    for (int s = 0; s < pipeline.stages(); ++s)
      cells[s].push_back(stage_devices(plan, pipeline.replicas[r].stages[s]).first);
    auto kind = std::find_if(kinds.begin(), kinds.end(),
                             [&](const auto& known) { return known.first == cells; });
    if (kind == kinds.end()) kind = kinds.insert(kind, {std::move(cells), {}});
    kind->second.push_back(static_cast<int>(r));
  }
  int rows = 0;
  for (const auto& [cells, replicas] : kinds)
    for (int s = 0; s < pipeline.stages(); ++s) {
      if (++rows > kDeviceRows) continue;
      const auto [types, numbers] = stage_devices(plan, pipeline.replicas[replicas[0]].stages[s]);
      std::vector<std::string> line = {
          ranges(replicas), std::to_string(s),
          replicas[0] == 0 ? escape(modules_of(pipeline.graph(s))) : "as in replica 0",
          fmt::format("{} ({}{})", types, numbers, replicas.size() > 1 ? " in the first" : "")};
      line.insert(line.end(), cells[s].begin(), cells[s].end() - 1);
      out += row(line);
    }
  return out + "</table></div>\n" + more(rows, std::min(rows, kDeviceRows));
}

// ---- devices

std::string device_section(const Plan& plan, const Simulation& simulation) {
  struct Line {
    std::vector<int> devices;
    std::string seat, share;
  };
  std::vector<Line> lines;
  auto alike = [&](int a, int b) {
    const DeviceTime &x = simulation.devices[a], &y = simulation.devices[b];
    return plan.cluster.devices[a].type == plan.cluster.devices[b].type && x.busy == y.busy &&
           x.comm == y.comm && x.exposed_comm == y.exposed_comm && x.idle == y.idle &&
           x.peak_memory == y.peak_memory;
  };
  for (int d = 0; d < plan.cluster.size(); ++d) {
    const std::string seat = plan.pipeline ? seat_text(plan, d) : "";
    std::string share;
    if (!plan.pipeline)
      for (const std::vector<double>& ratios : plan.ratios)  // one for each segment
        share += fmt::format("{}{:.2f}%", share.empty() ? "" : " / ", 100 * ratios[d]);
    for (const Seat& s : plan.pipeline ? plan.pipeline->seats(d) : std::vector<Seat>())
      share += fmt::format("{}{:.2f}%", share.empty() ? "" : " / ",
                           100 * plan.pipeline->replicas[s.replica].stages[s.stage].ratios[s.rank]);
    if (!lines.empty() && alike(lines.back().devices.back(), d) && lines.back().seat == seat &&
        lines.back().share == share)
      lines.back().devices.push_back(d);
    else
      lines.push_back({{d}, seat, share});
  }
  std::string out = "<h2>Devices</h2>\n";
  out += legend({{"var(--forward)", "computing"},
                 {"var(--comm)", "communication that nothing hides"},
                 {"var(--wait)", "idle"}});
  std::string table = "<div class=\"wide\"><table>\n";
  std::vector<std::string> head = {"device", "type"};
  if (plan.pipeline) head.push_back("seat");
  for (const char* text : {"share", "memory", "", "computing + communication + idle", ""})
    head.push_back(text);
  table += row(head, true);
  for (size_t i = 0; i < lines.size() && i < kDeviceRows; ++i) {
    const Line& line = lines[i];
    const int d = line.devices[0];
    const DeviceTime& t = simulation.devices[d];
    const DeviceType& type = plan.cluster.type_of(d);
    std::vector<std::string> cells = {ranges(line.devices), escape(type.name)};
    if (plan.pipeline) cells.push_back(line.seat);
    cells.push_back(line.share);
    const std::string memory =
        fmt::format("{} of {}", format_bytes(t.peak_memory), format_bytes(type.memory));
    cells.push_back(
        bar({{t.peak_memory > type.memory ? "over" : "fits", t.peak_memory}}, type.memory, memory));
    cells.push_back(memory);
    const std::string times =
        fmt::format("computing {}, communication {} ({} of it hidden), idle {}",
                    format_seconds(t.busy), format_seconds(t.comm),
                    format_seconds(std::max(0.0, t.comm - t.exposed_comm)), format_seconds(t.idle));
    cells.push_back(bar({{"busy", t.busy}, {"comm", t.exposed_comm}, {"idle", t.idle}},
                        simulation.step, times));
    cells.push_back(fmt::format("{} + {} + {}", format_seconds(t.busy),
                                format_seconds(t.exposed_comm), format_seconds(t.idle)));
    table += row(cells);
  }
  table += "</table></div>\n" + more(lines.size(), std::min<size_t>(lines.size(), kDeviceRows));
  return out +
         (lines.size() < kFolded
              ? table
              : fold(fmt::format("{} groups of devices that are alike", lines.size()), table));
}

// ---- timeline

std::string timeline_section(const Plan& plan, const Simulation& simulation) {
  if (simulation.too_long)
    return "<h2>Timeline of a step</h2>\n<p class=\"soft\">Too many devices do unlike things "
           "at unlike times to draw them all.</p>\n";
  const std::vector<Lane> lanes = lanes_of(plan, simulation, kBars);
  const Json data = report::to_json(plan, lanes);
  std::string out = "<h2>Timeline of a step</h2>\n";
  const Seconds end = data["end"].get<double>();
  if (end > simulation.step * 1.0005)
    out += fmt::format(
        "<p class=\"soft\">Gradients travel during the backward pass, which the timeline shows one "
        "after the other: it ends at {}, the step at {}.</p>\n",
        format_seconds(end), format_seconds(simulation.step));
  out += legend({{"var(--forward)", "forward"},
                 {"var(--backward)", "backward"},
                 {"var(--optimizer)", "optimizer"},
                 {"var(--comm)", "communication"},
                 {"var(--wait)", "waiting"}});
  out +=
      "<div class=\"tools\"><button id=\"in\">zoom in</button><button id=\"out\">zoom out"
      "</button><button id=\"all\">whole step</button><span class=\"soft\">drag to move, Ctrl + "
      "wheel or two fingers to zoom; + − 0 and arrows on the keyboard</span></div>\n";
  out +=
      "<div id=\"timeline\"><canvas tabindex=\"0\" aria-label=\"Timeline of every device\">"
      "</canvas><div></div></div>\n<p id=\"hover\">Point at a bar to read what it is.</p>\n";
  out +=
      "<script type=\"application/json\" id=\"timeline-data\">" + script_json(data) + "</script>\n";
  return out;
}

// ---- communication and parameters

std::string communication_section(const Plan& plan, const Simulation& simulation) {
  const std::vector<Communication> list = communications(plan);
  struct Sum {
    int64_t count = 0;
    Bytes bytes = 0;
    Seconds seconds = 0;
  };
  std::map<std::string, Sum> sums;
  for (const Communication& c : list) {
    Sum& sum = sums[c.what];
    sum.count += c.count;
    sum.bytes += c.bytes;
    sum.seconds += c.seconds;
  }
  for (const Exchange& e : simulation.exchanges)
    sums[e.what] = {e.count, e.bytes * e.count, e.seconds * e.count};
  std::string out = "<h2>Communication</h2>\n";
  if (sums.empty()) return out + "<p>None.</p>\n";
  std::vector<std::pair<std::string, Sum>> order(sums.begin(), sums.end());
  std::stable_sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
    return a.second.seconds > b.second.seconds;
  });
  Bytes most_bytes = 0;
  Seconds most = 0;
  for (const auto& [what, sum] : order) {
    most = std::max(most, sum.seconds);
    most_bytes = std::max(most_bytes, sum.bytes);
  }
  out +=
      "<p class=\"soft\">A step's, before anything overlaps; collectives count whole tensors, "
      "messages what they carry.</p>\n<div class=\"wide\"><table>\n" +
      row({"what", "times", "bytes", "", "seconds", ""}, true);
  for (size_t i = 0; i < order.size() && i < kCommRows; ++i) {
    const auto& [what, sum] = order[i];
    out += row({escape(what), std::to_string(sum.count), bar({{"busy", sum.bytes}}, most_bytes, ""),
                format_bytes(sum.bytes), bar({{"comm", sum.seconds}}, most, ""),
                format_seconds(sum.seconds)});
  }
  out += "</table></div>\n" + more(order.size(), std::min<size_t>(order.size(), kCommRows));
  if (list.empty()) return out;
  std::string why = "<div class=\"wide\"><table>\n" +
                    row({"what", "tensor", "because", "times", "seconds"}, true);
  for (size_t i = 0; i < list.size() && i < kCommRows; ++i) {
    const Communication& c = list[i];
    why += row({escape(c.where.empty() ? c.what : c.where + ": " + c.what), escape(c.tensor),
                escape(c.why), std::to_string(c.count), format_seconds(c.seconds)});
  }
  why += "</table></div>\n" + more(list.size(), std::min<size_t>(list.size(), kCommRows));
  return out + fold("Why each is needed", why);
}

std::string parameter_section(const Plan& plan) {
  const std::vector<ParameterGroup> groups = parameter_groups(plan);
  std::string out = "<h2>Parameters</h2>\n<div class=\"wide\"><table>\n";
  std::vector<std::string> head = {"name", "tensors", "shape", "bytes", "held"};
  if (plan.pipeline) head.insert(head.begin(), "stage");
  out += row(head, true);
  for (size_t i = 0; i < groups.size() && i < kParameterRows; ++i) {
    const ParameterGroup& g = groups[i];
    std::vector<std::string> cells = {escape(g.name), std::to_string(g.count), shape_text(g.shape),
                                      format_bytes(g.bytes), escape(g.placement)};
    if (plan.pipeline) cells.insert(cells.begin(), std::to_string(g.stage));
    out += row(cells);
  }
  out += "</table></div>\n" + more(groups.size(), std::min<size_t>(groups.size(), kParameterRows));
  if (plan.pipeline && plan.pipeline->replicas.size() > 1)
    out += "<p class=\"soft\">Pieces are those of replica 0.</p>\n";
  return out;
}

}  // namespace

std::string to_html(const Plan& plan, const ReportParts& parts) {
  const Simulation simulation = simulate(plan, Spans::alike);
  const std::string title = escape(fmt::format("{} on {}", plan.model, plan.cluster.name));
  std::string out =
      "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src "
      "'unsafe-inline'; script-src 'unsafe-inline'\">\n";
  out += fmt::format("<title>{}</title>\n<style>{}</style>\n</head>\n<body>\n<h1>{}</h1>\n", title,
                     kStyle, title);
  int working = 0;
  for (const DeviceTime& d : simulation.devices) working += d.busy > 0;
  out += fmt::format(
      "<p class=\"soft\">A plan of motley: engine {}, global batch {}, {}{}{}, {} of {} "
      "devices.</p>\n",
      escape(plan.engine), plan.batch, to_string(plan.optimizer),
      plan.precision == DType::f32 ? "" : fmt::format(", {}", to_string(plan.precision)),
      plan.redundancy > 0 ? ", state that is cut kept twice" : "", working, plan.cluster.size());
  out += "<div class=\"facts\">\n";
  if (plan.predicted_step_s > 0)
    out += fact(format_seconds(plan.predicted_step_s), "a step, as predicted when planned");
  out += fact(format_seconds(simulation.step), "a step in the event simulation");
  if (plan.lower_bound_s > 0 && plan.predicted_step_s > 0)
    out += fact(format_seconds(plan.lower_bound_s),
                fmt::format("lower bound (gap {:.2f}%): {}",
                            100 * (1 - plan.lower_bound_s / plan.predicted_step_s),
                            plan.pipeline ? "computation alone" : "any program at these shares"));
  out +=
      fact(fmt::format("{:.1f}/s", static_cast<double>(plan.batch) / simulation.step), "samples");
  out += fact(fmt::format("{:.1f}%", 100 * simulation.load_balance), "load balance");
  out += fact(fmt::format("{:.1f}%", 100 * std::max(0.0, simulation.overlap)),
              "of communication hidden");
  out += "</div>\n";
  out += choice_section(plan, simulation.step);
  out += "<h2>Cluster, and the load on its links</h2>\n" + picture(plan, simulation);
  if (parts.explanation) out += explanation_section(plan, *parts.explanation, parts.explained);
  if (parts.advice) out += what_if_section(*parts.question, *parts.advice, simulation.step);
  out += stage_section(plan);
  out += device_section(plan, simulation);
  out += timeline_section(plan, simulation);
  out += communication_section(plan, simulation);
  out += parameter_section(plan);
  out += fold("The plan in words", "<pre>" + escape(describe(plan)) + "</pre>\n");
  out += fmt::format("<script>{}</script>\n</body>\n</html>\n", kScript);
  return out;
}

}  // namespace motley
