#include <cmath>

#include "advise/advise.h"
#include "core/error.h"

namespace motley::advise {

namespace {

std::string uses_text(const Answer& a) {
  std::vector<std::string> types;
  int all = 0;
  for (const auto& [type, count] : a.uses) {
    types.push_back(fmt::format("{} x {}", count, type));
    all += count;
  }
  return fmt::format("{} of {}: {}", all, a.devices, fmt::join(types, " + "));
}

class Text {
 public:
  Text(const Question& question, const Advice& advice) : question_(question), advice_(advice) {}

  std::string run() {
    out_ = fmt::format("{} on {}, global batch {}{}\n", question_.options.model,
                       question_.cluster.name, question_.options.batch,
                       question_.objective == Objective::seconds
                           ? ""
                           : fmt::format(", for the least {}", to_string(question_.objective)));
    if (advice_.now.found)
      out_ += fmt::format("  it fits: {} on {} ({})\n", cost_text(advice_.now.cost),
                          uses_text(advice_.now), advice_.now.plan);
    else
      out_ += fmt::format("  it does not fit: {}\n", advice_.now.reason);
    if (!advice_.edits.empty()) {
      out_ += "what if\n";
      for (const Answer& a : advice_.edits) line(a.name, a);
    }
    groups();
    if (advice_.cheapest) cheapest();
    if (advice_.out_of_time) out_ += "a longer --time-limit may find better plans\n";
    return out_;
  }

 private:
  std::string cost_text(const Cost& c) const {
    std::string text = format_seconds(c.step) + " a step";
    if (advice_.priced)
      text += c.money_known ? fmt::format(", {:.4g} of money", c.money) : ", price not given";
    if (advice_.powered)
      text += c.joules_known ? fmt::format(", {:.4g} kJ", c.joules / 1e3) : ", watts not given";
    return text;
  }

  double value(const Cost& c) const {
    return question_.objective == Objective::money    ? c.money
           : question_.objective == Objective::energy ? c.joules
                                                      : c.step;
  }
  std::string change(const Answer& a) const {
    if (!a.found || !advice_.now.found) return "";
    const double was = value(advice_.now.cost), is = value(a.cost);
    if (std::abs(is - was) < 5e-4 * was) return "the same";
    return fmt::format("{:+.1f}%", 100 * (is / was - 1));
  }

  void line(const std::string& name, const Answer& a) {
    out_ += a.found ? fmt::format("  {:<36} {:<10} {}, on {}\n", name, change(a), cost_text(a.cost),
                                  uses_text(a))
                    : fmt::format("  {:<36} {}\n", name, "does not fit: " + a.reason);
  }

  void groups() {
    if (advice_.groups.empty()) return;
    out_ += "what each group of devices is worth\n";
    for (const Worth& w : advice_.groups) {
      out_ += fmt::format("  {} x {}\n", w.devices, w.group);
      if (w.without.devices > 0)
        line("  without it", w.without);
      else
        out_ += "    without it there is nothing\n";
      if (w.lending.devices > 0) line(fmt::format("  lending {} of them", w.lent), w.lending);
      if (!w.replacement.empty()) line("  replaced by " + w.replacement, w.replaced);
    }
    const auto say = [&](const char* what, const std::string& group) {
      if (!group.empty()) out_ += fmt::format("  {} first: {}\n", what, group);
    };
    if (advice_.groups.size() > 1) {
      say("leave out", advice_.leave_out);
      say("lend", advice_.lend);
    }
    say("replace", advice_.replace);
  }

  void cheapest() {
    const Answer& a = *advice_.cheapest;
    out_ += fmt::format("cheapest devices that take at most {} a step{}\n",
                        format_seconds(question_.deadline),
                        advice_.priced ? "" : " (no type has a price: each counts the same)");
    out_ += a.found ? fmt::format("  {}, on {} ({})\n", cost_text(a.cost), uses_text(a), a.plan)
                    : fmt::format("  none: {}\n", a.reason);
    out_ += fmt::format(
        "  {} parts of the cluster were planned for; of {} a lower bound says they are too slow or "
        "too dear\n",
        advice_.parts_planned, advice_.parts_bounded);
  }

  const Question& question_;
  const Advice& advice_;
  std::string out_;
};

}  // namespace

const char* to_string(Objective objective) {
  switch (objective) {
    case Objective::seconds:
      return "seconds";
    case Objective::money:
      return "money";
    case Objective::energy:
      return "energy";
  }
  return "?";
}

std::string to_text(const Question& question, const Advice& advice) {
  return Text(question, advice).run();
}

Json to_json(const Question& question, const Advice& advice) {
  const auto answer = [&](const Answer& a) -> Json {
    Json uses = Json::object();
    for (const auto& [type, count] : a.uses) uses[type] = count;
    return {
        {"name", a.name},
        {"fits", a.found},
        {"reason", a.reason},
        {"step_s", a.found ? Json(a.cost.step) : Json()},
        {"money", a.found && advice.priced && a.cost.money_known ? Json(a.cost.money) : Json()},
        {"joules", a.found && advice.powered && a.cost.joules_known ? Json(a.cost.joules) : Json()},
        {"devices", a.devices},
        {"uses", uses},
        {"plan", a.plan}};
  };
  const auto first = [](const std::string& group) { return group.empty() ? Json() : Json(group); };
  Json edits = Json::array(), groups = Json::array();
  for (const Answer& a : advice.edits) edits.push_back(answer(a));
  for (const Worth& w : advice.groups)
    groups.push_back({{"group", w.group},
                      {"devices", w.devices},
                      {"without", w.without.devices > 0 ? answer(w.without) : Json()},
                      {"lent", w.lent},
                      {"lending", w.lending.devices > 0 ? answer(w.lending) : Json()},
                      {"replacement", first(w.replacement)},
                      {"replaced", w.replacement.empty() ? Json() : answer(w.replaced)}});
  return {{"model", question.options.model},
          {"cluster", question.cluster.name},
          {"batch", question.options.batch},
          {"objective", to_string(question.objective)},
          {"now", answer(advice.now)},
          {"what_if", edits},
          {"groups", groups},
          {"leave_out_first", first(advice.leave_out)},
          {"lend_first", first(advice.lend)},
          {"replace_first", first(advice.replace)},
          {"deadline_s", question.deadline > 0 ? Json(question.deadline) : Json()},
          {"cheapest", advice.cheapest ? answer(*advice.cheapest) : Json()},
          {"parts_planned", advice.parts_planned},
          {"parts_bounded", advice.parts_bounded},
          {"out_of_time", advice.out_of_time}};
}

}  // namespace motley::advise
