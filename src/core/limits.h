// What hardware may be said to do in a file: the numbers that models of time are good for.
#pragma once

#include <string>

namespace motley {

// `kind` as of parse_quantity (units.h), in SI: a bandwidth of 100 to 1e16 bytes/s, 1e3 to 1e22
// flop/s, at most 1e18 bytes, at most 1e3 s. Numbers of other kinds, and zero, are in range. Throws
// UserError naming `field`.
void check_range(double value, const std::string& kind, const std::string& field);

}  // namespace motley
