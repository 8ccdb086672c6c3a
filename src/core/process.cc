#include "core/process.h"

#include <fmt/format.h>

#include <fstream>
#include <iterator>
#include <sstream>

namespace motley {

std::string process_field(pid_t process, int number) {
  std::ifstream file(fmt::format("/proc/{}/stat", process));
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const size_t name = text.rfind(')');  // field 2, which may have anything in it
  if (name == std::string::npos) return "";
  std::istringstream words(text.substr(name + 1));
  std::string word;
  for (int field = 3; field <= number; ++field) words >> word;
  return word;
}

}  // namespace motley
