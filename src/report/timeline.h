// The simulated timeline made small enough for a page.
//
// Devices that do the same at the same times share a row. A row keeps at most its part of `budget`
// spans: while there are more, neighbours that are shorter together than a threshold become one
// span, named after the longest of them, and the threshold doubles. No time is lost or moved: a
// merged span begins with its first part and ends with its last.
//
// Cost: O(spans log spans).
#pragma once

#include <string>
#include <vector>

#include "sim/simulate.h"

namespace motley::report {

enum class Colour : uint8_t { forward, backward, optimizer, comm, wait };

struct Bar {
  Seconds begin = 0, end = 0;
  Colour colour = Colour::forward;
  std::string name;
  int merged = 1;  // spans in it
};

struct Lane {
  std::vector<int> devices;  // that share it, ascending
  std::vector<Bar> bars;     // by begin
  bool beside = false;       // what they communicate beside computation
};

std::vector<Lane> lanes_of(const Plan& plan, const Simulation& simulation, size_t budget);

// For the page's script: {end, names, lanes: [{label, bars: [gap, length, colour, name, merged,
// ...]}]}, times in millionths of `end`.
Json to_json(const Plan& plan, const std::vector<Lane>& lanes);

}  // namespace motley::report
