// The independent checker against mutants of plans of every kind: what it accepts equals one
// device. A larger run is `./dev bench mutants`.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>

#include "mutants.h"
#include "plan/plan.h"

namespace motley {
namespace {

TEST(Checker, AcceptsOnlyWhatEqualsOneDevice) {
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / fmt::format("motley_mutants_{}", getpid());
  std::filesystem::create_directories(folder);
  const MutantReport report = run_mutants(std::string(MOTLEY_BINARY_DIR) + "/motley", folder,
                                          mutated_plans(), 16, 1, false);
  std::filesystem::remove_all(folder);
  for (const std::string& wrong : report.wrong) ADD_FAILURE() << wrong;
  // Neither are all refused nor all accepted, and graphs are among them.
  EXPECT_GT(report.mutants, 200);
  EXPECT_GT(report.equal, report.mutants / 20);
  EXPECT_GT(report.unsound, report.mutants / 5);
  EXPECT_GT(report.graphs, report.mutants / 10);
}

// Steps that run again out of place, which lifetimes would follow and the executor would not.
TEST(Checker, StepsRunAgainOnlyForTheBackwardPass) {
  const std::string file =
      (std::filesystem::temp_directory_path() / fmt::format("motley_again_{}.json", getpid()));
  const std::string command = fmt::format(
      "{}/motley plan gpt:layers=2,hidden=16,heads=4,seq=6,vocab=11 --batch 8 --cluster "
      "local-mixed-4 --strategy tensor-parallel --memory-limit off -o {} >/dev/null",
      MOTLEY_BINARY_DIR, file);
  ASSERT_EQ(std::system(command.c_str()), 0);
  const Plan plan = load_plan(file);
  std::filesystem::remove(file);
  ASSERT_TRUE(check(plan, false).empty());
  int tried = 0;
  const std::vector<Step>& steps = plan.program.steps;
  for (size_t s = 0; s < steps.size(); ++s) {
    const bool source = steps[s].is_compute() && is_source(plan.graph->node(steps[s].node));
    // At the end of the program nothing reads what it makes; right behind itself neither.
    for (size_t to : {steps.size(), s + 1}) {
      Program again = plan.program;
      again.steps.change([&](std::vector<Step>& changed) {
        changed.insert(changed.begin() + static_cast<std::ptrdiff_t>(to), steps[s]);
        changed[to].again = true;
      });
      if (to == s + 1 && s % 7 != 0) continue;
      const auto problems = check(*plan.theory, again);
      ++tried;
      if (to == steps.size() || source) {
        EXPECT_FALSE(problems.empty()) << to_text(*plan.theory, steps[s]);
      }
    }
  }
  EXPECT_GT(tried, 300);
}

}  // namespace
}  // namespace motley
