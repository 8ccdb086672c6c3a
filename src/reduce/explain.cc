#include "reduce/explain.h"

#include <fmt/format.h>

#include <algorithm>

namespace motley::reduce {

namespace {

std::string hyphenated(Collective collective) {
  std::string name = to_string(collective);
  std::replace(name.begin(), name.end(), '_', '-');
  return name;
}

}  // namespace

std::vector<std::string> level_names(const SynthesisHierarchy& synthesis,
                                     const Hierarchy& hierarchy) {
  std::vector<std::string> names = {"root"};
  for (size_t l = 1; l < synthesis.levels.size(); ++l)
    names.push_back(hierarchy[synthesis.source[l]].name);
  return names;
}

std::string in_words(const Step& step, const SynthesisHierarchy& synthesis,
                     const Hierarchy& hierarchy) {
  std::vector<std::string> names = level_names(synthesis, hierarchy);
  std::string what = hyphenated(step.collective);
  const Form& form = step.form;
  if (form.shape == Shape::inside)
    return what + (form.slice == 0 ? " over the whole group" : " inside each " + names[form.slice]);
  std::string within = form.ancestor == 0 ? "" : " of each " + names[form.ancestor];
  if (form.shape == Shape::parallel)
    return fmt::format("{} across the {}s{}", what, names[form.slice], within);
  return fmt::format("{} between the first devices of the {}s{}", what, names[form.slice], within);
}

std::string draw(const Program& program, const SynthesisHierarchy& synthesis,
                 const Hierarchy& hierarchy, int columns) {
  const std::vector<int>& members = synthesis.devices[0];
  int shown = std::min(columns, static_cast<int>(members.size())), unit = 1;
  for (size_t j = 1; j < hierarchy.size(); ++j) unit *= hierarchy[j].size;
  size_t label = 0;
  for (const Step& step : program) label = std::max(label, hyphenated(step.collective).size());
  auto line = [&](const std::string& head, auto&& mark) {
    std::string text = fmt::format("  {:<{}} ", head, label + 2);
    for (int i = 0; i < shown; ++i) {
      if (i > 0 && members[i] / unit != members[i - 1] / unit) text += ' ';
      text += mark(i);
    }
    return text + (shown < static_cast<int>(members.size()) ? " ..\n" : "\n");
  };
  std::string text = line("", [](int i) { return static_cast<char>('0' + i % 10); });
  for (size_t s = 0; s < program.size(); ++s) {
    std::vector<char> marks(members.size(), '.');
    Groups groups = groups_of(program[s].form, synthesis.levels);
    bool rooted = program[s].collective == Collective::reduce ||
                  program[s].collective == Collective::broadcast;
    for (size_t g = 0; g < groups.size(); ++g)
      for (size_t i = 0; i < groups[g].size(); ++i)
        marks[groups[g][i]] = static_cast<char>((rooted && i == 0 ? 'A' : 'a') + g % 26);
    text += line(fmt::format("{} {}", s + 1, hyphenated(program[s].collective)),
                 [&](int i) { return marks[i]; });
  }
  return text;
}

}  // namespace motley::reduce
