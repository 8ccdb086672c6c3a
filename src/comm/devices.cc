#include "comm/devices.h"

#include <ATen/detail/CUDAHooksInterface.h>

#include <cstdlib>

#include "core/error.h"

namespace motley {

int cuda_devices() {
  const at::CUDAHooksInterface& hooks = at::detail::getCUDAHooks();
  return hooks.hasCUDA() ? hooks.getNumGPUs() : 0;
}

int cuda_device_of(const Rendezvous& where) {
  const int devices = cuda_devices();
  MOTLEY_CHECK(devices > 0, "no CUDA device");
  int number = where.rank;
  for (const char* name : {"LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"})
    if (const char* text = std::getenv(name); text != nullptr && *text != 0) {
      number = std::abs(std::atoi(text));
      break;
    }
  return number % devices;
}

}  // namespace motley
