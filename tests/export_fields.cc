#include "export_fields.h"

#include <algorithm>
#include <cctype>

namespace motley {

namespace {

bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }
bool is_digit(char c) { return std::isdigit(static_cast<unsigned char>(c)); }

std::string line_at(const std::string& text, size_t at, size_t* begin) {
  const size_t before = at == 0 ? std::string::npos : text.rfind('\n', at - 1);
  *begin = before == std::string::npos ? 0 : before + 1;
  return text.substr(*begin, std::min(text.find('\n', at), text.size()) - *begin);
}

// The word that ends before `end`.
std::string word_before(const std::string& text, size_t end) {
  size_t begin = end;
  while (begin > 0 && (is_word(text[begin - 1]) || text[begin - 1] == '-')) --begin;
  return text.substr(begin, end - begin);
}

// The last `"key":` in front of a place, or the key that it is in.
std::string json_field(const std::string& text, size_t at) {
  const size_t close = text.find('"', at);
  if (close != std::string::npos && text.compare(close, 2, "\":") == 0 &&
      std::all_of(text.begin() + static_cast<int64_t>(at),
                  text.begin() + static_cast<int64_t>(close), is_word))
    return "name " + word_before(text, close);
  const size_t colon = text.rfind("\":", at);
  return colon == std::string::npos ? "" : word_before(text, colon);
}

// `key: value` or `key = value`; of what stands alone the key of a line above.
std::string key_field(const std::string& text, size_t at, char mark) {
  size_t begin = at;
  for (;;) {
    const std::string line = line_at(text, begin, &begin);
    if (!line.empty() && line[0] == '#') return "comment";
    const size_t sign = line.find(mark);
    if (sign != std::string::npos && begin + sign < at) {
      size_t end = sign;
      while (end > 0 && line[end - 1] == ' ') --end;
      return word_before(line, end);
    }
    if (sign != std::string::npos && begin + sign >= at) return "name " + word_before(line, sign);
    if (begin == 0) return "";
    --begin;
  }
}

std::string option_field(const std::string& text, size_t at) {
  size_t begin = at;
  for (;;) {
    const std::string line = line_at(text, begin, &begin);
    if (line.starts_with("--")) return (begin + line.size() > at ? "name " : "") + line;
    if (begin == 0) return "";
    --begin;
  }
}

// `    name=value,` of the tables of a recipe; all else is program.
std::string python_field(const std::string& text, size_t at) {
  size_t begin = 0;
  const std::string line = line_at(text, at, &begin);
  const size_t sign = line.find('=');
  const bool field = line.starts_with("    ") && line.ends_with(",") &&
                     line.find(' ', 4) == std::string::npos && sign != std::string::npos &&
                     begin + sign < at;
  return field ? line.substr(4, sign - 4) : "program";
}

std::string field_of(const std::string& file, const std::string& text, size_t at) {
  size_t begin = 0;
  const std::string line = line_at(text, at, &begin);
  if (file.ends_with(".json")) return json_field(text, at);
  if (file.ends_with(".yaml")) return key_field(text, at, ':');
  if (file.ends_with(".toml")) return key_field(text, at, '=');
  if (file.ends_with(".csv")) return "pass";
  if (file.ends_with(".py")) return python_field(text, at);
  if (file == "arguments.txt") return option_field(text, at);
  const auto spaces =
      std::count(line.begin(), line.begin() + static_cast<int64_t>(at - begin), ' ');
  if (file == "ranks.txt") return spaces == 0 ? "rank" : spaces == 1 ? "host" : "device";
  return spaces == 0 ? "host" : spaces == 1 ? "slots" : "type";
}

}  // namespace

std::vector<FieldNumber> numbers_of(const std::string& file, const std::string& text) {
  std::vector<FieldNumber> numbers;
  for (size_t at = 0; at < text.size();) {
    size_t end = at;
    while (end < text.size() && is_digit(text[end])) ++end;
    if (end > at) numbers.push_back({at, end - at, field_of(file, text, at)});
    at = end + 1;
  }
  return numbers;
}

}  // namespace motley
