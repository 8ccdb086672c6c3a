#include "core/file.h"
#include "explain/explain.h"

namespace motley::explain {

namespace {

constexpr size_t kParts = 12, kWaits = 12;

std::string percent(Seconds part, Seconds whole) {
  return whole > 0 ? fmt::format("{:.1f}%", 100 * part / whole) : "";
}

std::string title(const TensorChoice& t) {
  return fmt::format("{}{}{}, {}, {}", t.stage < 0 ? "" : fmt::format("stage {}: ", t.stage),
                     t.name, t.count > 1 ? fmt::format(" (x{})", t.count) : "", to_string(t.spec),
                     format_bytes(t.bytes));
}

std::string tensors_text(const Explanation& e) {
  if (e.tensors.empty()) return "";
  std::string out = "large tensors, and the best plan with each held otherwise\n";
  for (const TensorChoice& t : e.tensors) {
    out += fmt::format("  {}: {}\n    {}\n", title(t), t.placement, t.why);
    for (const TensorChoice::Other& o : t.others)
      out += o.feasible ? fmt::format("    {:<34} {:>10} ({:+.1f}%), {} at the peak\n", o.placement,
                                      format_seconds(o.step), 100 * (o.step / e.step - 1),
                                      format_bytes(o.memory))
                        : fmt::format("    {:<34} does not do: {}\n", o.placement, o.reason);
  }
  return out;
}

std::string sensitivity_text(const Explanation& e, const Options& options) {
  std::string out = fmt::format("{:.0f}% more of each resource, the same plan simulated again{}\n",
                                100 * (options.more - 1),
                                options.replan ? ", and planned anew" : " (--replan plans anew)");
  for (const Sensitivity& s : e.sensitivity) {
    const bool memory = s.resource.kind == ResourceKind::memory;
    out += fmt::format("  {:<44} {:>10} {:>7}  {}", s.resource.name, format_seconds(s.step),
                       fmt::format("{:+.1f}%", 100 * (s.step / e.step - 1)),
                       memory ? "the same plan needs no more of it"
                              : fmt::format("without limit {}", format_seconds(s.unlimited)));
    if (s.replanned > 0)
      out += fmt::format("; replanned {} ({:+.1f}%)", format_seconds(s.replanned),
                         100 * (s.replanned / e.step - 1));
    out += "\n";
  }
  return out;
}

}  // namespace

std::string to_text(const Plan& plan, const Explanation& e, const Options& options) {
  std::string out =
      fmt::format("{} on {} devices of {}, global batch {}: {} a step\n", plan.model,
                  plan.cluster.size(), plan.cluster.name, plan.batch, format_seconds(e.step));
  for (const std::string& sentence : e.verdict) out += "  " + sentence + "\n";
  out += "lower bounds\n";
  out +=
      fmt::format("  no plan on these devices takes less than {} ({} of this step): computation\n",
                  format_seconds(e.compute_bound), percent(e.compute_bound, e.step));
  if (e.lower_bound > 0 && !plan.pipeline)
    out += fmt::format("  no program at these shares takes less than {} ({})\n",
                       format_seconds(e.lower_bound), percent(e.lower_bound, e.step));
  if (e.has_path) {
    out += fmt::format("critical path, {} in all\n", format_seconds(e.path.end));
    if (e.path.end > 1.0005 * e.step)
      out += fmt::format("  (gradients travel beside the backward pass: {} of it are hidden)\n",
                         format_seconds(e.path.end - e.step));
    for (size_t i = 0; i < e.path.parts.size() && i < kParts; ++i) {
      const PathPart& part = e.path.parts[i];
      out +=
          fmt::format("  {:<56} {:>10} {:>6}  {} time{}\n", part.what, format_seconds(part.seconds),
                      percent(part.seconds, e.path.end), part.times, part.times > 1 ? "s" : "");
    }
    out += e.path.waits.empty() ? "nobody waits\n" : "who waits for whom, each on average\n";
    for (size_t i = 0; i < e.path.waits.size() && i < kWaits; ++i) {
      const Wait& wait = e.path.waits[i];
      out += fmt::format("  {} waits {} ({}) for {}{}\n", wait.who, format_seconds(wait.seconds),
                         percent(wait.seconds, e.path.end), wait.whom,
                         wait.why.empty() ? "" : ": " + wait.why);
    }
  } else {
    out += "the timeline is too long to draw: no critical path\n";
  }
  out += "memory\n";
  for (const MemoryUse& use : e.memory)
    out += fmt::format("  {:<30} {} of {} ({})\n", use.group, format_bytes(use.peak),
                       format_bytes(use.memory), percent(use.peak, use.memory));
  out += sensitivity_text(e, options) + tensors_text(e);
  if (e.out_of_time) out += "a longer --time-limit says more\n";
  return out;
}

Json to_json(const Explanation& e, const Options& options) {
  Json path = Json::array(), waits = Json::array(), sensitivity = Json::array(),
       memory = Json::array(), tensors = Json::array();
  for (const PathPart& p : e.path.parts)
    path.push_back({{"what", p.what}, {"seconds", p.seconds}, {"times", p.times}});
  for (const Wait& w : e.path.waits)
    waits.push_back({{"who", w.who}, {"whom", w.whom}, {"why", w.why}, {"seconds", w.seconds}});
  for (const Sensitivity& s : e.sensitivity)
    sensitivity.push_back({{"resource", s.resource.name},
                           {"kind", to_string(s.resource.kind)},
                           {"devices", s.resource.devices},
                           {"step_s", s.step},
                           {"gain", 1 - s.step / e.step},
                           {"unlimited_step_s", s.unlimited},
                           {"replanned", s.replanned > 0},
                           {"replanned_step_s", s.replanned > 0 ? Json(s.replanned) : Json()}});
  for (const MemoryUse& m : e.memory)
    memory.push_back({{"group", m.group}, {"peak_bytes", m.peak}, {"memory_bytes", m.memory}});
  for (const TensorChoice& t : e.tensors) {
    Json others = Json::array();
    for (const TensorChoice::Other& o : t.others)
      others.push_back({{"placement", o.placement},
                        {"feasible", o.feasible},
                        {"reason", o.reason},
                        {"step_s", o.step > 0 ? Json(o.step) : Json()},
                        {"compute_s", o.compute},
                        {"comm_s", o.comm},
                        {"peak_memory_bytes", o.memory}});
    tensors.push_back({{"name", t.name},
                       {"stage", t.stage < 0 ? Json() : Json(t.stage)},
                       {"count", t.count},
                       {"type", to_string(t.spec)},
                       {"bytes", t.bytes},
                       {"placement", t.placement},
                       {"why", t.why},
                       {"alternatives", others}});
  }
  return {{"step_s", e.step},
          {"lower_bound_s", e.lower_bound},
          {"compute_bound_s", e.compute_bound},
          {"verdict", e.verdict},
          {"critical_path_s", e.has_path ? Json(e.path.end) : Json()},
          {"critical_path", path},
          {"waits", waits},
          {"more", options.more},
          {"sensitivity", sensitivity},
          {"memory", memory},
          {"tensors", tensors},
          {"out_of_time", e.out_of_time}};
}

}  // namespace motley::explain
