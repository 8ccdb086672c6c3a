#include "mutate_text.h"

#include <algorithm>
#include <cctype>
#include <vector>

#include "core/file.h"

namespace motley {

namespace {

size_t any(size_t count, Rng* rng) {
  return static_cast<size_t>(rng->below(static_cast<int64_t>(count)));
}

std::vector<std::pair<size_t, size_t>> numbers_in(const std::string& text) {
  std::vector<std::pair<size_t, size_t>> found;  // [begin, end)
  for (size_t i = 0; i < text.size();) {
    if (!std::isdigit(static_cast<unsigned char>(text[i]))) {
      ++i;
      continue;
    }
    size_t end = i;
    while (end < text.size() && (std::isalnum(static_cast<unsigned char>(text[end])) ||
                                 text[end] == '.' || text[end] == '+'))
      ++end;
    found.emplace_back(i, end);
    i = end;
  }
  return found;
}

}  // namespace

const char* extreme_number(Rng* rng) {
  static const std::vector<const char*> numbers = {"0",
                                                   "-1",
                                                   "1",
                                                   "1e308",
                                                   "-1e308",
                                                   "1e-320",
                                                   "nan",
                                                   "inf",
                                                   "16777216",
                                                   "2147483648",
                                                   "9223372036854775807",
                                                   "99999999999999999999",
                                                   "1e400",
                                                   "131072",
                                                   "0.5",
                                                   "-0.0",
                                                   "null",
                                                   "true"};
  return numbers[any(numbers.size(), rng)];
}

std::string change_bytes(std::string text, Rng* rng, size_t most) {
  const size_t at = any(text.size(), rng);
  const size_t length = std::min(1 + any(rng->chance(0.2) ? 200 : 8, rng), text.size() - at);
  switch (rng->below(6)) {
    case 0:
      text[at] = static_cast<char>(rng->below(256));
      break;
    case 1:
      text.erase(at, length);
      break;
    case 2:
      text.insert(any(text.size(), rng), text.substr(at, length));
      break;
    case 3:
      text.resize(at);
      break;
    case 4: {
      static const std::string signs = "[]{}:,\"'\n #%-&*!|>";
      text.insert(at, 1, signs[any(signs.size(), rng)]);
      break;
    }
    default: {
      std::string many;
      for (int i = 0; i < 2000 && many.size() < most; ++i) many += text.substr(at, length);
      text.insert(at, many);
    }
  }
  return text;
}

std::string change_number(std::string text, Rng* rng) {
  const auto numbers = numbers_in(text);
  if (numbers.empty()) return change_bytes(std::move(text), rng);
  const auto [begin, end] = numbers[any(numbers.size(), rng)];
  const auto& other = numbers[any(numbers.size(), rng)];
  const std::string fresh =
      rng->chance(0.3) ? text.substr(other.first, other.second - other.first) : extreme_number(rng);
  return text.replace(begin, end - begin, fresh);
}

namespace {

std::string change_line(const std::string& text, Rng* rng) {
  std::vector<std::string> lines(1);
  for (char c : text) {
    if (c == '\n')
      lines.emplace_back();
    else
      lines.back() += c;
  }
  const size_t at = any(lines.size(), rng), other = any(lines.size(), rng);
  const auto position = lines.begin() + static_cast<std::ptrdiff_t>(at);
  switch (rng->below(3)) {
    case 0:
      lines.erase(position);
      break;
    case 1: {
      const std::string copy = lines[other];
      lines.insert(position, copy);
      break;
    }
    default:
      std::swap(lines[at], lines[other]);
  }
  return fmt::format("{}", fmt::join(lines, "\n"));
}

void collect(Json* json, std::vector<Json*>* all) {
  all->push_back(json);
  if (json->is_structured())
    for (Json& child : *json) collect(&child, all);
}

// Strings that are no UTF-8 any more are written as what replaces them.
std::string written(const Json& json) {
  return json.dump(1, ' ', false, Json::error_handler_t::replace);
}

// One value of a JSON text; of another text nothing.
std::string change_value(const std::string& text, Rng* rng, size_t most) {
  Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded()) return "";
  std::vector<Json*> all;
  collect(&json, &all);
  Json& value = *all[any(all.size(), rng)];
  const Json other = *all[any(all.size(), rng)];
  switch (rng->below(5)) {
    case 0:
      value = other;
      break;
    case 1:
      value = Json::parse(extreme_number(rng), nullptr, false);
      if (value.is_discarded()) value = nullptr;
      break;
    case 2:
      if (value.is_array() && !value.empty())
        value.erase(any(value.size(), rng));
      else if (value.is_object() && !value.empty())
        value.erase(std::next(value.begin(), static_cast<std::ptrdiff_t>(any(value.size(), rng))));
      else
        value = Json::array();
      break;
    case 3:
      if (value.is_array() && !value.empty()) {
        const Json again = value[any(value.size(), rng)];
        const int64_t times = rng->chance(0.2) ? 5000 : 1;
        const auto fit = static_cast<int64_t>(most / written(again).size());
        for (int64_t i = 0; i < times && i <= fit; ++i) value.push_back(again);
      } else {
        value = Json::object();
      }
      break;
    default:
      value = value.is_string() ? change_number(value.get<std::string>() + " ", rng)
                                : std::string(extreme_number(rng));
  }
  return written(json);
}

}  // namespace

std::string mutated_text(const std::string& text, uint64_t seed, size_t most) {
  Rng rng(seed);
  std::string out = text;
  const int64_t changes = rng.between(1, 3);
  for (int64_t i = 0; i < changes; ++i) {
    std::string next;
    switch (rng.below(5)) {
      case 0:
        next = change_bytes(out, &rng, most);
        break;
      case 1:
        next = change_line(out, &rng);
        break;
      case 2:
        next = change_number(out, &rng);
        break;
      default:
        next = change_value(out, &rng, most);
        if (next.empty()) next = change_number(out, &rng);
    }
    out = next.empty() ? " " : next;
  }
  return out;
}

}  // namespace motley
