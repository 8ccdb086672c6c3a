// Order between the streams of a device; nothing on the CPU, where calls are over when they return.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>

namespace motley {

// When all is done that the current stream has been given so far.
class Moment {
 public:
  explicit Moment(at::Device device) : device_(device) {
    if (device.is_cpu()) return;
    event_.emplace(device.type());
    event_->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  }
  // What the current stream is given from now on begins after it.
  void hold_up() {
    if (event_) event_->block(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  }

 private:
  at::Device device_;
  std::optional<c10::Event> event_;
};

// As long as it lives, a stream of its own is current in this thread.
class Beside {
 public:
  explicit Beside(at::Device device, std::optional<c10::Stream> stream = {}) {
    if (!device.is_cpu()) guard_.emplace(stream ? *stream : new_stream(device));
  }
  static c10::Stream new_stream(at::Device device) {
    return c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
  }

 private:
  std::optional<c10::StreamGuard> guard_;
};

}  // namespace motley
