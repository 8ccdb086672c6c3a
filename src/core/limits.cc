#include "core/limits.h"

#include <map>

#include "core/error.h"

namespace motley {

void check_range(double value, const std::string& kind, const std::string& field) {
  struct Range {
    double low, high;
    const char* words;
  };
  static const std::map<std::string, Range> ranges = {
      {"bandwidth", {100, 1e16, "0.1 KB/s to 10000 TB/s"}},
      {"flops", {1e3, 1e22, "0.001 MFLOPS to 1e7 PFLOPS"}},
      {"bytes", {0, 1e18, "at most 1e6 TB"}},
      {"time", {0, 1e3, "at most 1000 s"}}};
  const auto it = ranges.find(kind);
  if (it == ranges.end() || value == 0) return;
  if (!(value >= it->second.low && value <= it->second.high))
    throw user_error("units", "{} is {} (SI), beyond what is planned with; give {}", field, value,
                     it->second.words);
}

}  // namespace motley
