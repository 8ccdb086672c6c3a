// Placements: how one tensor of the single-device graph is held by the devices of a group.
//
//   R         every device holds the whole tensor
//   P         every device holds a tensor of the full shape; the sum over devices is the tensor
//   S(d)      dimension d is cut into one piece per device, in device order
//   S(d.k)    dimension d is a product of atomic factors f_0 x f_1 x ...; factor k is cut, so that
//   a device holds, for
//             every index of the outer factors, a contiguous block of the cut one. S(d) is S(d.0).
//
// A piece may be empty and pieces may be unequal; how the cut factor's size is divided is a
// property of the plan (shares, see shard/shares.h) and depends only on that size. Factors exist so
// that "the heads are sharded" survives the views between [batch, seq, 3*heads*dim] and [batch,
// heads, seq, dim] (HAP leaves attention sharded on the batch only).
#pragma once

#include <cstdint>
#include <string>

namespace motley {

struct Placement {
  enum class Kind : uint8_t { replicated, partial, shard };
  Kind kind = Kind::replicated;
  uint8_t dim = 0;     // shard: dimension
  uint8_t factor = 0;  // shard: position in the dimension's list of atomic factors

  static constexpr Placement replicated() { return {}; }
  static constexpr Placement partial() { return {Kind::partial, 0, 0}; }
  static constexpr Placement shard(int dim, int factor = 0) {
    return {Kind::shard, static_cast<uint8_t>(dim), static_cast<uint8_t>(factor)};
  }
  constexpr bool is_replicated() const { return kind == Kind::replicated; }
  constexpr bool is_partial() const { return kind == Kind::partial; }
  constexpr bool is_shard() const { return kind == Kind::shard; }
  friend constexpr bool operator==(Placement, Placement) = default;
  friend constexpr auto operator<=>(Placement, Placement) = default;
};

std::string to_string(Placement placement);  // "R", "P", "S(1)", "S(2.1)"
bool parse_placement(const std::string& text, Placement* placement);

}  // namespace motley
