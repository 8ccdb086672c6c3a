// What differs between the versions of libtorch, Debian's 1.13 and 2.4 to 2.x. Nothing else in C++ asks for a version.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <c10/util/C++17.h>
#include <torch/version.h>

#include <algorithm>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/error.h"

#define MOTLEY_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) ||         \
   (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))
#if MOTLEY_TORCH_AT_LEAST(2, 4)
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#endif

namespace motley {

// ---- operators and autograd

#if MOTLEY_TORCH_AT_LEAST(2, 4)
inline bool autocast_enabled(at::DeviceType device) {
  return at::autocast::is_autocast_enabled(device);
}
inline at::ScalarType autocast_type(at::DeviceType device) {
  return at::autocast::get_autocast_dtype(device);
}
// What names a parameter in an optimizer's state.
inline void* optimizer_key(const at::Tensor& parameter) { return parameter.unsafeGetTensorImpl(); }
#else
inline bool autocast_enabled(at::DeviceType device) {
  return device == at::kCUDA ? at::autocast::is_enabled() : at::autocast::is_cpu_enabled();
}
inline at::ScalarType autocast_type(at::DeviceType device) {
  return device == at::kCUDA ? at::autocast::get_autocast_gpu_dtype()
                             : at::autocast::get_autocast_cpu_dtype();
}
inline std::string optimizer_key(const at::Tensor& parameter) {
  return c10::guts::to_string(parameter.unsafeGetTensorImpl());
}
#endif

// Whether custom operators without a backward pass are followed by autograd under a fallback of all
// operators; they are on other devices.
inline constexpr bool kFollowsCustomOperators = TORCH_VERSION_MAJOR >= 2;

// Of a function of the autograd graph.
template <typename Function>
bool has_hooks(Function& function) {
  bool any = !function.pre_hooks().empty() || !function.post_hooks().empty();
  if constexpr (requires { function.tensor_pre_hooks(); })
    any = any || !function.tensor_pre_hooks().empty();
  return any;
}

// Tells the lists of hooks of a tensor of Python, which may be null: listen(list).
template <typename Variable, typename F>
void each_list_of_hooks(Variable& variable, F listen) {
  listen(variable.backward_hooks);
  if constexpr (requires { variable.post_accumulate_grad_hooks; })
    listen(variable.post_accumulate_grad_hooks);
}

// ---- events of devices

// Returns when the event has happened. libtorch 1 can only be asked.
template <typename Event>
void wait_until_done(const Event& event) {
  if constexpr (requires { event.synchronize(); })
    event.synchronize();
  else
    while (!event.query()) std::this_thread::yield();
}

// ---- process groups

using ProcessGroup = c10::intrusive_ptr<c10d::ProcessGroup>;
using WorkHandle = c10::intrusive_ptr<c10d::Work>;

// What ProcessGroupGloo and ProcessGroupNCCL derive from.
#if MOTLEY_TORCH_AT_LEAST(2, 0)
using CollectiveBackend = c10d::Backend;
#else
using CollectiveBackend = c10d::ProcessGroup;
#endif

// A backend as a process group of its members; `device`: of the tensors that it is given.
template <typename Collectives>
ProcessGroup as_process_group(c10::intrusive_ptr<Collectives> backend,
                              [[maybe_unused]] const c10::intrusive_ptr<c10d::Store>& store,
                              [[maybe_unused]] at::DeviceType device) {
  if constexpr (std::is_same_v<Collectives, c10d::ProcessGroup>) {
    return backend;
  } else {
    const int rank = backend->getRank(), size = backend->getSize();
    ProcessGroup group = [&]<typename Made>(Made*) -> c10::intrusive_ptr<Made> {
      if constexpr (std::is_constructible_v<Made, c10::intrusive_ptr<c10d::Store>, int, int>)
        return c10::make_intrusive<Made>(store, rank, size);
      else
        return c10::make_intrusive<Made>(rank, size);
    }(static_cast<c10d::ProcessGroup*>(nullptr));
    [&](auto* made) {
      using Made = std::remove_pointer_t<decltype(made)>;
      made->setBackend(device, Made::BackendType::CUSTOM, std::move(backend));
    }(group.get());
    return group;
  }
}

// A group of torch.distributed by the name under which c10d knows it.
inline ProcessGroup group_named([[maybe_unused]] const std::string& name) {
#if MOTLEY_TORCH_AT_LEAST(2, 4)
  return c10d::resolve_process_group(name);
#else
  throw user_error("python",
                   "groups of torch.distributed need torch 2.4 or newer; leave out backend=");
#endif
}

// Whether works that are started one after another become one. torch 2.4 has nobody to ask.
template <typename Collectives>
bool coalesces(Collectives& backend) {
  if constexpr (requires { backend.supportsCoalescing(); })
    return backend.supportsCoalescing();
  else
    return backend.getBackendName() == "nccl";
}

// Runs post(works), which starts collectives, as one group where the backend groups them, and waits
// for all.
template <typename Group, typename F>
void grouped(Group& group, [[maybe_unused]] at::DeviceType device, F post) {
  std::vector<WorkHandle> works;
  if constexpr (requires { group.endCoalescing(device); }) {
    const auto reached = group.getDeviceTypes();
    const bool groups = std::any_of(reached.begin(), reached.end(),
                                    [&](const auto& there) { return there.type() == device; }) &&
                        coalesces(*group.getBackend(device));
    if (groups) group.startCoalescing(device);
    post(works);
    if (groups) works = {group.endCoalescing(device)};
  } else if constexpr (requires { group.endCoalescing(works); }) {
    group.startCoalescing();
    post(works);
    group.endCoalescing(works);
  } else {
    post(works);
  }
  for (auto& work : works) work->wait();
}

template <typename Group>
WorkHandle all_to_all_of(Group& group, at::Tensor& out, at::Tensor& in,
                         std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes) {
  if constexpr (requires { group.all_to_all_single(out, in, out_sizes, in_sizes); })
    return group.all_to_all_single(out, in, out_sizes, in_sizes);
  else
    return group.alltoall_base(out, in, out_sizes, in_sizes);
}

}  // namespace motley
