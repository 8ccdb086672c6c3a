// What a backend of c10d can do: the one place that says so. Backends whose name is not known are
// taken to do what all must (sums of 32-bit numbers, broadcasts, all-gathers); what else they can is
// tried when a group of them is made (process_group.h).
#pragma once

#include <string>

#include "comm/gloo.h"

namespace motley {

struct Backend {
  std::string name;  // as torch.distributed has it
  // A message is met by the receive of the same tag. Otherwise tags are ignored, the messages of a
  // pair are met in the order in which they were sent, and one that is sent waits for its receive.
  bool tags = false;
  // Adds 16-bit numbers as they are. Otherwise they travel, and are added, as f32.
  bool sums_half = false;
  bool known = false;  // it has messages and uneven all-to-all
};

Backend backend_named(const std::string& name);

// The CUDA devices of this machine; 0 if libtorch has no CUDA.
int cuda_devices();
// The device of a worker: that of its number on its machine (LOCAL_RANK, SLURM_LOCALID,
// OMPI_COMM_WORLD_LOCAL_RANK; otherwise its rank), modulo the devices. There must be devices.
int cuda_device_of(const Rendezvous& where);

}  // namespace motley
