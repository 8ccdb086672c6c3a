// Mutated files and command lines: ./dev bench hostile [of each kind] [seed] [kind ...]. Each is taken
// or refused with one line, in seconds and without gigabytes. Ends with 1 if any is not; the folder
// MOTLEY_FUZZ_KEEP then gets the files.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "core/error.h"
#include "fuzz.h"

int main(int argc, char** argv) {
  namespace fs = std::filesystem;
  motley::FuzzOptions options;
  if (argc > 1) options.cases = std::atoi(argv[1]);
  if (argc > 2) options.seed = std::strtoull(argv[2], nullptr, 10);
  const fs::path folder = fs::temp_directory_path() / fmt::format("motley_fuzz_{}", getpid());
  fs::create_directories(folder);
  options.motley = fs::read_symlink("/proc/self/exe").parent_path() / "motley";
  options.folder = folder;
  const char* keep = std::getenv("MOTLEY_FUZZ_KEEP");
  options.keep = keep == nullptr ? "" : keep;
  options.source = MOTLEY_SOURCE_DIR;
  std::vector<std::string> kinds(argv + std::min(argc, 3), argv + argc);
  size_t wrong = 0;
  for (const std::string& kind : kinds.empty() ? motley::fuzz_kinds() : kinds) {
    const motley::FuzzReport r = motley::fuzz(kind, options);
    std::printf("%-12s %5d cases: %5d taken, %5d refused in one line, %zu wrong; slowest %.2f s\n",
                kind.c_str(), r.cases, r.taken, r.refused, r.wrong.size(), r.slowest_s);
    for (const std::string& what : r.wrong) std::printf("  %s\n", what.c_str());
    std::fflush(stdout);
    wrong += r.wrong.size();
  }
  fs::remove_all(folder);
  return wrong == 0 ? 0 : 1;
}
