// motley run: trains by a plan, on workers started here or by another launcher.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace motley {

class Command;

struct RunOptions {
  std::string plan;  // file
  int64_t steps = 10;
  std::string data, checkpoint;
  uint64_t seed = 0;
  double learning_rate = 0, clip = 0;
  int64_t checkpoint_every = 0;
  int checkpoint_keep = 3;
  bool emulate = false;
  std::string profile;          // file; empty: the numbers in the plan
  std::string device = "auto";  // or cpu, cuda
  std::string overlap = "on";   // or off: collectives are waited for where they stand
  int threads = 1;              // of each local worker
  bool json = false;
  bool elastic = false;           // goes on without workers that are lost (elastic.h)
  double return_after_s = 0;      // until a lost device is tried again; 0: never
  std::string replan = "advise";  // or auto: goes on by another plan when a device is slow
  double hang_s = 0;              // how long a worker may say nothing; 0: as store.h has it

  // The command line that gives these options, for workers.
  std::vector<std::string> arguments() const;
};

// Reads and checks the plan, then trains: as a worker if a launcher started this process, on local
// workers otherwise. Rank 0 prints progress on standard error and the result on standard output.
// Throws UserError for what the user can fix.
void run_command(const RunOptions& options);

void add_run_command(Command app);

}  // namespace motley
