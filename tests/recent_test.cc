// Going on from what workers left in memory: any plan from any plan's pieces, without some of them.
#include "runtime/recent.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>

#include "core/error.h"
#include "core/file.h"
#include "planner/program_plan.h"
#include "random_pipeline.h"
#include "runtime/trainer.h"
#include "two_speeds.h"
#include "zoo/module.h"

namespace motley {
namespace {

struct Folder {
  std::string path;
  Folder() {
    std::string name = std::filesystem::temp_directory_path() / "motley-recent-XXXXXX";
    path = mkdtemp(name.data());
  }
  ~Folder() { std::filesystem::remove_all(path); }
};

std::vector<StepReport> train_threads(const Plan& plan, const TrainOptions& options,
                                      int64_t steps) {
  std::vector<StepReport> reports;
  run_thread_group(plan.cluster.size(), [&](Communicator& group) {
    const RunReport report = train(plan, group, options, steps);
    if (group.rank() == 0) reports = report.steps;
  });
  return reports;
}

TEST(Recent, AnyPlanGoesOnWithTheLossesOfAnUndisturbedRun) {
  const DefaultDType default_type(DType::f64);
  Rng rng(5);
  int covered = 0, anew = 0;
  for (int trial = 0; trial < 9; ++trial) {
    RandomPipeline what = {"gpt:layers=2,hidden=16,heads=4,seq=6,vocab=11,dropout=0.1", 2};
    if (trial % 3 == 1) what = {"mlp:layers=4,hidden=12,in=10,classes=7", 3};
    what.dtype = DType::f64;
    auto any_plan = [&] {
      RandomPipeline kind = what;
      const auto k = rng.below(5);
      kind.zero = k == 0;
      kind.pieces = k == 1;
      kind.shared = k == 2;
      kind.reductions = k == 3;
      return random_pipeline(kind, &rng);
    };
    const Plan first = any_plan();
    auto of_same_batch = [&] {
      for (;;)
        if (Plan plan = any_plan(); plan.batch == first.batch) return plan;
    };
    const Plan second = of_same_batch(), third = of_same_batch();
    const Folder folder;
    TrainOptions options;
    options.seed = static_cast<uint64_t>(trial);
    const std::vector<StepReport> expected = train_threads(first, options, 7);
    options.recent = folder.path;
    train_threads(first, options, 3);
    remove_recent(folder.path, 0, static_cast<int>(rng.below(first.cluster.size())));
    options.attempt = 1;
    const std::vector<StepReport> between = train_threads(second, options, 5);
    remove_recent(folder.path, 1, static_cast<int>(rng.below(second.cluster.size())));
    // A machine with most of the devices.
    for (int r = 1; trial % 3 == 0 && r < std::max(first.cluster.size(), second.cluster.size());
         ++r)
      for (const int attempt : {0, 1}) remove_recent(folder.path, attempt, r);
    options.attempt = 2;
    run_thread_group(third.cluster.size(), [&](Communicator& group) {
      const Trainer trainer(third, group, options);
      if (group.rank() == 0) (trainer.next() > 0 ? covered : anew)++;
    });
    const std::vector<StepReport> all = train_threads(third, options, 7);
    ASSERT_EQ(all.size(), 7U);
    for (size_t i = 0; i < all.size(); ++i) {
      EXPECT_EQ(all[i].step, static_cast<int64_t>(i));
      EXPECT_NEAR(all[i].loss, expected[i].loss, 1e-9 * std::abs(expected[i].loss)) << trial;
    }
  }
  EXPECT_GT(covered, 2);
  EXPECT_GT(anew, 2);
}

// One program that keeps what is cut twice, in double precision.
Plan plan_kept_twice(const std::string& model, const std::string& strategy, const Cluster& cluster,
                     Optimizer optimizer) {
  planner::ProgramRequest request;
  request.model = model;
  request.batch = 12;
  request.baselines = false;
  request.strategy = strategy;
  request.alternation.optimizer = optimizer;
  request.alternation.redundancy = cluster.size() > 1 ? 1 : 0;
  request.alternation.memory_limit = false;
  request.alternation.certify = false;
  planner::ProgramResult result =
      planner::plan_program(canonicalize(capture(model, 12, DType::f64).graph), cluster, request);
  MOTLEY_CHECK(result.feasible, "{}", result.reason);
  return std::move(result.plan);
}

// Whichever worker is lost, nobody needs a checkpoint: the others have all of the last step.
TEST(Recent, AnyOneWorkerMayBeLostWhereStateIsKeptTwice) {
  const DefaultDType default_type(DType::f64);
  Rng rng(7);
  const char* strategies[] = {"zero", "tensor-parallel", "zero"};
  const char* models[] = {"gpt:layers=2,hidden=16,heads=4,seq=6,vocab=11,dropout=0.1",
                          "mlp:layers=4,hidden=12,in=10,classes=7",
                          "resnet50:width=4,image=32,classes=5"};
  int lacking = 0;
  for (int trial = 0; trial < 9; ++trial) {
    const std::string model = models[trial % 3];
    const auto optimizer = static_cast<Optimizer::Kind>(trial / 3);
    const auto plan_on = [&](int fast, int slow) {
      return plan_kept_twice(model, strategies[rng.below(3)], cluster_of(fast, slow, 1e9),
                             optimizer);
    };
    const Plan first = plan_on(2, static_cast<int>(1 + rng.below(2))), second = plan_on(2, 1),
               third = plan_on(1, static_cast<int>(rng.below(2)));
    const Folder folder;
    TrainOptions options;
    options.seed = static_cast<uint64_t>(trial);
    options.clip = trial % 2;
    const std::vector<StepReport> expected = train_threads(
        plan_kept_twice(model, "dp-ev", cluster_of(1, 0, 1e9), optimizer), options, 7);
    options.recent = folder.path;
    train_threads(first, options, 3);
    remove_recent(folder.path, 0, static_cast<int>(rng.below(first.cluster.size())));
    const auto next_of = [&](const Plan& plan) {
      int64_t next = -1;
      run_thread_group(plan.cluster.size(), [&](Communicator& group) {
        const Trainer trainer(plan, group, options);
        if (group.rank() == 0) next = trainer.next();
      });
      return next;
    };
    options.attempt = 1;
    EXPECT_EQ(next_of(second), 3) << trial;
    train_threads(second, options, 5);
    const int lost = static_cast<int>(rng.below(second.cluster.size()));
    remove_recent(folder.path, 1, lost);
    options.attempt = 2;
    EXPECT_EQ(next_of(third), 5) << trial;
    const std::vector<StepReport> all = train_threads(third, options, 7);
    ASSERT_EQ(all.size(), 7U);
    // Batch normalisation of few samples makes rounding grow, undisturbed too.
    const double most = trial % 3 == 2 ? 1e-5 : 1e-9;
    for (size_t i = 0; i < all.size(); ++i)
      EXPECT_NEAR(all[i].loss, expected[i].loss, most * std::abs(expected[i].loss)) << trial;
    // Two lost at once are one too many, where they had the copies of one another.
    remove_recent(folder.path, 1, (lost + 1) % 3);
    remove_recent(folder.path, 2, 0);
    remove_recent(folder.path, 2, 1);
    options.attempt = 3;
    lacking += next_of(third) < 5;
  }
  EXPECT_GT(lacking, 0);
}

// Memory may be full when there is something to say of a step.
TEST(Recent, ThereIsRoomForLossesFromTheBeginning) {
  const Folder folder;
  const Recent recent(folder.path, 0, 1);
  struct stat file {};
  ASSERT_EQ(stat((folder.path + "/attempt-0/losses-1").c_str(), &file), 0);
  EXPECT_EQ(file.st_size, 0);
  EXPECT_GE(file.st_blocks * 512, 1 << 16);
}

TEST(Recent, TornAndForeignFilesAreNotTaken) {
  const DefaultDType default_type(DType::f64);
  Rng rng(6);
  RandomPipeline what = {"mlp:layers=4,hidden=12,in=10,classes=7", 3};
  what.dtype = DType::f64;
  what.plain = true;
  const Plan plan = random_pipeline(what, &rng);
  for (const char* damage : {"", "half", "nonsense"}) {
    const Folder folder;
    TrainOptions options;
    options.recent = folder.path;
    const std::vector<StepReport> expected = train_threads(plan, {}, 6);
    train_threads(plan, options, 4);
    for (const auto& entry :
         std::filesystem::directory_iterator(folder.path + "/attempt-0/step-4")) {
      const auto size = entry.file_size();
      if (std::string(damage) == "half") std::filesystem::resize_file(entry.path(), size / 2);
      if (std::string(damage) == "nonsense") write_file(entry.path(), std::string(size, 'x'));
    }
    options.attempt = 1;
    int64_t next = -1;
    run_thread_group(plan.cluster.size(), [&](Communicator& group) {
      const Trainer trainer(plan, group, options);
      if (group.rank() == 0) next = trainer.next();
    });
    EXPECT_EQ(next, *damage == 0 ? 4 : 3) << damage;
    options.attempt = 2;
    const std::vector<StepReport> all = train_threads(plan, options, 6);
    ASSERT_EQ(all.size(), 6U);
    for (size_t i = 0; i < all.size(); ++i)
      EXPECT_NEAR(all[i].loss, expected[i].loss, 1e-9 * std::abs(expected[i].loss)) << damage;
  }
}

}  // namespace
}  // namespace motley
