// Whether this worker does anything. One whose training thread sleeps for ever, in a data loader whose
// file never comes, still says by the watch (store.h) that it is there, and all others wait for it.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <map>

namespace motley {

// While one lives, this process waits for other workers.
class WaitsForOthers {
 public:
  WaitsForOthers();
  ~WaitsForOthers();
  WaitsForOthers(const WaitsForOthers&) = delete;
  WaitsForOthers& operator=(const WaitsForOthers&) = delete;
};

// What this process does, for one thread of it that looks once in a while.
class Activity {
 public:
  // How long it has waited for others by now, or done nothing: neither it nor a process that it
  // started computes for a hundredth of the time, waits for a disk, reads or writes 100 KB a second, or
  // wakes up once a second (its main thread; others poll for ever). Processes that get a processor
  // only when nobody wants it do not count.
  struct Now {
    std::chrono::milliseconds waiting{0}, idle{0};
  };
  Now look();

 private:
  // Counters that grow by what is done.
  struct Done {
    std::map<pid_t, int64_t> wakes;  // of the main thread of each process
    double seconds = 0;              // of processors
    int64_t bytes = 0;               // read and written
    bool busy = false;               // a thread waits for a disk, or a main thread runs
  };
  static Done done();

  using Time = std::chrono::steady_clock::time_point;
  Time looked_{}, since_{};  // since_: what it did last; of done_
  int64_t turns_ = -1;       // of WaitsForOthers, begun and ended
  Done done_;
};

}  // namespace motley
