// What workers leave behind after every step, in memory that outlives their processes, so that
// others can go on when one of them is lost:
//
//   FOLDER/attempt-0/step-12/rank-1.pt    pieces that this worker holds after 12 steps
//   FOLDER/attempt-0/losses-1             "12 0.693 ..." a line for each step, as rank 1 saw it
//   FOLDER/begin                          "0" the step at which the first attempt began
//
// The two newest steps of a worker stay: workers are at most one step apart, so that one of them is
// there of all. What a lost device held is gone with its machine, unless another worker has it too;
// whoever starts the next attempt removes its files. A folder of /dev/shm is such memory.
#pragma once

#include <cstdint>
#include <future>
#include <string>
#include <vector>

#include "runtime/checkpoint_folder.h"

namespace motley {

struct StepLoss {
  int64_t step = 0;
  double loss = 0, seconds = 0, gradient_norm = 0;
};

class Recent {
 public:
  Recent(std::string folder, int attempt, int rank);
  ~Recent();  // waits for what is being written
  Recent(const Recent&) = delete;
  Recent& operator=(const Recent&) = delete;

  // Behind `of.step` steps. Written in the background; waits for that of the step before. Where it cannot
  // be written, as on a full disk, a line says so once and training goes on.
  void leave(CheckpointOf of, std::vector<HeldPiece> pieces, const StepLoss& loss);

  // Waits for what is being written.
  void settle();

 private:
  std::string losses() const;  // file
  void reserve();
  void note(const StepLoss& loss);

  std::string folder_;
  int attempt_, rank_;
  int64_t left_ = 0;
  std::future<void> writing_;
  std::vector<int64_t> steps_;  // that are there
  std::string unwritten_;       // losses
  uint64_t noted_ = 0;          // bytes of losses that are written
  uint64_t reserved_ = 0;       // for which there is room
  bool told_ = false;
};

// A step of an attempt before, of which pieces are there.
struct RecentStep {
  int attempt = 0;
  int64_t step = 0;
};
// Those of attempts before `attempt`, the best to go on from first.
std::vector<RecentStep> recent_steps(const std::string& folder, int attempt);
// Puts together what is there. Files that cannot be read are as if they were not there.
void read_recent(const std::string& folder, const RecentStep& from, Assembly* assembly);
// Of steps before `step`, from all workers of attempts before `attempt`, in order.
std::vector<StepLoss> recent_losses(const std::string& folder, int attempt, int64_t step);
// What the first attempt leaves for those after it: at which step it began.
std::string begin_file(const std::string& folder);
// Files of attempts before `attempt`, as names in the folder: pieces, losses, and at which step the first began.
std::vector<std::string> recent_files(const std::string& folder, int attempt);
// The files of a device that is lost.
void remove_recent(const std::string& folder, int attempt, int rank);

}  // namespace motley
