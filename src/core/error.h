// Two kinds of failure, and no third.
//
// UserError: something the user can fix. The message is one line that starts with the module in
// brackets and names the file, field and value and how to fix it: "[cluster] c.yaml:
// devices[2].flops is -1; give a positive number". The command line prints it and exits with 2.
//
// MOTLEY_CHECK: a broken invariant of ours. It throws InternalError with the place; the command
// line exits with 1.
//
// "No plan fits" is neither: searches return it as a value.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace motley {

class UserError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class InternalError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

// What others wrote into a message, without line ends and control characters, and cut to some 2,000
// characters.
std::string one_line(const std::string& message);

// Builds a UserError: throw user_error("plan", "step {} names op {}", i, name).
template <typename... Args>
UserError user_error(const char* module, fmt::format_string<Args...> format, Args&&... args) {
  return UserError(
      one_line(fmt::format("[{}] {}", module, fmt::format(format, std::forward<Args>(args)...))));
}

[[noreturn]] void check_failed(const char* file, int line, const char* condition,
                               const std::string& message);

}  // namespace motley

// MOTLEY_CHECK(condition) or MOTLEY_CHECK(condition, "format {}", arg...).
#define MOTLEY_CHECK(condition, ...)                                                         \
  do {                                                                                       \
    if (!(condition)) [[unlikely]]                                                           \
      ::motley::check_failed(__FILE__, __LINE__, #condition, ::fmt::format("" __VA_ARGS__)); \
  } while (false)
