// A thread that does what it is given, in order: the collectives of a device that travel while it
// computes. Every rank gives its own the same collectives in the same order. On a CUDA device it has
// a stream of its own: work begins when what the caller's stream had been given is done, and who
// waits for it holds up his stream, not himself, until it is done.
#pragma once

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "comm/communicator.h"
#include "comm/moment.h"

namespace motley {

class Background {
 public:
  explicit Background(at::Device device = at::kCPU);
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

  // A tensor that one stream made and the other uses is not given away before both are done.
  void keep(const at::Tensor& tensor) const;
  void keep_for_caller(const at::Tensor& tensor) const;

  // Seconds of work so far.
  double worked();

 private:
  void run();

  at::Device device_;
  std::optional<c10::Stream> stream_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  int64_t started_ = 0, done_ = 0;
  std::map<int64_t, Moment> over_;  // by number, on the device
  double worked_ = 0;
  bool ending_ = false;
  std::exception_ptr failure_;
  std::thread thread_;
};

// What a background does, as a message, and what is left to do then.
std::unique_ptr<Message> message_of(Background& background, int64_t number,
                                    std::function<void()> then = nullptr);

}  // namespace motley
