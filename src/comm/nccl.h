// Groups of processes with a CUDA device each, over NCCL. It is compiled in where libtorch has
// ProcessGroupNCCL; Debian's has not. Its Communicator (process_group.h) is tested over gloo.
#pragma once

#include <memory>

#include "comm/communicator.h"
#include "comm/gloo.h"

namespace motley {

// Whether NCCL is compiled in.
bool has_nccl();
// The CUDA devices of this machine; 0 if libtorch has no CUDA.
int cuda_devices();
// Throws UserError saying what `--device cuda` misses, if it misses something.
void require_cuda();

// The device of a worker: that of its number on its machine (LOCAL_RANK, SLURM_LOCALID,
// OMPI_COMM_WORLD_LOCAL_RANK; otherwise its rank), modulo the devices. There must be devices.
int cuda_device_of(const Rendezvous& where);

// Joins the group; returns when all workers are connected. All tensors are on the device. Throws
// UserError as join_group does, and where NCCL is not compiled in.
std::unique_ptr<Communicator> join_nccl(const Rendezvous& where, int device_index);

}  // namespace motley
