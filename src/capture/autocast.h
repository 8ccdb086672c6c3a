// torch.autocast in a capture.
//
// Autocast is a dispatch key of tensors on the CPU or on CUDA devices, above autograd; tensors of a
// capture are on the Meta device and have none. Following stands a key of its own above autograd,
// which casts the operands of an operator as autocast would while it is enabled. To which types,
// libtorch says itself: its autocast kernel is called with empty tensors of the same types on the
// device that the model is on, and stopped when it calls on. Casts of parameters are kept as
// libtorch keeps them.
//
// An operator without an autocast kernel costs one more dispatch, one with it a lookup by the types
// of its operands.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <memory>

namespace motley {

// While it lives, operators on this thread are cast as the thread's autocast state says.
class FollowAutocast {
 public:
  // `device` is where the model's tensors are; Meta: unknown, and either state counts.
  explicit FollowAutocast(at::DeviceType device);
  ~FollowAutocast();
  FollowAutocast(const FollowAutocast&) = delete;
  FollowAutocast& operator=(const FollowAutocast&) = delete;

 private:
  std::unique_ptr<c10::impl::IncludeDispatchKeyGuard> include_;
};

// While it lives, autocast is off on this thread.
using WithoutAutocast = c10::impl::ExcludeDispatchKeyGuard;
std::unique_ptr<WithoutAutocast> without_autocast();

// Forgets casts that are kept; libtorch forgets its own where a region of autocast ends.
void forget_casts();

}  // namespace motley
