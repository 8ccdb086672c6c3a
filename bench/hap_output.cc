#include "hap_output.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>

#include "core/file.h"

namespace motley::hap {
namespace {

// Panels of grouped bars, side by side.
std::string bars(const std::vector<Panel>& panels, const std::string& unit) {
  const char* colours[] = {"#1f4e79", "#6aaed6", "#e08214", "#fdb863", "#8073ac", "#999999"};
  const double width = 300, height = 220;
  std::string out = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{:.0f}\" height=\"{:.0f}\" "
      "font-family=\"sans-serif\" font-size=\"11\">\n",
      width * static_cast<double>(panels.size()), height + 100);
  for (size_t p = 0; p < panels.size(); ++p) {
    const Panel& panel = panels[p];
    const double left = width * static_cast<double>(p) + 40, inner = width - 60;
    double most = 0;
    for (const auto& [name, values] : panel.systems)
      for (double v : values) most = std::max(most, v);
    if (most == 0) most = 1;
    out += fmt::format("<text x=\"{:.1f}\" y=\"14\">{} ({}, up to {:.3g})</text>\n", left,
                       panel.title, unit, most);
    const double group = inner / static_cast<double>(panel.at.size());
    const double bar = 0.85 * group / static_cast<double>(panel.systems.size());
    for (size_t s = 0; s < panel.systems.size(); ++s) {
      const auto& [name, values] = panel.systems[s];
      for (size_t g = 0; g < values.size(); ++g) {
        const double tall = height * values[g] / most;
        out += fmt::format(
            "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" fill=\"{}\"/>\n",
            left + group * static_cast<double>(g) + bar * static_cast<double>(s),
            24 + height - tall, bar, tall, colours[s % 6]);
      }
      out += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" fill=\"{}\">{}</text>\n",
                         left + inner / 3 * static_cast<double>(s % 3),
                         height + 60 + 14 * static_cast<double>(s / 3), colours[s % 6], name);
    }
    for (size_t g = 0; g < panel.at.size(); ++g)
      out += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\">{}</text>\n",
                         left + group * static_cast<double>(g), height + 40, panel.at[g]);
  }
  return out + "</svg>\n";
}

}  // namespace

void Bench::figure(const std::string& name, const std::string& title) {
  figure_ = name;
  std::printf("\n== %s\n", title.c_str());
}

void Bench::row(const std::string& model, int devices, const std::string& system, double value,
                const std::string& unit) {
  std::fputs(
      fmt::format("{},{},{},{},{:.6g},{}\n", figure_, model, devices, system, value, unit).c_str(),
      rows_);
}

void Bench::draw(const std::vector<Panel>& panels, const std::string& unit) {
  if (!folder_.empty()) std::ofstream(folder_ + "/hap-" + figure_ + ".svg") << bars(panels, unit);
}

void Bench::paper(const std::string& experiment) const {
  for (std::string text = read_file(MOTLEY_SOURCE_DIR "/bench/data/hap_paper.csv");
       !text.empty();) {
    const size_t end = text.find('\n');
    const std::string line = text.substr(0, end);
    text.erase(0, end == std::string::npos ? end : end + 1);
    if (line.find(experiment) != std::string::npos) std::printf("  paper: %s\n", line.c_str());
  }
}

void Bench::expect(bool holds, const std::string& what) {
  if (holds) return;
  std::printf("  FAILED: %s\n", what.c_str());
  ++failures_;
}

}  // namespace motley::hap
