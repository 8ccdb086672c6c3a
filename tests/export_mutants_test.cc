// One number of an exported file changed: what import makes of it, by field. Every change is refused,
// or another plan within the target's rules, or of a field that says nothing of the plan; those are
// listed here and, with reasons, in docs/export.md.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>

#include "core/error.h"
#include "export/export.h"
#include "export_fields.h"
#include "random_arrangement.h"

namespace motley {
namespace {

namespace fs = std::filesystem;

// Fields whose numbers say nothing of the plan, or not always: "file: field".
const char* const kFree[] = {
    "*: comment",
    "arguments.txt: --eval-iters",
    "arguments.txt: --lr",
    "arguments.txt: --train-iters",
    "ds_config.json: lr",
    "ds_config.json: stage",
    "ds_config.json: steps_per_print",
    "experiment.yaml: CUDA_DEVICE_MAX_CONNECTIONS",
    "recipe.py: steps",
    "train.toml: description",
    "train.toml: steps",
    "train/train.yaml: lr",
    "train/train.yaml: train_iters",
};

bool is_free(const std::string& file, const std::string& field) {
  return std::any_of(std::begin(kFree), std::end(kFree), [&](const std::string& free) {
    return free == file + ": " + field || free == "*: " + field;
  });
}

// What became of the numbers of a field.
struct Fate {
  int refused = 0, others = 0, silent = 0, written = 0;
  std::string example;  // of a change that is silent
};

// Programs, and the origin of the directory, which is not the framework's.
bool is_read(const ExportedFile& file) {
  return !file.executable && file.path != "motley.json" && file.path != "train.py" &&
         file.path != "model.py" && file.path != "pipeline_module.py";
}

class Mutants : public ::testing::TestWithParam<const char*> {
 public:
  Mutants()
      : exporter_(*find_exporter(GetParam())),
        folder_(fs::temp_directory_path() / fmt::format("motley_{}.{}", GetParam(), getpid())),
        directory_(folder_.string()) {
    if (const char* to = std::getenv("MOTLEY_MUTANTS_TO")) accepted_ = to;
  }
  ~Mutants() override { fs::remove_all(folder_); }

  // Without the care of write_directory(), which takes its time.
  void put(const std::string& file, const std::string& text) const {
    fs::create_directories(fs::path(directory_.name(file)).parent_path());
    std::ofstream(directory_.name(file)) << text;
  }

  planner::Arrangement read(const Plan& plan) const {
    planner::PlanOptions step;
    step.batch = plan.batch;
    step.optimizer = plan.optimizer;
    step.precision = plan.precision;
    return import_arrangement(directory_, exporter_, plan.cluster, *plan.graph, step);
  }

  // Changes one number of a file.
  void change(const Plan& plan, const planner::Arrangement& sent, const ExportedFile& file,
              const FieldNumber& at, const std::string& now) {
    const std::string old = file.text.substr(at.begin, at.size);
    std::string mutant = file.text;
    mutant.replace(at.begin, at.size, now);
    put(file.path, mutant);
    Fate& fate = fates_[{file.path, at.field}];
    const std::string what = fmt::format("{}: {}: {} -> {}", file.path, at.field, old, now);
    try {
      const planner::Arrangement other = read(plan);
      EXPECT_EQ(other.batch(), plan.batch);
      const bool same = planner::to_string(other) == planner::to_string(sent) &&
                        planner::rank_order(other) == planner::rank_order(sent) &&
                        other.shares == sent.shares;
      ++(same ? fate.silent : fate.others);
      if (same) fate.example = what;
      keep(what, &fate);
    } catch (const UserError& e) {
      const std::string message = e.what();
      EXPECT_EQ(message.find('\n'), std::string::npos) << message;
      EXPECT_THAT(message, ::testing::HasSubstr(folder_.string())) << what;
      ++fate.refused;
    }
    put(file.path, file.text);
  }

