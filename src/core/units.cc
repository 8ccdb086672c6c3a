#include "core/units.h"

#include <fmt/format.h>

#include <cmath>
#include <cstdlib>
#include <map>

#include "core/error.h"

namespace motley {

namespace {

std::string scaled(double x, double base, std::initializer_list<const char*> units) {
  auto unit = units.begin();
  while (std::abs(x) >= base && unit + 1 != units.end()) {
    x /= base;
    ++unit;
  }
  return fmt::format("{:.3g} {}", x, *unit);
}

}  // namespace

std::string format_seconds(Seconds s) {
  if (s == 0) return "0 s";
  if (std::abs(s) < 1e-6) return fmt::format("{:.3g} ns", s * 1e9);
  if (std::abs(s) < 1e-3) return fmt::format("{:.3g} us", s * 1e6);
  if (std::abs(s) < 1) return fmt::format("{:.3g} ms", s * 1e3);
  return fmt::format("{:.4g} s", s);
}

std::string format_bytes(Bytes b) {
  return scaled(b, 1024, {"B", "KiB", "MiB", "GiB", "TiB", "PiB"});
}

std::string format_flops(Flops f) {
  return scaled(f, 1000, {"FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"});
}

double parse_quantity(const std::string& text, const std::string& kind, const std::string& field) {
  static const std::map<std::string, std::map<std::string, double>> units = {
      {"bandwidth",
       {{"B/s", 1},
        {"KB/s", 1e3},
        {"MB/s", 1e6},
        {"GB/s", 1e9},
        {"TB/s", 1e12},
        {"kbps", 1e3 / 8},
        {"Mbps", 1e6 / 8},
        {"Gbps", 1e9 / 8},
        {"Tbps", 1e12 / 8}}},
      {"flops",
       {{"FLOPS", 1}, {"MFLOPS", 1e6}, {"GFLOPS", 1e9}, {"TFLOPS", 1e12}, {"PFLOPS", 1e15}}},
      {"bytes",
       {{"B", 1},
        {"KB", 1e3},
        {"MB", 1e6},
        {"GB", 1e9},
        {"TB", 1e12},
        {"KiB", 1024.},
        {"MiB", 1024. * 1024},
        {"GiB", 1024. * 1024 * 1024},
        {"TiB", 1024. * 1024 * 1024 * 1024}}},
      {"time", {{"s", 1}, {"ms", 1e-3}, {"us", 1e-6}, {"ns", 1e-9}}},
      {"number", {}},
  };
  const auto& table = units.at(kind);
  auto fail = [&](const std::string& why) {
    std::string known;
    for (const auto& [name, unused] : table) known += (known.empty() ? "" : ", ") + name;
    return user_error("units", "{} is '{}': {}{}", field, text, why,
                      known.empty() ? "" : "; give a number with one of the units " + known);
  };
  const char* begin = text.c_str();
  char* end = nullptr;
  double value = std::strtod(begin, &end);
  if (end == begin) throw fail("not a number");
  if (!std::isfinite(value)) throw fail("not a finite number");
  if (value < 0) throw fail("must not be negative");
  while (*end == ' ') ++end;
  std::string unit(end);
  while (!unit.empty() && unit.back() == ' ') unit.pop_back();
  if (unit.empty()) return value;
  auto it = table.find(unit);
  if (it == table.end()) throw fail("unknown unit '" + unit + "'");
  if (!std::isfinite(value * it->second)) throw fail("larger than a number can be");
  return value * it->second;
}

}  // namespace motley
