// Carries Ethernet frames between pairs of TAP devices, each after a delay, in order.
//
// One thread serves all pairs. It reads whatever a device sends and writes it to the other after
// the delay; rates are limited before it, by the devices' queues. Frames keep their offload
// headers, so that one system call moves up to 64 KiB.
#pragma once

#include <memory>
#include <string>

#include "core/units.h"

namespace motley {

// A new TAP device of the calling thread's network namespace. Negative: -errno.
int open_tap(const std::string& name);

class Relay {
 public:
  Relay();
  ~Relay();  // stops the thread and closes the devices
  // Takes the descriptors over. REQUIRES: not started.
  void join(int a, int b, Seconds delay);
  void start();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace motley