  // For the framework's own check: what it refuses should not have been accepted here.
  void keep(const std::string& what, Fate* fate) {
    constexpr int kOfEach = 12;
    if (accepted_.empty() || fate->written >= kOfEach) return;
    ++fate->written;
    const fs::path to = fs::path(accepted_) / GetParam() / std::to_string(kept_++);
    fs::create_directories(to);
    fs::copy(folder_, to, fs::copy_options::recursive | fs::copy_options::overwrite_existing);
    std::ofstream(to / "mutant.txt") << what << "\n";
  }

 protected:
  const Exporter& exporter_;
  const fs::path folder_;
  const ExportDirectory directory_;
  std::string accepted_;
  int kept_ = 0;
  std::map<std::pair<std::string, std::string>, Fate> fates_;  // by file and field
};

// Plans without their programs, a thousand for the frameworks' own checks: what is written is taken by
// the target's rules as they are known here, and means the same. Of each one number of every file is
// changed, of the first ones every number, by several amounts.
TEST_P(Mutants, WrongNumbersAreRefusedByField) {
  constexpr int kThorough = 8;
  const int outlines = accepted_.empty() ? 200 : 1000;
  RandomPlans random(GetParam());
  for (int i = 0; i < outlines; ++i) {
    SCOPED_TRACE(fmt::format("case {}", i));
    planner::Arrangement sent;
    const std::unique_ptr<Plan> plan = random.outline(6, i, &sent);
    const DType precisions[] = {DType::f32, DType::bf16, DType::f16};
    plan->precision = precisions[i % 3];
    if (i % 5 == 0) plan->optimizer = Optimizer::sgd;
    std::string reason;
    const Exported exported = export_arrangement(*plan, sent, exporter_, &reason);
    ASSERT_EQ(reason, "");
    fs::remove_all(folder_);
    for (const ExportedFile& file : exported.files) put(file.path, file.text);
    const planner::Arrangement came = read(*plan);
    ASSERT_EQ(planner::to_string(sent), planner::to_string(came));
    ASSERT_EQ(planner::rank_order(sent), planner::rank_order(came));
    Rng rng(static_cast<uint64_t>(i));
    for (const ExportedFile& file : exported.files) {
      if (!is_read(file)) continue;
      const std::vector<FieldNumber> numbers = numbers_of(file.path, file.text);
      if (numbers.empty()) continue;
      const auto chosen = static_cast<size_t>(rng.below(static_cast<int64_t>(numbers.size())));
      for (size_t n = 0; n < numbers.size(); ++n) {
        if ((i >= kThorough && n != chosen) || numbers[n].field == "program") continue;
        const int64_t old = std::stoll(file.text.substr(numbers[n].begin, numbers[n].size));
        const int64_t values[] = {old + rng.between(1, 3), old * 2, old - 1};
        for (const int64_t now : values)
          if (now >= 0 && now != old && (now == values[0] || i % 2 == 0))
            change(*plan, sent, file, numbers[n], std::to_string(now));
      }
    }
  }
  int refused = 0, others = 0, silent = 0;
  for (const auto& [field, fate] : fates_) {
    const std::string name = field.first + ": " + field.second;
    refused += fate.refused, others += fate.others, silent += fate.silent;
    EXPECT_TRUE(fate.silent == 0 || is_free(field.first, field.second)) << fate.example;
    std::printf("%-10s %-58s %5d refused %5d other plans %5d silent\n", GetParam(), name.c_str(),
                fate.refused, fate.others, fate.silent);
  }
  std::printf("%-10s %d numbers refused, %d other plans, %d say nothing of the plan\n", GetParam(),
              refused, others, silent);
  EXPECT_GT(refused, others);
}

INSTANTIATE_TEST_SUITE_P(All, Mutants,
                         ::testing::Values("ddp", "deepspeed", "flagscale", "fsdp2", "galvatron",
                                           "megatron", "torchtitan"),
                         [](const auto& target) { return std::string(target.param); });

TEST(FreeFields, AreDocumented) {
  const std::string path = std::string(MOTLEY_SOURCE_DIR) + "/docs/export.md";
  const std::string text = read_file(path);
  for (const std::string free : kFree)
    EXPECT_THAT(text, ::testing::HasSubstr("`" + free.substr(free.find(": ") + 2) + "`"));
}

}  // namespace
}  // namespace motley
