// The collectives that programs, reductions and measurements name. S: bytes of the whole tensor.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace motley {

enum class Collective : uint8_t {
  all_reduce,      // sums -> the whole sum on all
  all_gather,      // pieces -> the whole on all
  reduce_scatter,  // sums -> a piece of the sum on each
  all_to_all,      // pieces of one dimension -> pieces of another
  broadcast,       // the root's tensor -> on all
  reduce,          // sums -> the whole sum on the root
  exchange,        // pieces in some shares -> pieces of the same dimension in others
  slice,           // the whole -> a piece; moves nothing
  mask,            // the whole -> on the first device, zeros elsewhere; moves nothing
};
constexpr int kCollectives = 9;

const char* to_string(Collective collective);
// The one of `allowed` with this name.
std::optional<Collective> parse_collective(std::string_view name,
                                           std::span<const Collective> allowed);
constexpr bool moves_nothing(Collective collective) {
  return collective == Collective::slice || collective == Collective::mask;
}

}  // namespace motley
