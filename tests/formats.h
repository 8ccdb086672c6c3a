// What strangers may give motley: files, what other programs print, and messages, each with what
// reads it. Fuzzers try them (fuzz.h, libfuzzer.cc).
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace motley {

struct Format {
  std::string name;  // "cluster"; that of its folder in tests/corpus
  bool text = true;
  // Takes the bytes, or throws UserError.
  std::function<void(const std::string&)> read;
};
const std::vector<Format>& formats();
// REQUIRES: there is one of this name.
const std::function<void(const std::string&)>& reader_of(const std::string& name);

}  // namespace motley
