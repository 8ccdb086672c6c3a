// Mutated files and command lines end in a result or in one line. A larger run is `./dev bench
// hostile`.
#include "fuzz.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "core/error.h"

namespace motley {
namespace {

TEST(Fuzz, ReadersTakeOrRefuseInOneLine) {
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / fmt::format("motley_fuzz_{}", getpid());
  std::filesystem::create_directories(folder);
  FuzzOptions options;
  options.motley = std::string(MOTLEY_BINARY_DIR) + "/motley";
  options.folder = folder;
  options.source = MOTLEY_SOURCE_DIR;
  options.cases = 100, options.programs = 2, options.seed = 7;
  for (const std::string& kind : fuzz_kinds()) {
    options.cases = kind == "options" ? 60 : 100;
    const bool is_socket = kind == "stranger" || kind == "message";  // closed where it is wrong
    const FuzzReport report = fuzz(kind, options);
    for (const std::string& wrong : report.wrong) ADD_FAILURE() << kind << ", " << wrong;
    EXPECT_GE(report.cases, options.cases) << kind;
    // Mutants are neither all taken nor all refused.
    EXPECT_TRUE(report.refused > 0 || is_socket) << kind;
    EXPECT_TRUE(report.taken > 0 || kind == "checkpoints") << kind;
  }
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace motley
