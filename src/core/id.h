// Strong ids: an index into one kind of table, which does not convert to an index into another.
#pragma once

#include <cstdint>
#include <functional>

namespace motley {

template <typename Tag>
struct Id {
  int32_t index = -1;  // -1: none

  constexpr Id() = default;
  constexpr explicit Id(int64_t i) : index(static_cast<int32_t>(i)) {}
  constexpr bool valid() const { return index >= 0; }
  friend constexpr bool operator==(Id, Id) = default;
  friend constexpr auto operator<=>(Id, Id) = default;
};

}  // namespace motley

template <typename Tag>
struct std::hash<motley::Id<Tag>> {
  size_t operator()(motley::Id<Tag> id) const { return std::hash<int32_t>()(id.index); }
};
