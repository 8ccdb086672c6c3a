// The passes of a micro-batch through a stage of a pipeline.
#pragma once

#include <cstdint>

namespace motley {

enum class PassKind : uint8_t {
  forward,
  backward,  // all of it; of a stage that splits it, what earlier stages wait for
  weights    // of a stage that splits its backward pass: the rest, gradients of weights
};

}  // namespace motley
