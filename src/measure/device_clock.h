// Time as a device sees it: its CPU time where it is emulated, else wall time; the times between
// events on a stream.
#pragma once

#include <ATen/ATen.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <optional>
#include <utility>
#include <vector>

#include "core/median.h"
#include "measure/fit.h"
#include "runtime/emulate.h"

namespace motley {

inline Seconds seconds_of(clockid_t clock) {
  timespec t;
  clock_gettime(clock, &t);
  return static_cast<Seconds>(t.tv_sec) + 1e-9 * static_cast<Seconds>(t.tv_nsec);
}
inline Seconds wall_clock() { return seconds_of(CLOCK_MONOTONIC); }

class DeviceClock {
 public:
  DeviceClock(double speed, at::Device device) : speed_(speed), device_(device) {
    if (speed > 0) padding_.emplace(speed);
  }
  bool has_stream() const { return device_.is_cuda(); }
  Seconds now() const {
    if (speed_ > 0) return seconds_of(CLOCK_THREAD_CPUTIME_ID) / speed_;
    if (device_.is_cuda()) at::detail::getCUDAHooks().deviceSynchronize(device_.index());
    return wall_clock();
  }
  void worked(const void* work = nullptr) {
    if (padding_) padding_->after(true, work);
  }
  // Of repeated measurements of the same work: an emulated device takes the least (emulate.h), but
  // for one in twenty and those that took nothing: a virtual machine's clock of CPU time takes back
  // what the host took before.
  double typical(std::vector<double> times) const {
    if (speed_ <= 0) return median(times);
    std::erase_if(times, [](double t) { return t <= 0; });
    std::sort(times.begin(), times.end());
    return times.empty() ? kShortest : times[times.size() / 20];
  }
  void rest() {
    if (padding_) padding_->before(false);
  }
  void begin() {
    if (padding_) padding_->after(false);
  }

 private:
  double speed_;
  at::Device device_;
  std::optional<Padding> padding_;
};

// Moments on the current stream of a device, and the times between them.
class StreamTimes {
 public:
  explicit StreamTimes(at::Device device) : device_(device) {}

  // Whether this libtorch tells times between events.
  static bool known() { return tells<c10::Event>(); }
  void mark() {
    events_.emplace_back(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
    events_.back().record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  }
  // [mark but the first] Seconds since the one before it; waits for the last, and forgets all.
  std::vector<double> between() { return between_of(std::exchange(events_, {})); }

 private:
  template <typename Event>
  static constexpr bool tells() {
    return requires(const Event& e) { e.elapsedTime(e), e.synchronize(); };
  }
  template <typename Event>
  static std::vector<double> between_of(const std::vector<Event>& events) {
    std::vector<double> seconds;
    if constexpr (tells<Event>()) {
      if (!events.empty()) events.back().synchronize();
      for (size_t i = 1; i < events.size(); ++i)
        seconds.push_back(1e-3 * events[i - 1].elapsedTime(events[i]));
    }
    return seconds;
  }

  at::Device device_;
  std::vector<c10::Event> events_;
};

// Keeps a device busy while calls are launched, so that these follow one another as they do in
// training, where the machine runs ahead.
class HeadStart {
 public:
  explicit HeadStart(at::Device device) {
    constexpr int64_t kSize = 4096;
    matrix_ = at::ones({kSize, kSize}, at::TensorOptions(device));
    result_ = at::empty_like(matrix_);
    at::mm_out(result_, matrix_, matrix_);
    DeviceClock watch(0, device);
    const Seconds before = watch.now();
    for (int i = 0; i < 4; ++i) at::mm_out(result_, matrix_, matrix_);
    seconds_ = std::max((watch.now() - before) / 4, kShortest);
  }
  void give(Seconds seconds) {
    constexpr double kMost = 500;  // products
    for (double n = std::min(kMost, std::ceil(seconds / seconds_)); n > 0; --n)
      at::mm_out(result_, matrix_, matrix_);
  }

 private:
  at::Tensor matrix_, result_;
  Seconds seconds_;  // of a product
};

// Seconds of one call, over about `budget` seconds and at least twice. A device with streams is
// given several calls at once: who waits for each waits for its launch too.
template <typename F>
Seconds seconds_per_call(DeviceClock& watch, Seconds budget, F call) {
  constexpr int kRun = 20;
  call();
  int run = 1;
  if (watch.has_stream()) {
    const Seconds before = watch.now();
    call();
    run = std::clamp(static_cast<int>(0.02 / std::max(watch.now() - before, 1e-6)), 1, kRun);
  }
  watch.begin();
  std::vector<double> times;
  const Seconds start = wall_clock();
  while (times.size() < 2 || (wall_clock() - start < budget && times.size() < 2000)) {
    const Seconds before = watch.now();
    for (int i = 0; i < run; ++i) call();
    times.push_back((watch.now() - before) / run);
    watch.worked();
  }
  watch.rest();
  return watch.typical(times);
}

}  // namespace motley
