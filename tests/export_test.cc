// Exporters: random plans go out and come back the same, wrong numbers are refused, and what is said
// to Megatron are options that it has.
#include "export/export.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "core/error.h"
#include "core/printable.h"
#include "export_fields.h"
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

// What became of the numbers of a field.
struct Fate {
  int refused = 0, others = 0, silent = 0;
  std::string example;  // of a change that is silent
};

// A thousand plans without their programs: what is written is taken by the target's rules as they are
// known here, and means the same. Of each one number of each file is changed, of the first ones every
// number: refused, or another plan within the rules, or of a field that says nothing of the plan.
TEST_P(Targets, AThousandOutlinesAreTakenByTheRules) {
  constexpr int kOutlines = 1000, kThorough = 20;
  RandomPlans random(GetParam());
  const Exporter& exporter = *find_exporter(GetParam());
  const Folder folder(std::string("motley_outline_") + GetParam());
  const ExportDirectory directory(folder.path());
  std::map<std::string, Fate> fates;
  // Without the care of write_directory(), which takes its time.
  const auto put = [&](const std::string& file, const std::string& text) {
    fs::create_directories(fs::path(directory.name(file)).parent_path());
    std::ofstream(directory.name(file)) << text;
  };
  for (int i = 0; i < kOutlines; ++i) {
    SCOPED_TRACE(fmt::format("case {}", i));
    planner::Arrangement sent;
    const std::unique_ptr<Plan> plan = random.outline(6, i, &sent);
    std::string reason;
    Exported exported = export_arrangement(*plan, sent, exporter, &reason);
    ASSERT_EQ(reason, "");
    fs::remove_all(folder.path());
    for (const ExportedFile& file : exported.files) put(file.path, file.text);
    const auto read = [&] {
      return import_arrangement(directory, exporter, plan->cluster, *plan->graph, plan->batch);
    };
    const planner::Arrangement came = read();
    ASSERT_EQ(planner::to_string(sent), planner::to_string(came));
    ASSERT_EQ(planner::rank_order(sent), planner::rank_order(came));
    Rng rng(static_cast<uint64_t>(i));
    for (const ExportedFile& file : exported.files) {
      if (file.executable || file.path == "motley.json" || file.path == "train.py" || file.path == "model.py" || file.path == "pipeline_module.py") continue;
      const std::vector<FieldNumber> numbers = numbers_of(file.path, file.text);
      if (numbers.empty()) continue;
      const auto chosen = static_cast<size_t>(rng.below(static_cast<int64_t>(numbers.size())));
      for (size_t n = 0; n < numbers.size(); ++n) {
        if (i >= kThorough && n != chosen) continue;
        const FieldNumber& at = numbers[n];
        const std::string old = file.text.substr(at.begin, at.size),
                          now = std::to_string(std::stoll(old) + rng.between(1, 3));
        std::string mutant = file.text;
        mutant.replace(at.begin, at.size, now);
        put(file.path, mutant);
        Fate& fate = fates[file.path + ": " + at.field];
        try {
          const planner::Arrangement other = read();
          EXPECT_EQ(other.batch(), plan->batch);
          const bool same = planner::to_string(other) == planner::to_string(sent) && planner::rank_order(other) == planner::rank_order(sent);
          ++(same ? fate.silent : fate.others);
          if (same) fate.example = old + " -> " + now;
        } catch (const UserError& e) {
          EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos);
          ++fate.refused;
        }
      }
      put(file.path, file.text);
    }
  }
  for (const auto& [field, fate] : fates)
    std::printf("%-12s %-60s %6d refused %6d other %6d silent %s\n", GetParam(), field.c_str(), fate.refused, fate.others, fate.silent, fate.example.c_str());
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
// checks (tests/exports/check_peers.py).
TEST(Exports, WritesRandomPlansForPeers) {
  const char* to = std::getenv("MOTLEY_EXPORT_TO");
  if (!to) GTEST_SKIP() << "MOTLEY_EXPORT_TO is not set";
  for (const Exporter& exporter : exporters()) {
    RandomPlans random(exporter.target);
    for (int i = 0; i < cases(); ++i) {
      std::string reason;
      const std::unique_ptr<Plan> plan = random.plan(3, i);
      write_directory(export_plan(*plan, exporter, &reason),
                      fmt::format("{}/{}/{}", to, exporter.target, i), true);
      ASSERT_EQ(reason, "");
    }
  }
}

}  // namespace
}  // namespace motley
