// A run that ends because SIGINT or SIGTERM asks for it: neither a mistake nor a failure. The
// command line prints the message, if there is one, and exits with 128 + the signal.
#pragma once

#include <stdexcept>
#include <string>

namespace motley {

class Interrupted : public std::runtime_error {
 public:
  Interrupted(int number, const std::string& message)
      : std::runtime_error(message), signal(number) {}
  int signal;
};

}  // namespace motley
