// Lists of numbers in words.
#pragma once

#include <string>
#include <vector>

namespace motley {

// "3-5, 8" of ascending numbers.
std::string format_ranges(const std::vector<int>& numbers, const char* dash = "-");

}  // namespace motley
