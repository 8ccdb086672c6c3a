// What one worker does in a step of a plan, whatever kind of plan it is: loss and gradients, on the
// pieces of the parameters that it holds.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "comm/reshard.h"
#include "interpret/interpret.h"
#include "plan/plan.h"
#include "runtime/executor.h"

namespace motley {

class Worker {
 public:
  virtual ~Worker() = default;

  // Indices into the plan's parameters and buffers of which this worker holds a piece; ascending.
  virtual const std::vector<int>& parameters() const = 0;
  virtual const std::vector<int>& buffers() const = 0;
  // This worker's piece of the i-th of them, a view where it can be.
  virtual at::Tensor parameter_piece(size_t i, const at::Tensor& whole) const = 0;
  virtual at::Tensor buffer_piece(size_t i, const at::Tensor& whole) const = 0;
  // Parameters and buffers stay until they are set again. What the optimizer does to `piece` later,
  // in place, the next step sees; the elements may be moved to memory of the worker's.
  virtual void set_parameter(size_t i, at::Tensor piece) = 0;
  virtual void set_buffer(size_t i, at::Tensor piece) = 0;
  virtual at::Tensor buffer(size_t i) const = 0;

  // How a step takes the i-th input of the plan, and this worker's piece of it. Pipelines take
  // whole inputs and cut them themselves.
  virtual Placement input_placement(size_t i) const = 0;
  virtual at::Tensor input_piece(size_t i, const at::Tensor& whole) const = 0;

  struct Result {
    at::Tensor
        loss;  // one number, the same on every worker; on the device, where it may not be done yet
    std::vector<at::Tensor> gradients;  // of parameters(); undefined where the loss depends on none
  };
  // `inputs`: the piece of every input of the plan, of one global batch. Collective.
  virtual Result step(int64_t number, const std::vector<at::Tensor>& inputs) = 0;

  // As in Executor, since it was made.
  struct Communication {
    double seconds = 0, waited = 0;
  };
  virtual Communication communication() { return {}; }

  // Where this worker's piece of the i-th of them lies in the whole. The workers of one group hold
  // all of it together, or each.
  virtual Part parameter_part(size_t i) const = 0;
  virtual Part buffer_part(size_t i) const = 0;

  // Of a worker of one program: the same of the worker with another rank.
  virtual Part parameter_part_of(size_t i, int rank) const;
  virtual Part buffer_part_of(size_t i, int rank) const;
  // Whether pieces of the i-th of them are of different elements on all workers.
  virtual bool parameter_is_cut(size_t i) const;
  virtual bool buffer_is_cut(size_t i) const;

  // The most micro-batches that it held at once since it was made.
  virtual int most_in_flight() const { return 1; }

  // Whether this worker's piece of the i-th parameter counts in a sum over all pieces that takes
  // every element once.
  virtual bool counts(size_t i) const = 0;

  // A parameter or buffer of the plan put together on rank 0, and on all workers if `everywhere`;
  // undefined elsewhere and if nobody holds it. `local`: this worker's piece, undefined if it has
  // none. Collective.
  virtual at::Tensor whole_parameter(int parameter, const at::Tensor& local, bool everywhere) = 0;
  virtual at::Tensor whole_buffer(int buffer, const at::Tensor& local, bool everywhere) = 0;
};

// [input of the plan] This worker's pieces of a global batch, which is given by name.
std::vector<at::Tensor> input_pieces(const Plan& plan, const Worker& worker,
                                     const TensorMap& batch);

// `plan` and `group` must outlive the worker.
std::unique_ptr<Worker> make_worker(const Plan& plan, Communicator& group,
                                    const ExecutorOptions& options);

}  // namespace motley
