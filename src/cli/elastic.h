// motley run --elastic: a run that goes on when workers are lost.
//
// Every worker leaves its pieces in memory after each step (runtime/recent.h). When a worker is
// killed, ends without a word or hangs, the others are stopped; its files are removed, as its machine
// would be gone; a plan for the devices that are left is made, and workers for it are started, which
// put the pieces together and go on. Where pieces of the lost device are nowhere else, they go on
// from the last checkpoint, or from the beginning. The batch and the order of samples stay, so losses
// are those of one device.
//
// Plans for the loss of each device are made beforehand, by a process that gets the cores only when
// nobody else wants them.
#pragma once

#include <optional>
#include <string>

#include "cli/run_command.h"
#include "comm/launch.h"
#include "plan/plan.h"

namespace motley {

// Trains by `plan`, whose workers `launch` describes. Throws as launch_workers; std::runtime_error
// with one line where no plan fits the devices that are left.
void launch_elastic(const RunOptions& options, const Plan& plan, const LaunchOptions& launch);

// In a worker of an elastic run: where its pieces go, and how often workers were lost before.
struct Attempt {
  std::string folder;
  int number = 0;
};
std::optional<Attempt> attempt_of_worker();

}  // namespace motley
