// The group of one device, wherever its tensors are: collectives have what they return already.
#pragma once

#include <memory>

#include "comm/communicator.h"

namespace motley {

std::unique_ptr<Communicator> alone_on(at::Device device);

}  // namespace motley
