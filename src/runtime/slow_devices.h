// Which devices are slower than planned, while they train.
//
//   step 40: device 2 computes 2.1 times as long as planned
//
// Every device measures how long it computes in a step, without waiting. The share of that in what the plan says, divided by the
// same of the others, is what counts: a batch that takes all of them longer, or predictions that are off alike, name nobody. A
// device is named when for 13 steps it is a third above what it was in its first steps, or half above the plan, where the plan is
// right about the others. What lasts for a step or two is noise, and so are steps of a few milliseconds.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <deque>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "core/fault.h"
#include "core/units.h"
#include "plan/plan.h"

namespace motley {

struct SlowDevice {
  int device = 0;
  double factor = 1;    // how many times as long as planned, or as before
  bool before = false;  // as before: it became slower
};

class SlowDevices {
 public:
  // [device] what it is said to compute in a step. One that computes next to nothing is left out.
  explicit SlowDevices(std::vector<Seconds> planned);
  // A step more: [device] how long it computed. Those that are named now; once, until they are well again.
  std::vector<SlowDevice> step(const std::vector<Seconds>& measured);

 private:
  struct Device {
    std::deque<double> shares;  // of the newest steps, beside the others
    std::deque<double> alone;   // the same, not beside the others
    double usual = 0;           // in its first steps; 0: not known yet
    bool named = false;
  };
  bool trusted(size_t device) const;

  std::vector<Seconds> planned_;
  std::vector<Device> devices_;
  int steps_ = 0;
};

// How long this device computes, between before() and after() of its instructions (ExecutorOptions).
class ComputeClock {
 public:
  void before() { began_ = std::chrono::steady_clock::now(); }
  // `padded`: a Padding makes it as slow as a fault says (MOTLEY_FAULTS), and not this.
  void after(bool compute, bool padded) {
    if (!compute) return;
    std::chrono::duration<double> took = std::chrono::steady_clock::now() - began_;
    if (const double slowness = fault_slowness(); slowness > 1 && !padded) {
      std::this_thread::sleep_for(took * (slowness - 1));
      took *= slowness;
    }
    seconds_ += took.count();
  }
  // Since it was taken last.
  Seconds take() { return std::exchange(seconds_, 0); }

 private:
  std::chrono::steady_clock::time_point began_;
  Seconds seconds_ = 0;
};

// The same over the workers of a plan, which tell one another every few steps.
class SlowDeviceWatch {
 public:
  SlowDeviceWatch(const Plan& plan, int rank);
  // Behind a step in which this device computed so long. Collective in every kTold-th step: `sum` adds a tensor up over all
  // workers, on the CPU. The same on all of them.
  template <typename Sum>
  std::vector<SlowDevice> step(Seconds computed, const Sum& sum) {
    const std::optional<at::Tensor> row = note(computed);
    if (!row) return {};
    sum(*row);
    return told(*row);
  }
  static constexpr int kTold = 5;

 private:
  std::optional<at::Tensor> note(Seconds computed);
  std::vector<SlowDevice> told(const at::Tensor& all);

  SlowDevices devices_;
  size_t rank_, size_;
  std::vector<Seconds> own_;
};

}  // namespace motley
