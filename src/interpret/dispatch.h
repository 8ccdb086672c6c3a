// Calling ATen operators by name with the arguments of a Graph node.
//
// An Operator is a handle of libtorch's dispatcher with its schema digested once: how to turn each
// Arg into a c10::IValue (the graph's number may be a Scalar, an int, a float, or a 0-dim tensor
// that promotes like a Python number; its integer list may be an int[], a SymInt[] or a bool[3])
// and what to fill in for what the graph leaves out: the device is the caller's, layout and memory
// format are the defaults, generators are none.
//
// Graphs carry no strides, so `view` is executed as `reshape` and `clone` makes a contiguous
// tensor.
//
// Cost: looking a name up takes a hash of the string, once per node at best; a boxed call costs
// well under a microsecond over a typed one.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/FunctionRef.h>

#include <string>
#include <vector>

#include "graph/graph.h"

namespace motley {

// What an argument of a schema takes.
enum class ArgKind : uint8_t {
  tensor,
  tensors,
  optional_tensors,
  scalar,
  integer,
  real,
  boolean,
  integers,
  reals,
  booleans,
  text,
  dtype,
  device,
  left_out,     // layout, memory format, pinning, generator
  unsupported,  // whatever a graph cannot express
};

struct OperatorArg {
  std::string name;
  ArgKind kind = ArgKind::unsupported;
  bool optional = false;
  bool written = false;  // the operator changes it in place
  c10::IValue fill;      // the value of a left-out argument, or the schema's default
};

struct Operator {
  std::string name;  // "aten::add.Tensor"
  c10::OperatorHandle handle;
  std::vector<OperatorArg> args;
  bool contiguous = false;  // what it returns depends on strides: runs on contiguous operands
  // Tried before the operator itself; false: it is not its case.
  bool (*instead)(torch::jit::Stack*) = nullptr;
};

// "aten::add.Tensor" of a schema.
std::string operator_name(const c10::FunctionSchema& schema);

// Digests a schema. Cost: a few microseconds; keep the result.
Operator digest(const c10::OperatorHandle& handle);

// The operator that executes a node's op; cached for the life of the process. Safe to call from
// several threads. Throws UserError if this libtorch has no such operator.
const Operator& find_operator(const std::string& name);

using TensorOf = c10::function_ref<at::Tensor(ValueId)>;

// Calls an operator below autograd and returns its outputs, tensor lists flattened, undefined
// tensors kept. Throws UserError if an argument does not fit the schema, and whatever libtorch
// throws.
std::vector<at::Tensor> call(const Operator& op, const std::vector<Arg>& args, TensorOf tensor_of,
                             at::Device device = at::kCPU);
// The same above autograd, on the CPU.
std::vector<at::Tensor> call_differentiably(const Operator& op, const std::vector<Arg>& args,
                                            TensorOf tensor_of);

at::ScalarType to_torch(DType dtype);
// Throws UserError for complex and quantised types.
DType from_torch(at::ScalarType type);
TensorSpec spec_of(const at::Tensor& tensor);  // undefined: shape {-1}

}  // namespace motley
