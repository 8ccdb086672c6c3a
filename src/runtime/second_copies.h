// State kept twice (Plan::redundancy 1): what a worker does for the pieces of another one.
//
// Each worker keeps a copy of the pieces of parameters and optimizer state that one other worker
// holds alone (cluster/second_holders.h). The copies are not sent: before the optimizer's step every
// worker sends the gradients of its pieces to where they are kept too, and both make the same step.
// So a copy is that of the last finished step at any moment. A worker that is lost before its
// gradients have come was in a step that nobody has finished; the copies are then those of the step
// before, as all that the others hold is.
//
// What crosses in a step: the gradients of what is cut, once, and buffers that are cut.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "comm/communicator.h"
#include "plan/plan.h"
#include "runtime/worker.h"

namespace motley {

class SecondCopies {
 public:
  // A piece of a parameter or buffer that another worker has, kept here.
  struct Kept {
    size_t index = 0;  // of the parameter or buffer, of this worker's
    std::string name;
    Part part;
    at::Tensor piece;  // flat; whoever makes this gives it
    // It, of a whole tensor.
    at::Tensor of(const at::Tensor& whole) const;
  };
  std::vector<Kept> parameters, buffers;

  // Of a plan of one program with redundancy 1; it, worker and group outlive this.
  SecondCopies(const Plan& plan, const Worker& worker, Communicator& group);

  // Before the optimizer's step: the gradients of this worker's parameters go to where these are kept
  // too, those of `parameters` come, and `buffers` become those of the other worker. Collective.
  void receive(const std::vector<at::Tensor>& own);

  // Sends elements of this worker, and fills `theirs` with those of the other. Both are flat and may
  // be empty, which sends or awaits nothing. Collective.
  void trade(const at::Tensor& mine, at::Tensor& theirs);

 private:
  // Tensors of this worker, in an order that all share, for those of the other: flat, of so many
  // elements, and views of one tensor a type.
  std::vector<at::Tensor> exchange(const std::vector<at::Tensor>& mine,
                                   const std::vector<int64_t>& counts);

  const Worker& worker_;
  Communicator& group_;
  int to_, from_;  // ranks
};

}  // namespace motley
