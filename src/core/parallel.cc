#include "core/parallel.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace motley {

int threads_of(int threads) {
  return threads > 0 ? threads : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

void parallel_for(int n, int threads, const std::function<void(int)>& body) {
  threads = std::min(threads_of(threads), n);
  std::atomic<int> next = 0;
  std::atomic<bool> failed = false;
  std::mutex mutex;
  std::exception_ptr exception;
  const auto work = [&] {
    for (int i = next++; i < n && !failed; i = next++) try {
        body(i);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!failed) exception = std::current_exception();
        failed = true;
      }
  };
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t) others.emplace_back(work);
  work();
  for (std::thread& t : others) t.join();
  if (exception) std::rethrow_exception(exception);
}

}  // namespace motley
