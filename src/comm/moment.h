// Order between the streams of a device; nothing on the CPU, where calls are over when they return.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>

#include "interpret/torch_version.h"

namespace motley {

// Whether calls on tensors there are over before their work is.
inline bool has_streams(at::Device device) { return !device.is_cpu() && !device.is_meta(); }

// The tensor on a device. From the CPU it goes by memory that the device reads by itself, so that the
// caller does not wait for it.
inline at::Tensor moved_to(const at::Tensor& tensor, at::Device device) {
  if (!device.is_cuda() || !tensor.is_cpu()) return tensor.to(device);
  return (tensor.is_pinned() ? tensor : tensor.pin_memory())
      .to(device, tensor.scalar_type(), /*non_blocking=*/true);
}

// When all is done that the current stream has been given so far.
class Moment {
 public:
  explicit Moment(at::Device device) : device_(device) {
    if (!has_streams(device)) return;
    event_.emplace(device.type());
    event_->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  }
  // What the current stream is given from now on begins after it.
  void hold_up() {
    if (event_) event_->block(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  }
  // Holds up the caller himself.
  void wait() {
    if (event_) wait_until_done(*event_);
  }

 private:
  at::Device device_;
  std::optional<c10::Event> event_;
};

// As long as it lives, a stream of its own is current in this thread.
class Beside {
 public:
  explicit Beside(at::Device device, std::optional<c10::Stream> stream = {}) {
    if (has_streams(device)) guard_.emplace(stream ? *stream : new_stream(device));
  }
  static c10::Stream new_stream(at::Device device) {
    return c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
  }

 private:
  std::optional<c10::StreamGuard> guard_;
};

}  // namespace motley
