// Files and JSON that users hand us, which may be hostile, and files we write, which are never left
// half-written.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "core/error.h"

namespace motley {

using Json = nlohmann::ordered_json;

// Reads a whole regular file. Throws UserError if it is missing, not a file or larger than
// `max_bytes`.
std::string read_file(const std::string& path, size_t max_bytes = size_t{1} << 30);

// Writes to a temporary file beside `path`, then renames it over; symbolic links are followed, and
// what is not a regular file (a device, a pipe) is written to as it is, never replaced. Throws
// UserError where `path` cannot be written.
void write_file(const std::string& path, const std::string& content);

// Parses JSON nested at most `max_depth` deep. Throws UserError with `name` and the byte where it
// went wrong.
Json parse_json(const std::string& text, const std::string& name, int max_depth = 64);

// One JSON object whose fields are read by name; a missing field, a wrong type or a field nobody
// asked for is a UserError that names the path of the field ("p.json: program[3].node is ...").
class Fields {
 public:
  Fields(const Json& object, std::string module, std::string where);

  const Json& at(const char* name) const;     // required
  const Json* find(const char* name) const;   // optional
  std::string text(const char* name) const;   // a string
  double number(const char* name) const;      // finite
  int64_t integer(const char* name) const;    // integral
  const Json& array(const char* name) const;  // an array
  const std::string& where() const { return where_; }
  UserError bad(const char* name, const std::string& why) const;

 private:
  const Json& object_;
  std::string module_, where_;
};

}  // namespace motley
