// A thread that does what it is given, in order: the collectives of a device that travel while it
// computes. Every rank gives its own the same collectives in the same order.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

namespace motley {

class Background {
 public:
  Background();
  // Waits for what is under way; what has not begun is left.
  ~Background();
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  // Starts work, with the caller's thread-local state of torch, behind all that was started before.
  // Returns its number.
  int64_t start(std::function<void()> work);
  // Until that work is done. Throws what it, or work before it, threw; then no more is begun.
  void wait(int64_t number);
  void wait_all();
  bool idle();

  // Seconds of work so far.
  double worked();

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  int64_t started_ = 0, done_ = 0;
  double worked_ = 0;
  bool ending_ = false;
  std::exception_ptr failure_;
  std::thread thread_;
};

}  // namespace motley
