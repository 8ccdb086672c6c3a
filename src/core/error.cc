#include "core/error.h"

#include "core/printable.h"

namespace motley {

std::string one_line(const std::string& message) { return printable(message, /*line=*/true); }

void check_failed(const char* file, int line, const char* condition, const std::string& message) {
  throw InternalError(fmt::format("{}:{}: check failed: {}{}{}", file, line, condition,
                                  message.empty() ? "" : ": ", message));
}

}  // namespace motley
