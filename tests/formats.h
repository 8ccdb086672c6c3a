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
  // Bytes of inputs that libFuzzer tries most of the time: some times those of a small file that says all
  // there is to say. What is long says little more and takes longer; one minute in eight goes to it.
  int most = 4096;
  // Takes the bytes, or throws UserError.
  std::function<void(const std::string&)> read;
};
const std::vector<Format>& formats();
// REQUIRES: there is one of this name.
const std::function<void(const std::string&)>& reader_of(const std::string& name);

}  // namespace motley
