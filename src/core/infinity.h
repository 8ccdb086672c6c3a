#pragma once

#include <limits>

namespace motley {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

}  // namespace motley
