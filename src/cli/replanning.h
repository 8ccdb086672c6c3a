// motley run --elastic --replan auto: a device that turns out to be slower than planned gets less.
//
// Rank 0 leaves a note of each device that is named (runtime/slow_devices.h). The launcher plans for the
// speed that it has now, while training goes on. Once that saves more than planning and starting the
// workers again cost, over as long as the run took so far or will take, whichever is less, it stops the
// workers and goes on by that plan from the last step, as after a loss.
#pragma once

#include <chrono>
#include <cstdint>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/part_planner.h"
#include "plan/plan.h"

namespace motley {

struct SlowNote {
  int64_t step = 0;       // behind which it was named
  int64_t made = 0;       // steps of this run so far
  int worker = 0;         // of the attempt
  double factor = 1;      // how many times as long it computes
  Seconds startup_s = 0;  // that the attempt took until its first step was over
  Seconds step_s = 0;     // that its steps took in the mean
};

// Into a file of an attempt in `folder`. Throws nothing: a note that cannot be written is none.
void leave_note(const std::string& folder, int attempt, const SlowNote& note);
// Those that are whole, in order.
std::vector<SlowNote> notes_of(const std::string& folder, int attempt);

class Replanning {
 public:
  // `plans`: a folder for plans.
  Replanning(const Plan& plan, std::string plans);
  ~Replanning() { stop(); }
  Replanning(const Replanning&) = delete;
  Replanning& operator=(const Replanning&) = delete;

  // What the workers of an attempt do: they leave notes in `notes` and make all of `steps` steps by the plan
  // in `file`, on the devices `used` of the `devices` that are left.
  struct Attempt {
    std::string notes;
    int number = 0;
    std::string file;
    std::vector<int> devices, used;
    int64_t steps = 0;
  };
  void follow(Attempt attempt);
  // Whether to go on by another plan, result(). Returns at once; to be asked again and again.
  bool worth_it();
  // Nothing is planned any more.
  void stop();

  struct Result {
    PartPlanner::Found plan;
    SlowNote note;
    Seconds before = 0;  // a step by the plan of the attempt, at the speed of now
    Seconds planning_s = 0;
  };
  const Result& result() const { return *result_; }
  // With the speed of now. REQUIRES: stop() was called.
  const Cluster& cluster() const { return cluster_; }

 private:
  Result search(const SlowNote& note, const Cluster& cluster) const;
  bool pays() const;

  const Plan& plan_;
  std::string plans_;
  Cluster cluster_;
  int searches_ = 0;
  Attempt attempt_;
  size_t seen_ = 0;  // notes
  std::unique_ptr<PartPlanner> planner_;
  std::future<Result> running_;
  std::chrono::steady_clock::time_point noted_{};
  std::optional<Result> result_;
};

}  // namespace motley
