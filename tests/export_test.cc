// Exporters: random plans go out and come back the same, wrong numbers are refused, and what is said
// to Megatron are options that it has.
#include "export/export.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "core/error.h"
#include "core/printable.h"
#include "mutate_text.h"
#include "random_arrangement.h"
#include "sim/simulate.h"

namespace motley {
namespace {

using ::testing::HasSubstr;
namespace fs = std::filesystem;

int cases() {
  const char* text = std::getenv("MOTLEY_EXPORT_CASES");
  return text ? std::atoi(text) : 10;
}

class Folder {
 public:
  explicit Folder(const std::string& name)
      : path_(fs::temp_directory_path() / fmt::format("{}.{}", name, getpid())) {
    fs::remove_all(path_);
  }
  ~Folder() { fs::remove_all(path_); }
  std::string path() const { return path_.string(); }

 private:
  fs::path path_;
};

// [begin, size] of the numbers of a text.
std::vector<std::pair<size_t, size_t>> numbers_in(const std::string& text) {
  std::vector<std::pair<size_t, size_t>> numbers;
  for (size_t at = 0; at < text.size();) {
    size_t end = at;
    while (end < text.size() && std::isdigit(static_cast<unsigned char>(text[end]))) ++end;
    if (end > at) numbers.emplace_back(at, end - at);
    at = end + 1;
  }
  return numbers;
}

class Targets : public ::testing::TestWithParam<const char*> {};

TEST_P(Targets, PlansComeBackAsTheyWent) {
  RandomPlans random(GetParam());
  const Folder folder(std::string("motley_export_") + GetParam());
  for (int i = 0; i < cases(); ++i) {
    SCOPED_TRACE(fmt::format("case {}", i));
    const std::unique_ptr<Plan> plan = random.plan(1, i);
    ASSERT_THAT(check(*plan, false), ::testing::IsEmpty());
    std::string reason;
    const Exported exported = export_plan(*plan, *find_exporter(GetParam()), &reason);
    ASSERT_EQ(reason, "");
    write_directory(exported, folder.path(), true);
    const std::unique_ptr<Plan> again = import_plan(folder.path(), nullptr, nullptr);
    const auto sent = planner::read_arrangement(*plan, &reason),
               came = planner::read_arrangement(*again, &reason);
    ASSERT_TRUE(sent && came) << reason;
    EXPECT_EQ(planner::to_string(*sent), planner::to_string(*came));
    EXPECT_EQ(planner::rank_order(*sent), planner::rank_order(*came));
    EXPECT_EQ(sent->shares, came->shares);
    EXPECT_NEAR(again->predicted_step_s, plan->predicted_step_s, 1e-9 * plan->predicted_step_s);
    if (plan->pipeline) {
      ASSERT_TRUE(again->pipeline);
      for (int s = 0; s < plan->pipeline->stages(); ++s)
        EXPECT_EQ(plan->pipeline->replicas[0].stages[s].program.steps,
                  again->pipeline->replicas[0].stages[s].program.steps);
    }
  }
}

// One number of one file changed: refused, or the same numbers of ranks, layers and rows.
TEST_P(Targets, WrongNumbersAreRefusedOrStayWithinTheRules) {
  RandomPlans random(GetParam());
  const Exporter& exporter = *find_exporter(GetParam());
  const Folder folder(std::string("motley_mutant_") + GetParam());
  int refused = 0, taken = 0;
  for (int i = 0; i < 3 * cases(); ++i) {
    SCOPED_TRACE(fmt::format("case {}", i));
    Rng rng(static_cast<uint64_t>(i));
    const std::unique_ptr<Plan> plan = random.plan(2, i);
    std::string reason;
    Exported exported = export_plan(*plan, exporter, &reason);
    ASSERT_EQ(reason, "");
    std::string* text = nullptr;
    for (ExportedFile& file : exported.files)
      if (file.path == exporter.file) text = &file.text;
    ASSERT_NE(text, nullptr);
    const auto numbers = numbers_in(*text);
    const auto [at, size] = numbers[rng.below(static_cast<int64_t>(numbers.size()))];
    const int64_t old = std::stoll(text->substr(at, size));
    text->replace(at, size, std::to_string(old + rng.between(1, 3)));
    write_directory(exported, folder.path(), true);
    try {
      const std::unique_ptr<Plan> again = import_plan(folder.path(), nullptr, nullptr);
      EXPECT_THAT(check(*again, false), ::testing::IsEmpty());
      EXPECT_EQ(again->batch, plan->batch);
      ++taken;
    } catch (const UserError& e) {
      EXPECT_THAT(e.what(), HasSubstr(folder.path()));
      EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos);
      ++refused;
    }
  }
  EXPECT_GT(refused, 0);
  std::printf("%s: %d mutants refused, %d taken\n", GetParam(), refused, taken);
}

INSTANTIATE_TEST_SUITE_P(All, Targets,
                         ::testing::Values("ddp", "deepspeed", "flagscale", "fsdp2", "galvatron",
                                           "megatron", "torchtitan"),
                         [](const auto& target) { return std::string(target.param); });

// Every word of an export is an option of Megatron's parser, with a value that it takes.
std::string refused_by_table(const std::string& arguments, const Json& table) {
  std::set<std::string> seen;
  std::istringstream lines(arguments);
  for (std::string word; std::getline(lines, word);) {
    const auto option =
        std::find_if(table.begin(), table.end(), [&](const Json& o) { return o["name"] == word; });
    if (option == table.end()) return word + " is no option";
    if (!seen.insert(word).second) return word + " twice";
    if ((*option)["nargs"] == 0) continue;
    std::string value;
    if (!std::getline(lines, value)) return word + " has no value";
    const std::string type =
        (*option)["type"].is_string() ? (*option)["type"].get<std::string>() : "";
    char* end = nullptr;
    if (type == "int") std::strtol(value.c_str(), &end, 10);
    if (type == "float") std::strtod(value.c_str(), &end);
    if (end && (end == value.c_str() || *end != 0)) return word + " " + value + " is no " + type;
    const Json& choices = (*option)["choices"];
    if (choices.is_array() &&
        std::find(choices.begin(), choices.end(), Json(value)) == choices.end())
      return word + " " + value + " is no choice";
  }
  return "";
}

TEST(Megatron, ArgumentsAreThoseOfItsTable) {
  const std::string path = std::string(MOTLEY_SOURCE_DIR) + "/tests/data/megatron_options.json";
  const Json table = parse_json(read_file(path), path)["options"];
  const Exporter& megatron = *find_exporter("megatron");
  RandomPlans random("megatron");
  for (int i = 0; i < 1000 + cases(); ++i) {
    std::string reason;
    planner::Arrangement a;
    const std::unique_ptr<Plan> plan = i < 1000 ? random.outline(7, i, &a) : random.plan(4, i);
    const Exported exported = i < 1000 ? export_arrangement(*plan, a, megatron, &reason)
                                       : export_plan(*plan, megatron, &reason);
    ASSERT_EQ(reason, "");
    for (const ExportedFile& file : exported.files)
      if (file.path == "arguments.txt") {
        EXPECT_EQ(refused_by_table(file.text, table), "") << i;
        EXPECT_NE(refused_by_table(file.text + "--tensor-model-parallel\n2\n", table), "");
      }
  }
}

// Whatever is in a directory, it is read or refused with one line.
TEST_P(Targets, DamagedDirectoriesAreReadOrRefused) {
  RandomPlans random(GetParam());
  const Folder folder(std::string("motley_damaged_") + GetParam());
  std::string reason;
  const Exported exported = export_plan(*random.plan(5, 0), *find_exporter(GetParam()), &reason);
  for (int i = 0; i < 5 * cases(); ++i) {
    Exported damaged = exported;
    for (ExportedFile& file : damaged.files) {
      const bool read = file.path == find_exporter(GetParam())->file || file.path == "ranks.txt" ||
                        file.path == "hostfile" || file.path == "stages.json" ||
                        file.path == "schedule.csv" || (file.path == "motley.json" && i % 5 == 0);
      if (read) file.text = mutated_text(file.text, mix64(static_cast<uint64_t>(i)));
    }
    write_directory(damaged, folder.path(), true);
    try {
      import_plan(folder.path(), nullptr, nullptr);
    } catch (const UserError& e) {
      EXPECT_EQ(printable(e.what(), /*line=*/true).find('\n'), std::string::npos) << e.what();
    }
  }
}

// With MOTLEY_EXPORT_TO=DIR: random plans of every target, DIR/TARGET/NUMBER, for the frameworks' own
// checks (tests/exports/check_peers.py); with MOTLEY_EXPORT_OUTLINES without their programs.
TEST(Exports, WritesRandomPlansForPeers) {
  const char* to = std::getenv("MOTLEY_EXPORT_TO");
  if (!to) GTEST_SKIP() << "MOTLEY_EXPORT_TO is not set";
  for (const Exporter& exporter : exporters()) {
    RandomPlans random(exporter.target);
    for (int i = 0; i < cases(); ++i) {
      std::string reason;
      planner::Arrangement a;
      const bool outline = std::getenv("MOTLEY_EXPORT_OUTLINES") != nullptr;
      const std::unique_ptr<Plan> plan = outline ? random.outline(3, i, &a) : random.plan(3, i);
      write_directory(outline ? export_arrangement(*plan, a, exporter, &reason)
                              : export_plan(*plan, exporter, &reason),
                      fmt::format("{}/{}/{}", to, exporter.target, i), true);
      ASSERT_EQ(reason, "");
    }
  }
}

}  // namespace
}  // namespace motley
