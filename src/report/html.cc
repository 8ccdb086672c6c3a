#include "report/html.h"

#include <algorithm>

#include "core/ranges.h"

namespace motley::report {

std::string escape(const std::string& text) {
  std::string out;
  out.reserve(text.size());
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        if ((static_cast<unsigned char>(c) < 0x20 && c != '\n') || c == 0x7f)
          out += "\xEF\xBF\xBD";
        else
          out += c;
    }
  }
  return out;
}

std::string script_json(const Json& json) {
  // In JSON these characters stand inside of strings alone.
  std::string out;
  for (const char c : json.dump(-1, ' ', false, Json::error_handler_t::replace)) {
    if (c == '<' || c == '>' || c == '&')
      out += fmt::format("\\u{:04x}", static_cast<int>(c));
    else
      out += c;
  }
  return out;
}

std::string row(const std::vector<std::string>& cells, bool head) {
  std::string out = "<tr>";
  for (const std::string& cell : cells) {
    const char* tag = head ? "th" : "td";
    out += fmt::format("<{}>{}</{}>", tag, cell, tag);
  }
  return out + "</tr>\n";
}

std::string bar(const std::vector<std::pair<const char*, double>>& parts, double whole,
                const std::string& title) {
  std::string out = fmt::format("<div class=\"bar\" title=\"{}\">", escape(title));
  for (const auto& [kind, part] : parts)
    out += fmt::format("<i class=\"{}\" style=\"width:{:.2f}%\"></i>", kind,
                       whole > 0 ? std::clamp(100 * part / whole, 0.0, 100.0) : 0.0);
  return out + "</div>";
}

std::string fold(const std::string& summary, const std::string& inside) {
  return fmt::format("<details><summary>{}</summary>\n{}</details>\n", escape(summary), inside);
}

std::string ranges(const std::vector<int>& numbers) { return format_ranges(numbers, "–"); }

}  // namespace motley::report
