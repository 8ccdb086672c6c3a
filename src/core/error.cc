#include "core/error.h"

namespace motley {

void check_failed(const char* file, int line, const char* condition, const std::string& message) {
  throw InternalError(fmt::format("{}:{}: check failed: {}{}{}", file, line, condition,
                                  message.empty() ? "" : ": ", message));
}

}  // namespace motley
