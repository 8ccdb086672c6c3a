// What a device's allocator gives a program at most: the program's own tensors, and what the libraries
// of a device with streams take from it once and keep.
#pragma once

#include "cost/cost.h"

namespace motley {

// PyTorch's workspace for cuBLAS on Hopper, the largest there is; before it 8 MiB.
inline constexpr Bytes kLibraryWorkspace = 32 << 20;

inline Bytes allocated_bytes(const MemoryCost& memory, const CostModel& model, int type) {
  return memory.allocated[type] + (model.launches(type) ? kLibraryWorkspace : 0);
}

}  // namespace motley
