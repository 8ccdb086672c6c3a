// Walks the devices through a program whose collectives travel beside computation (shard/duplex.h):
// every device has a stream of computation and one of communication. A collective starts when all
// devices have come to it and the one before it is done; a device waits for it where it reads the
// result. While a collective runs, computation is slower by DeviceType::interference.
#pragma once

#include "sim/walk.h"

namespace motley {

// What devices wait for of what they communicate, [device].
struct Overlapped {
  std::vector<Seconds> comm, exposed;
};

// All steps; otherwise as walk(). The sink is told of collectives at the time of the network, which
// may be beside the computation of the same device.
std::vector<int> walk_overlapped(const Theory& theory, const Program& program,
                                 const CostModel& model, const Fractions& fractions,
                                 std::vector<Seconds>* now, Overlapped* overlapped,
                                 const WalkSink& sink, const WalkOptions& options = {});

}  // namespace motley
