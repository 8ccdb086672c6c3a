#include "core/collective.h"

#include <algorithm>

namespace motley {

const char* to_string(Collective collective) {
  constexpr const char* kNames[kCollectives] = {"all_reduce", "all_gather", "reduce_scatter",
                                                "all_to_all", "broadcast",  "reduce",
                                                "exchange",   "slice",      "mask"};
  return kNames[static_cast<int>(collective)];
}

std::optional<Collective> parse_collective(std::string_view name,
                                           std::span<const Collective> allowed) {
  const auto found = std::find_if(allowed.begin(), allowed.end(),
                                  [&](Collective c) { return name == to_string(c); });
  return found == allowed.end() ? std::nullopt : std::optional(*found);
}

}  // namespace motley
