// Text on its way into a page.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "core/file.h"

namespace motley::report {

// Names come from files that others wrote. Escaped for an element and for a quoted attribute;
// control characters are replaced.
std::string escape(const std::string& text);

// JSON that may stand inside a script element.
std::string script_json(const Json& json);

// One row of a table; cells are HTML already. `head`: a header row.
std::string row(const std::vector<std::string>& cells, bool head = false);

// Parts of a whole, each of a style of assets.cc, as a bar.
std::string bar(const std::vector<std::pair<const char*, double>>& parts, double whole,
                const std::string& title);

// Folded away behind a line of text; `inside` is HTML.
std::string fold(const std::string& summary, const std::string& inside);

// "3-5, 8" of ascending numbers.
std::string ranges(const std::vector<int>& numbers);

}  // namespace motley::report
