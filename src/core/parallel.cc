#include "core/parallel.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>

namespace motley {

namespace {

// Threads that wait for work between loops: a new thread often begins on the core of the one that
// made it, milliseconds late, while others are idle.
class Workers {
 public:
  static Workers& all() {
    static Workers*& only = *[] {
      static Workers* workers = new Workers;  // never deleted: threads wait on it until the end
      // A forked process has none of the threads.
      pthread_atfork(nullptr, nullptr, [] { workers = new Workers; });
      return &workers;
    }();
    return *only;
  }

  void make(int threads) {
    const std::lock_guard lock(mutex_);
    while (made_ < threads && start()) ++made_;
  }

  // Calls work() here, and at the same time on up to `others` threads: on fewer if all is done
  // before they begin. REQUIRES: work() throws nothing.
  void run(int others, const std::function<void()>& work) {
    if (others <= 0) return work();
    Loop loop{&work, others, 0};
    {
      const std::lock_guard lock(mutex_);
      open_.push_back(&loop);
      wanted_ += others;
      while (made_ < busy_ + wanted_ && start()) ++made_;
    }
    wake_.notify_all();
    work();
    std::unique_lock lock(mutex_);
    if (loop.wanted > 0) open_.erase(std::find(open_.begin(), open_.end(), &loop));
    wanted_ -= loop.wanted;
    over_.wait(lock, [&] { return loop.working == 0; });
  }

 private:
  struct Loop {
    const std::function<void()>* work;
    int wanted;   // threads that may still begin
    int working;  // threads that have begun
  };

  bool start() {
    try {
      std::thread([this] { serve(); }).detach();
      return true;
    } catch (const std::system_error&) {
      return false;  // then those that there are do all
    }
  }

  void serve() {
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [&] { return !open_.empty(); });
      Loop& loop = *open_.front();
      if (--loop.wanted == 0) open_.pop_front();
      --wanted_;
      ++loop.working;
      ++busy_;
      lock.unlock();
      (*loop.work)();
      lock.lock();
      --busy_;
      if (--loop.working == 0) over_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, over_;
  std::deque<Loop*> open_;  // that threads may still begin with, the first first
  int wanted_ = 0;          // of these
  int made_ = 0, busy_ = 0;
};

}  // namespace

int threads_of(int threads) {
  return threads > 0 ? threads : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

void start_threads(int threads) { Workers::all().make(threads_of(threads) - 1); }

void parallel_for(int n, int threads, const std::function<void(int)>& body) {
  std::atomic<int> next = 0;
  std::atomic<bool> failed = false;
  std::mutex mutex;
  std::exception_ptr exception;
  Workers::all().run(std::min(threads_of(threads), n) - 1, [&] {
    for (int i = next++; i < n && !failed; i = next++) try {
        body(i);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!failed) exception = std::current_exception();
        failed = true;
      }
  });
  if (exception) std::rethrow_exception(exception);
}

}  // namespace motley
