// A backend of c10d for tests: the ranks are threads, nothing is sent, and it does the worst that c10d allows.
//
//   inputs are read, and outputs written, when the work is done and not when it is asked for; until then outputs hold
//     NaN (all bits set), so that whoever touches either before wait() computes nonsense
//   every work takes a random time
//   collectives of one group are done one after the other, in the order in which they were asked for; those of
//     different groups, and messages with tags, in any order
//   a message without tags waits for its receive, and holds up whatever comes behind it between the same two ranks in
//     the same group, in either direction
//   ranks that call different collectives, or tensors of different sizes or types, fail, all of them
//   what it is told to refuse it refuses at once, as c10d's backends do
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/process_group.h"

namespace motley {

struct FakeOptions {
  std::string name =
      "fake";  // "gloo", "nccl": what is known of that one (cluster/backend.h) is taken to be true of this one
  bool tags = false;
  bool messages = true;
  bool all_to_all = true;
  bool uneven_all_to_all = true;
  std::chrono::microseconds longest{300};
  uint64_t seed = 0;
};

// Runs body(communicator of rank r over the fake backend) on `size` threads, as run_thread_group.
void run_fake_group(int size, const FakeOptions& options,
                    const std::function<void(Communicator&)>& body);

}  // namespace motley
