// A Communicator whose tensors are on a device, by one whose are on the CPU: it copies, through pinned
// memory. For several workers that share a GPU, and for backends that do not reach the device. Threads
// of its own wait for the copies; the caller goes on giving the device work until it waits for a result.
#pragma once

#include <memory>

#include "comm/communicator.h"

namespace motley {

std::unique_ptr<Communicator> staged(Communicator& on_cpu, at::Device device);

}  // namespace motley
