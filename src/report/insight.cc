#include "report/insight.h"

#include <algorithm>
#include <array>

#include "report/html.h"

namespace motley::report {

namespace {

constexpr size_t kRows = 10;  // of a table, the others folded away or left out

// What names of opponents (planner/engines/opponents.cc) and strategies mean.
constexpr std::pair<const char*, const char*> kMeanings[] = {
    {"ddp", "PyTorch DDP, equal rows"},
    {"ddp-by-speed", "DDP, rows in proportion to speed"},
    {"ddp-fastest", "DDP on the fastest devices alone"},
    {"dp-cp", "data parallel in one pass, rows by speed"},
    {"dp-ev", "data parallel in one pass, equal rows"},
    {"expert-parallel", "experts divided, the rest data parallel"},
    {"fsdp", "PyTorch FSDP, equal rows"},
    {"fsdp-by-speed", "FSDP, rows in proportion to speed"},
    {"fsdp-fastest", "FSDP on the fastest devices alone"},
    {"megatron", "Megatron-LM, the best of its degrees"},
    {"megatron-fastest", "Megatron-LM on the fastest devices alone"},
    {"tensor-parallel", "all matrices cut over all devices"},
    {"zero", "ZeRO in one pass"}};

std::string percent(double part) { return fmt::format("{:.1f}%", 100 * part); }

std::string strong(const std::string& text, const char* kind) {
  return fmt::format("<b class=\"{}\">{}</b>", kind, escape(text));
}

std::string meaning(const std::string& name) {
  for (const auto& [known, what] : kMeanings)
    if (name == known) return what;
  return "";
}

// How much faster this plan is than something else.
std::string speed_up(Seconds own, Seconds other) {
  const double times = own > 0 ? other / own : 1;
  return strong(fmt::format("{:.2f}×", times), times >= 0.995 ? "better" : "worse");
}

std::string table(const std::vector<std::string>& head, const std::string& rows) {
  return "<div class=\"wide\"><table>\n" + row(head, true) + rows + "</table></div>\n";
}

std::string uses_text(const advise::Answer& a) {
  std::vector<std::string> types;
  int all = 0;
  for (const auto& [type, count] : a.uses) {
    types.push_back(fmt::format("{} × {}", count, type));
    all += count;
  }
  return fmt::format("{} of {}: {}", all, a.devices, fmt::join(types, " + "));
}

}  // namespace

std::string choice_section(const Plan& plan, Seconds step) {
  const Seconds own = plan.predicted_step_s > 0 ? plan.predicted_step_s : step;
  std::string out = "<h2>Against what people run</h2>\n";
  std::vector<const Alternative*> opponents, others;
  Seconds most = own, best = 0;
  for (const Alternative& a : plan.alternatives) {
    (a.baseline ? opponents : others).push_back(&a);
    if (a.feasible && a.baseline) most = std::max(most, a.step_s);
    if (a.feasible && a.baseline && (best == 0 || a.step_s < best)) best = a.step_s;
  }
  if (plan.alternatives.empty())
    return out + "<p class=\"soft\">The plan does not say what it was compared with.</p>\n";
  const auto by_step = [](const Alternative* a, const Alternative* b) {
    return std::tuple(!a->feasible, a->step_s) < std::tuple(!b->feasible, b->step_s);
  };
  std::stable_sort(opponents.begin(), opponents.end(), by_step);
  std::stable_sort(others.begin(), others.end(), by_step);
  const auto line = [&](const Alternative& a) {
    const std::string what = a.baseline ? meaning(a.name) : "";
    const std::string name =
        fmt::format("{}{}", escape(a.name),
                    what.empty() ? "" : fmt::format("<div class=\"soft\">{}</div>", what));
    if (!a.feasible)
      return row({name, a.what == kNoTime ? "not planned" : strong("does not fit", "worse"), "", "",
                  escape(a.what)});
    return row({name, speed_up(own, a.step_s), format_seconds(a.step_s),
                bar({{a.baseline ? "comm" : "busy", a.step_s}}, std::max(most, a.step_s),
                    format_seconds(a.step_s)),
                escape(a.what)});
  };
  std::string rows = row({escape(plan.engine) + " (this plan)", "", format_seconds(own),
                          bar({{"fits", own}}, most, format_seconds(own)), ""});
  for (const Alternative* a : opponents) rows += line(*a);
  if (opponents.empty()) {
    out += "<p class=\"soft\">The plan was compared with other plans alone.</p>\n";
  } else {
    if (best > 0)
      out += fmt::format(
          "<p>This plan is {} as fast as the best of them{}.</p>\n", speed_up(own, best),
          best < 0.995 * own ? ", which does on its own framework what motley does not do" : "");
    out += table({"", "this plan is", "step", "", "how"}, rows);
  }
  rows.clear();
  for (const Alternative* a : others) rows += line(*a);
  if (!others.empty())
    out += fold(fmt::format("{} other plans that were found", others.size()),
                table({"engine", "this plan is", "step", "", "what"}, rows));
  return out;
}

namespace {

std::string sensitivity_table(const explain::Explanation& e, const explain::Options& options) {
  std::string rows;
  double most = 1e-9;
  for (const explain::Sensitivity& s : e.sensitivity) most = std::max(most, 1 - s.step / e.step);
  size_t shown = 0;
  for (const explain::Sensitivity& s : e.sensitivity) {
    const double gain = 1 - s.step / e.step;
    if (shown == kRows || (gain < 5e-4 && shown > 0)) break;
    ++shown;
    rows += row({escape(s.resource.name), bar({{"fits", gain}}, most, percent(gain)),
                 gain < 5e-4 ? "nothing" : "−" + percent(gain), format_seconds(s.unlimited)});
  }
  if (shown < e.sensitivity.size())
    rows += row({fmt::format("<span class=\"soft\">{} others: under 0.05%</span>",
                             e.sensitivity.size() - shown),
                 "", "", ""});
  return fmt::format("<h3>{:.0f}% more of a resource takes off the step</h3>\n",
                     100 * (options.more - 1)) +
         "<table>\n" + row({"resource", "", "", "without limit"}, true) + rows + "</table>\n";
}

std::string path_table(const explain::Explanation& e) {
  std::string rows;
  for (size_t i = 0; i < e.path.parts.size() && i < kRows; ++i) {
    const explain::PathPart& part = e.path.parts[i];
    rows += row({escape(part.what),
                 bar({{"busy", part.seconds}}, e.path.parts[0].seconds,
                     fmt::format("{} time{}", part.times, part.times > 1 ? "s" : "")),
                 percent(part.seconds / e.path.end), format_seconds(part.seconds)});
  }
  return "<h3>Critical path: what the end of the step waited for</h3>\n<table>\n" +
         row({"what", "", "", "seconds"}, true) + rows + "</table>\n";
}

std::string waits_table(const explain::Explanation& e) {
  std::string rows;
  for (size_t i = 0; i < e.path.waits.size() && i < 2 * kRows; ++i) {
    const explain::Wait& wait = e.path.waits[i];
    rows += row({escape(wait.who), escape(wait.whom), escape(wait.why),
                 format_seconds(wait.seconds), percent(wait.seconds / e.path.end)});
  }
  return table({"who waits", "for whom", "why", "each on average", ""}, rows);
}

std::string tensors_table(const explain::Explanation& e) {
  std::string rows;
  for (const explain::TensorChoice& t : e.tensors) {
    rows += row({fmt::format("<b>{}{}</b>{}", t.stage < 0 ? "" : fmt::format("stage {}: ", t.stage),
                             escape(t.name), t.count > 1 ? fmt::format(" × {}", t.count) : ""),
                 escape(t.placement), format_seconds(e.step), "", escape(t.why)});
    for (const explain::TensorChoice::Other& o : t.others)
      rows +=
          o.feasible
              ? row({"", "instead " + escape(o.placement), format_seconds(o.step),
                     fmt::format("{:+.1f}%", 100 * (o.step / e.step - 1)),
                     format_bytes(o.memory) + " at the peak"})
              : row({"", "instead " + escape(o.placement), "does not do", "", escape(o.reason)});
  }
  return table({"tensor", "held", "step", "", ""}, rows);
}

}  // namespace

std::string explanation_section(const Plan& plan, const explain::Explanation& e,
                                const explain::Options& options) {
  std::string out = "<h2>What limits the step</h2>\n<ul class=\"verdict\">\n";
  for (const std::string& sentence : e.verdict) out += "<li>" + escape(sentence) + "</li>\n";
  out += fmt::format(
      "<li>no plan on these devices takes less than {}, the computation alone ({} of "
      "this step){}</li>\n",
      format_seconds(e.compute_bound), percent(e.compute_bound / e.step),
      e.lower_bound > 0 && !plan.pipeline
          ? fmt::format("; no program at these shares less than {} ({})",
                        format_seconds(e.lower_bound), percent(e.lower_bound / e.step))
          : "");
  out += "</ul>\n<div class=\"cols\"><div>\n" + sensitivity_table(e, options) + "</div>\n<div>\n";
  out += e.has_path ? path_table(e)
                    : "<p class=\"soft\">The timeline is too long for a critical path.</p>\n";
  out += "</div></div>\n";
  if (!e.path.waits.empty()) out += fold("Who waits for whom", waits_table(e));
  if (!e.tensors.empty())
    out += fold("Large tensors, and the best plan with each held otherwise", tensors_table(e));
  return out;
}

std::string what_if_section(const advise::Question& question, const advise::Advice& advice,
                            Seconds step) {
  const auto value = [&](const advise::Cost& c) {
    return question.objective == advise::Objective::money    ? c.money
           : question.objective == advise::Objective::energy ? c.joules
                                                             : c.step;
  };
  const double now = value(advice.now.cost);
  const auto line = [&](const std::string& name, const advise::Answer& a) {
    if (!a.found) return row({escape(name), strong("does not fit", "worse"), "", escape(a.reason)});
    const double change = now > 0 ? value(a.cost) / now - 1 : 0;
    return row({escape(name),
                std::abs(change) < 5e-4 ? std::string("the same")
                                        : strong(fmt::format("{:+.1f}%", 100 * change),
                                                 change < 0 ? "better" : "worse"),
                format_seconds(a.cost.step), escape(uses_text(a))});
  };
  std::string out = "<h2>What if</h2>\n", rows;
  out += fmt::format(
      "<p class=\"soft\">Planned anew for every change, and this plan tried on each: the change of "
      "the {} of a step{}.</p>\n",
      question.objective == advise::Objective::seconds ? "time" : to_string(question.objective),
      advice.out_of_time ? "; with more time better plans may be found" : "");
  if (advice.now.found && advice.now.cost.step < 0.995 * step)
    out +=
        fmt::format("<p>Planned anew as it is, a step takes {}: {} less than by this plan.</p>\n",
                    format_seconds(advice.now.cost.step), percent(1 - advice.now.cost.step / step));
  rows += line("as it is", advice.now);
  for (const advise::Answer& a : advice.edits) rows += line(a.name, a);
  for (const advise::Worth& w : advice.groups) {
    const std::string group = fmt::format("{} × {}", w.devices, w.group);
    if (w.without.devices > 0) rows += line("without " + group, w.without);
    if (w.lending.devices > 0 && w.lent < w.devices)
      rows += line(fmt::format("lending {} of {}", w.lent, group), w.lending);
    if (!w.replacement.empty())
      rows += line(fmt::format("{} replaced by {}", group, w.replacement), w.replaced);
  }
  out += table({"change", "step", "", "works on"}, rows);
  std::vector<std::string> first;
  const auto say = [&](const char* what, const std::string& group) {
    if (!group.empty()) first.push_back(fmt::format("{} first: {}", what, group));
  };
  if (advice.groups.size() > 1) {
    say("leave out", advice.leave_out);
    say("lend", advice.lend);
  }
  say("replace", advice.replace);
  if (!first.empty())
    out += fmt::format("<p>{}</p>\n", escape(fmt::format("{}", fmt::join(first, "; "))));
  return out;
}

}  // namespace motley::report
