#include "comm/nccl.h"

#include <ATen/detail/CUDAHooksInterface.h>

#include <cstdlib>

#include "comm/process_group.h"
#include "comm/store.h"
#include "core/error.h"

#ifdef USE_C10D_NCCL
#include <c10/cuda/CUDAFunctions.h>

#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

namespace motley {

#ifdef USE_C10D_NCCL

bool has_nccl() { return true; }

std::unique_ptr<Communicator> join_nccl(const Rendezvous& where, int device_index) {
  // A worker that waits for one that is gone ends instead of hanging; libtorch 2 does so anyway.
  setenv("NCCL_ASYNC_ERROR_HANDLING", "1", 0);
  c10::cuda::set_device(static_cast<c10::DeviceIndex>(device_index));
  auto store = meet(where, "nccl");
  Watch::exit_when_lost();
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = kCollectiveTime;
  std::unique_ptr<Communicator> group = communicator_over(
      c10::make_intrusive<c10d::ProcessGroupNCCL>(store, where.rank, where.size, options),
      at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device_index)), where.number(where.rank));
  group->barrier();  // NCCL connects at the first collective
  return group;
}

#else

bool has_nccl() { return false; }

std::unique_ptr<Communicator> join_nccl(const Rendezvous&, int) {
  require_cuda();
  return nullptr;
}

#endif

int cuda_devices() {
  const at::CUDAHooksInterface& hooks = at::detail::getCUDAHooks();
  return hooks.hasCUDA() ? hooks.getNumGPUs() : 0;
}

void require_cuda() {
  if (!has_nccl())
    throw user_error("run",
                     "--device cuda: this libtorch has no NCCL; build motley with one that has it, "
                     "or give --device cpu");
  if (cuda_devices() == 0)
    throw user_error("run", "--device cuda: no CUDA device is found here; give --device cpu");
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
