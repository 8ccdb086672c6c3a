// Runs a distributed program on one device of a group.
//
// The program is compiled once for the device: operators are looked up, size arguments are replaced
// by those of the local pieces, every (value, placement) gets a slot, and slots are freed after
// their last use. A step then is a walk over the instructions: a boxed call, or a collective. There
// is no code per operator; what the theory calls an extra rule has a kernel of that name
// (kernels.cc), and random operators draw each element from (seed, step, node, global index), so
// that they do not depend on the sharding.
//
// A device whose piece is empty makes no call: its pieces are empty and its partial sums zero.
// (Where a result also depends on operands that are not cut, the call is made with zeros of size
// one in the place of the empty pieces.)
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "plan/plan.h"
#include "torch/communicator.h"
#include "torch/interpret.h"

namespace motley {

struct Operator;

struct ExecutorOptions {
  at::Device device = at::kCPU;
  uint64_t seed = 0;  // of random operators
  // Called around every instruction: emulation of slower devices, tracing. `compute` is false for
  // collectives.
  std::function<void(bool compute)> before, after;
  // Sees every local tensor as it is made.
  std::function<void(ValueId, Placement, const at::Tensor&)> observe;
};

class Executor {
 public:
  // Everything referred to must outlive the executor.
  Executor(const Theory& theory, const Program& program, const Shares& shares,
           Communicator& communicator, ExecutorOptions options = {});
  ~Executor();

  // Takes this device's piece of a whole tensor: a parameter, a buffer or an input.
  at::Tensor piece(ValueId value, Placement placement, const at::Tensor& whole) const;
  // Shape of this device's piece.
  Shape local_shape(ValueId value, Placement placement) const;
  // How each source is stored.
  Placement stored(ValueId source) const;

  // Sets the local piece of a source. Parameters and buffers stay; inputs are read by the next
  // step.
  void set(ValueId source, at::Tensor local);
  at::Tensor get(ValueId source) const;

  // One step. Buffers are updated; parameters are not.
  struct Result {
    at::Tensor loss;  // whole, on every device
    std::vector<at::Tensor>
        gradients;  // [parameter] placed as the parameter is; undefined where there is none
  };
  Result step(int64_t number);

  // Puts a value together from all devices' pieces; collective. For checkpoints and tests.
  at::Tensor gather(ValueId value, Placement placement, const at::Tensor& local);

 private:
  struct Instruction;
  int slot(ValueId value, Placement placement) const;
  void compile();
  void convert(const Instruction& instruction);
  std::vector<at::Tensor> compute(const Instruction& instruction, int64_t step_number);

  const Theory& theory_;
  const Program& program_;
  Shares shares_;  // a copy: it remembers pieces as they are asked for, and executors are threads
  Communicator& communicator_;
  ExecutorOptions options_;
  std::vector<Placement> stored_;
  std::map<std::pair<ValueId, Placement>, int> slots_;
  std::vector<at::Tensor> values_;  // [slot]
  std::vector<Instruction> instructions_;
  std::map<ValueId, at::Tensor> sources_;  // local pieces
};

// Element i of the stream of one random node in one step, uniform in [0, 1).
double random_element(uint64_t seed, int64_t step, int node, int64_t index);

// Runs the random operators of a graph on one device as the executor does; for
// InterpretOptions::kernels.
std::map<std::string, Kernel> random_kernels(uint64_t seed, int64_t step);

}  // namespace motley
