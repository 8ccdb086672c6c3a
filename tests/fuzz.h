// Mutated input files and command lines: whatever is in them, readers take it or refuse it with one
// line, in seconds and without gigabytes.
//
// Cases are numbered, and case i of a kind follows from (seed, i) alone. Readers run in children
// that are replaced when they die; the program runs as itself.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace motley {

struct FuzzReport {
  std::string kind;
  int cases = 0, taken = 0, refused = 0;
  double slowest_s = 0;
  std::vector<std::string>
      wrong;  // crashes, internal errors, too long, too much memory, no one line
};

struct FuzzOptions {
  std::string motley;  // path of the program
  std::string folder;  // for files
  std::string source;  // root of the repository, for files to start from
  int cases = 3000;    // of each kind
  int programs = 100;  // of them, run by the program (options and stages: all)
  uint64_t seed = 1;
  std::string keep;  // folder for files that readers do wrong with; empty: none
};

// "clusters", "plans", "graphs", "stages", "profiles", "checkpoints", "options", and those of formats()
// (formats.h) that are none of these, from the files in tests/corpus.
const std::vector<std::string>& fuzz_kinds();
FuzzReport fuzz(const std::string& kind, const FuzzOptions& options);

}  // namespace motley
