// What differs between the versions of libtorch, Debian's 1.13 and 2.4 to 2.x. Nothing else in C++ asks for a version.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <c10/util/C++17.h>
#include <torch/version.h>

#include <string>

#define MOTLEY_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) ||         \
   (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

namespace motley {

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

}  // namespace motley
