// The reference: the real model, with real numbers, stepped by PyTorch itself.
#pragma once

#include <cstdint>
#include <memory>

#include "interpret/interpret.h"
#include "zoo/module.h"

namespace motley {

// The zoo's model on the CPU, its parameters drawn from `seed`.
std::shared_ptr<TrainModule> materialize(const ModelSpec& spec, uint64_t seed,
                                         DType dtype = DType::f32);

// Inputs for one global batch drawn from `seed`: standard normal numbers, uniform integers.
TensorMap random_inputs(const TrainModule& module, int64_t batch, uint64_t seed,
                        DType dtype = DType::f32);

// The module's parameters and buffers by name, a tied parameter under its first name; they share
// memory with the module.
TensorMap parameters_of(const TrainModule& module);
TensorMap buffers_of(const TrainModule& module);

// One forward and backward pass by autograd. Changes the module's buffers, as training does;
// `updates` holds all of them.
StepResult eager_step(TrainModule* module, const TensorMap& inputs);

}  // namespace motley
