// A Communicator whose tensors are on a device, by one whose are on the CPU: it copies. For several
// workers that share a GPU, and for backends that do not reach the device.
#pragma once

#include <memory>

#include "comm/communicator.h"

namespace motley {

std::unique_ptr<Communicator> staged(Communicator& on_cpu, at::Device device);

}  // namespace motley
