// Time as a device sees it: its CPU time where it is emulated, else wall time.
#pragma once

#include <ATen/ATen.h>
#include <ATen/detail/CUDAHooksInterface.h>

#include <algorithm>
#include <ctime>
#include <optional>
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

// Seconds of one call, over about `budget` seconds and at least twice.
template <typename F>
Seconds seconds_per_call(DeviceClock& watch, Seconds budget, F call) {
  call();
  watch.begin();
  std::vector<double> times;
  const Seconds start = wall_clock();
  while (times.size() < 2 || (wall_clock() - start < budget && times.size() < 2000)) {
    const Seconds before = watch.now();
    call();
    times.push_back(watch.now() - before);
    watch.worked();
  }
  watch.rest();
  return watch.typical(times);
}

}  // namespace motley
