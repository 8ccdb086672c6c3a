// Texts with something changed: what a slip, a damaged disk or a stranger makes of a file.
#pragma once

#include <cstdint>
#include <string>

#include "core/rng.h"

namespace motley {

const char* extreme_number(Rng* rng);
// `most`: what is repeated is no longer than about that.
std::string change_bytes(std::string text, Rng* rng, size_t most = SIZE_MAX);
// Of a text without one, bytes.
std::string change_number(std::string text, Rng* rng);
// One to three bytes, lines, numbers, or values of a JSON text; `most` as above.
std::string mutated_text(const std::string& text, uint64_t seed, size_t most = SIZE_MAX);

}  // namespace motley
