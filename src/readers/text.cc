#include "readers/text.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>

#include "cluster/cluster.h"
#include "core/error.h"

namespace motley::readers {

std::string lower(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

std::string trimmed(const std::string& text) {
  const size_t first = text.find_first_not_of(" \t\r\n"), last = text.find_last_not_of(" \t\r\n");
  return first == std::string::npos ? "" : text.substr(first, last - first + 1);
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines = {""};
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\n') {
      lines.emplace_back();
    } else if (text[i] == '\x1b' && i + 1 < text.size() && text[i + 1] == '[') {
      for (i += 2; i < text.size() && std::isalpha(static_cast<unsigned char>(text[i])) == 0;) ++i;
    } else if (text[i] != '\r' && text[i] != '\0') {
      lines.back() += text[i];
    }
  }
  return lines;
}

std::vector<std::string> words_of(const std::string& line) {
  std::vector<std::string> words;
  for (size_t i = 0; i < line.size();) {
    while (i < line.size() && (line[i] == ' ' || line[i] == '\t')) ++i;
    size_t end = i;
    while (end < line.size() && line[end] != ' ' && line[end] != '\t') ++end;
    if (end > i) words.push_back(line.substr(i, end - i));
    i = end;
  }
  return words;
}

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> parts = {""};
  for (const char c : text)
    if (c == at)
      parts.emplace_back();
    else
      parts.back() += c;
  return parts;
}

bool whole(const std::string& text, int64_t* value, bool negative) {
  int64_t number = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), number);
  if (parsed.ec != std::errc() || parsed.ptr != text.data() + text.size() || text.empty() ||
      (!negative && number < 0))
    return false;
  *value = number;
  return true;
}

bool real(const std::string& text, double* value) {
  double number = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), number);
  if (parsed.ec != std::errc() || parsed.ptr != text.data() + text.size() || text.empty() ||
      !std::isfinite(number))
    return false;
  *value = number;
  return true;
}

namespace {

constexpr size_t kLongest = 200;

// "[0-5,007]" from a bracket on, put behind every prefix.
void expand(const std::string& ranges, std::vector<std::string>* prefixes,
            const std::string& where) {
  std::vector<std::string> numbers;
  for (const std::string& range : split(ranges, ',')) {
    const size_t dash = range.find('-');
    const std::string first = range.substr(0, dash),
                      last = dash == std::string::npos ? first : range.substr(dash + 1);
    int64_t a = 0, b = 0;
    if (!whole(first, &a) || !whole(last, &b) || b < a || first.size() > 12)
      throw user_error("cluster", "{} has the range '{}'; give such as 0-5", where,
                       range.substr(0, 40));
    if (b - a >= kMaxDevices || numbers.size() > static_cast<size_t>(kMaxDevices))
      throw user_error("cluster", "{} names more than {} machines", where, kMaxDevices);
    for (int64_t n = a; n <= b; ++n) numbers.push_back(fmt::format("{:0{}}", n, first.size()));
  }
  if (numbers.size() * prefixes->size() > static_cast<size_t>(kMaxDevices))
    throw user_error("cluster", "{} names more than {} machines", where, kMaxDevices);
  std::vector<std::string> all;
  for (const std::string& prefix : *prefixes)
    for (const std::string& number : numbers) all.push_back(prefix + number);
  *prefixes = std::move(all);
}

}  // namespace

std::vector<std::string> hostlist(const std::string& text, const std::string& where) {
  std::vector<std::string> names, current = {""};
  const auto close = [&] {
    for (std::string& name : current)
      if (!name.empty()) names.push_back(std::move(name));
    current = {""};
    if (names.size() > static_cast<size_t>(kMaxDevices))
      throw user_error("cluster", "{} names more than {} machines", where, kMaxDevices);
  };
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == ',') {
      close();
    } else if (text[i] == '[') {
      const size_t end = text.find(']', i);
      if (end == std::string::npos)
        throw user_error("cluster", "{} is '{}', with a bracket that nothing closes", where,
                         text.substr(0, 60));
      expand(text.substr(i + 1, end - i - 1), &current, where);
      i = end;
    } else {
      for (std::string& name : current) {
        name += text[i];
        if (name.size() > kLongest)
          throw user_error("cluster", "{} has a name of more than {} characters", where, kLongest);
      }
    }
  }
  close();
  return names;
}

std::string plain(std::string name) {
  for (char& c : name)
    if (std::isalnum(static_cast<unsigned char>(c)) == 0 && c != '-' && c != '_' && c != '.')
      c = '-';
  return name.empty() ? "group" : name.substr(0, 100);
}

UserError cluster_error(const std::string& name, const std::string& what, const std::string& fix) {
  return user_error("cluster", "{}: {}; give {}", name, what, fix);
}

double positive(const Json& value, const std::string& name, const std::string& field) {
  const double x = value.is_number() ? value.get<double>() : 0;
  if (!(x > 0) || !std::isfinite(x))
    throw cluster_error(name, fmt::format("{} is no number above 0", field.substr(0, 60)),
                        "what was measured");
  return x;
}

}  // namespace motley::readers
