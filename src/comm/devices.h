// The accelerators of this machine, and which of them is a worker's.
#pragma once

#include "comm/gloo.h"

namespace motley {

// The CUDA devices of this machine; 0 if libtorch has no CUDA.
int cuda_devices();
// The device of a worker: that of its number on its machine (LOCAL_RANK, SLURM_LOCALID,
// OMPI_COMM_WORLD_LOCAL_RANK; otherwise its rank), modulo the devices. There must be devices.
int cuda_device_of(const Rendezvous& where);

}  // namespace motley
