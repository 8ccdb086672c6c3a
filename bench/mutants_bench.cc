// Mutants of plans: ./dev bench mutants [of each plan] [seed]. Every one that the checker accepts
// is run on threads and compared with one device. Ends with 1 if any differs.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "core/error.h"
#include "mutants.h"

int main(int argc, char** argv) {
  const int of_each = argc > 1 ? std::atoi(argv[1]) : 400;
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / fmt::format("motley_mutants_{}", getpid());
  std::filesystem::create_directories(folder);
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe");
  const motley::MutantReport report =
      motley::run_mutants((self.parent_path() / "motley").string(), folder.string(),
                          motley::mutated_plans(), of_each, seed, true);
  std::filesystem::remove_all(folder);
  std::printf(
      "%d mutants (%d of the graph): %d unreadable, %d unsound, %d accepted and equal to one "
      "device, %zu accepted and wrong\n",
      report.mutants, report.graphs, report.unreadable, report.unsound, report.equal,
      report.wrong.size());
  for (const std::string& wrong : report.wrong) std::printf("  %s\n", wrong.c_str());
  return report.wrong.empty() ? 0 : 1;
}
