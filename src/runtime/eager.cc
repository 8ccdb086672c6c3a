#include "runtime/eager.h"

#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/utils.h>

#include "core/error.h"
#include "interpret/dispatch.h"

namespace motley {

std::shared_ptr<TrainModule> materialize(const ModelSpec& spec, uint64_t seed, DType dtype) {
  DefaultDType default_type(dtype);
  torch::manual_seed(seed);
  return build_model(spec);
}

TensorMap random_inputs(const TrainModule& module, int64_t batch, uint64_t seed, DType dtype) {
  DefaultDType default_type(dtype);
  torch::manual_seed(seed);
  TensorMap inputs;
  for (const InputSpec& input : module.inputs(batch)) {
    const at::ScalarType type = to_torch(input.spec.dtype);
    inputs[input.name] = is_float(input.spec.dtype)
                             ? at::randn(input.spec.shape, type)
                             : at::randint(input.below, input.spec.shape, type);
  }
  return inputs;
}

TensorMap parameters_of(const TrainModule& module) {
  TensorMap map;
  std::vector<at::Tensor> seen;
  for (const auto& item : module.named_parameters()) {
    bool tied = false;
    for (const at::Tensor& t : seen) tied |= t.is_same(item.value());
    if (tied) continue;
    seen.push_back(item.value());
    map[item.key()] = item.value();
  }
  return map;
}

TensorMap buffers_of(const TrainModule& module) {
  TensorMap map;
  for (const auto& item : module.named_buffers()) map[item.key()] = item.value();
  return map;
}

StepResult eager_step(TrainModule* module, const TensorMap& inputs) {
  const TensorMap parameters = parameters_of(*module);
  std::vector<at::Tensor> arguments, tensors;
  for (const InputSpec& input : module->inputs(1)) {
    const auto it = inputs.find(input.name);
    if (it == inputs.end()) throw user_error("eager", "input '{}' has no tensor", input.name);
    arguments.push_back(it->second);
  }
  for (const auto& [name, tensor] : parameters) tensors.push_back(tensor);
  const at::Tensor loss = module->loss(arguments);
  const std::vector<at::Tensor> gradients =
      torch::autograd::grad({loss}, tensors, {}, /*retain_graph=*/false, /*create_graph=*/false,
                            /*allow_unused=*/true);
  StepResult result;
  result.loss = loss.detach();
  size_t i = 0;
  for (const auto& [name, tensor] : parameters) {
    if (gradients[i].defined()) result.gradients[name] = gradients[i];
    i++;
  }
  for (const auto& [name, tensor] : buffers_of(*module)) result.updates[name] = tensor.clone();
  return result;
}

}  // namespace motley
