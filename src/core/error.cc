#include "core/error.h"

#include "core/printable.h"

namespace motley {

std::string one_line(const std::string& message) {
  constexpr size_t kFirst = 1500, kLast = 500;
  if (message.size() <= kFirst + kLast) return printable(message, /*line=*/true);
  const std::string cut =
      message.substr(0, kFirst) + " [...] " + message.substr(message.size() - kLast);
  return printable(cut, /*line=*/true);
}

void check_failed(const char* file, int line, const char* condition, const std::string& message) {
  throw InternalError(fmt::format("{}:{}: check failed: {}{}{}", file, line, condition,
                                  message.empty() ? "" : ": ", message));
}

}  // namespace motley
