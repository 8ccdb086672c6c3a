// Compares one step of a plan with one device.
#pragma once

#include <cstdint>
#include <string>

#include "comm/communicator.h"
#include "plan/plan.h"

namespace motley {

// Loss, gradients and new buffers of one step of a plan on threads of this process against one
// device: PyTorch by itself, or the interpreter where there are random ops or the model is not of
// the zoo; for pipelines with batch normalisation one device that takes micro-batch by micro-batch.
// In double precision, in f32, or in the plan's mixed precision, where one device is the graph on
// one device.
struct Verification {
  DType dtype = DType::f64;
  std::string reference;  // "PyTorch on one device" or "the graph on one device"
  double loss_error = 0;  // relative
  double gradient_error =
      0;  // largest over parameters: largest difference / largest element, which
          // counts as at least a millionth of the largest of all gradients. In 16 bits: norm of
          // the difference / norm, which counts as at least a hundredth of that of all gradients
  std::string worst_parameter;
  double buffer_error = 0;  // largest over buffers that the step changes: largest difference /
                            // largest element
  std::string worst_buffer;
  bool equivalent = false;  // all at most 1e-9 in double precision, 1e-4 in single; in 16 bits
                            // the loss at most 1e-2, gradients 1e-1
};
Verification verify_plan(const Plan& plan, DType compute = DType::f64, uint64_t seed = 0);
// The same on the ranks of a group, all of which call it: rank 0 judges.
Verification verify_plan(const Plan& plan, DType compute, uint64_t seed, Communicator& group);

}  // namespace motley
