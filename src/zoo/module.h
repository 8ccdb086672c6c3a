// A model with its loss: what capture, the zoo and the eager reference share.
//
// A TrainModule is ordinary torch::nn code whose `loss` maps a batch of inputs to a scalar. It
// declares its inputs, so that a step can be captured, or real inputs drawn, from a batch size
// alone.
#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/error.h"
#include "graph/graph.h"
#include "zoo/zoo.h"

namespace motley {

struct InputSpec {
  std::string name;
  TensorSpec spec;
  int64_t below = 0;  // integer inputs lie in [0, below); real inputs are standard normal
};

class TrainModule : public torch::nn::Module {
 public:
  using torch::nn::Module::Module;
  // For a global batch of `batch` samples; real inputs have the default dtype.
  virtual std::vector<InputSpec> inputs(int64_t batch) const = 0;
  // `inputs` in the order of inputs(); returns a 0-dim tensor.
  virtual at::Tensor loss(const std::vector<at::Tensor>& inputs) = 0;
};

// Torch's default dtype, restored at the end of the scope.
class DefaultDType {
 public:
  explicit DefaultDType(DType dtype);
  ~DefaultDType();
  DefaultDType(const DefaultDType&) = delete;
  DefaultDType& operator=(const DefaultDType&) = delete;

 private:
  caffe2::TypeMeta before_;
};
DType default_dtype();

// The zoo's model, with parameters drawn by torch's own initialisers in the default dtype.
std::shared_ptr<TrainModule> build_model(const ModelSpec& spec);

}  // namespace motley
