#include "core/ranges.h"

#include <fmt/format.h>

namespace motley {

std::string format_ranges(const std::vector<int>& numbers, const char* dash) {
  std::string out;
  for (size_t i = 0; i < numbers.size();) {
    size_t end = i + 1;
    while (end < numbers.size() && numbers[end] == numbers[end - 1] + 1) ++end;
    out += fmt::format("{}{}", out.empty() ? "" : ", ", numbers[i]);
    if (end > i + 1) out += fmt::format("{}{}", dash, numbers[end - 1]);
    i = end;
  }
  return out;
}

}  // namespace motley
