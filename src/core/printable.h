// Text that others chose (names in files, paths, arguments) on its way to a terminal: control
// characters, with which a terminal can be driven, are shown instead of sent.
#pragma once

#include <string>
#include <string_view>

namespace motley {

// The text with control characters (C0 but for line ends and tabs, DEL, C1) and bytes that are not
// UTF-8 as \x1b. `line`: line ends and tabs too.
std::string printable(std::string_view text, bool line = false);

// True if a name needs none of that.
bool is_printable(std::string_view name);

}  // namespace motley
