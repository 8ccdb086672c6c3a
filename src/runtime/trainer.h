// Training by a plan: what one worker does.
//
// Parameters are drawn from the seed as on one device, every worker keeps its pieces; the optimizer
// works on the pieces. Clipping uses the norm of the whole gradient: cut gradients are summed over
// the workers, replicated ones count once. Runs of the same plan, seed and data give the same
// losses up to rounding, whatever the sharding.
//
// Runs save at their end, every few minutes or steps, and when they are asked to stop. The folder
// is one run's at a time (checkpoint.h).
//
// A checkpoint is one file DIR/checkpoint.pt in the original layout: a dictionary that torch.load
// reads, {model, optimizer, seed, step, parameters: {name: tensor}, buffers: {...}, and the
// optimizer's exp_avg, exp_avg_sq or momentum: {...}}. It does not depend on the plan: a run may
// go on from it on another cluster.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "interpret/interpret.h"
#include "plan/plan.h"
#include "runtime/emulate.h"

namespace motley {

struct TrainOptions {
  uint64_t seed = 0;
  double learning_rate = 0;      // 0: 1e-3 for AdamW, 1e-2 for SGD
  double clip = 0;               // largest norm of the gradient; 0: no clipping
  std::string data;              // empty: see data.h
  std::string checkpoint;        // folder; empty: none
  int64_t checkpoint_every = 0;  // steps; 0: every save_seconds. At the end, too
  Seconds save_seconds = 600;
  // The signal that this process was asked to stop by; 0: none. With a checkpoint, all workers stop
  // after the same step and save.
  std::function<int()> stop_signal;
  double speed = 0;              // padding of this worker (emulate.h); 0: none
  at::Device device = at::kCPU;  // of this worker: where the group's tensors are
};

struct StepReport {
  int64_t step = 0;
  double loss = 0;
  double gradient_norm = 0;  // before clipping; 0 without clipping
  Seconds seconds = 0;
};

// The canonical graph of the plan's model at the type of the plan's parameters, captured again.
// Throws UserError if the plan is not for a model of the zoo.
Graph captured_graph(const Plan& plan);
// The same. Throws UserError naming both models if the plan's graph is not it, or if the plan is
// not for a model of the zoo.
Graph graph_of_model(const Plan& plan);
DType dtype_of(const Plan& plan);

class Trainer {
 public:
  // `plan` must be sound (check) and outlive the trainer. Goes on from the checkpoint if there is
  // one.
  Trainer(const Plan& plan, Communicator& group, const TrainOptions& options);
  ~Trainer();

  StepReport step();
  int64_t next_step() const;
  const std::string& data_description() const;
  // Collective; rank 0 writes.
  void save();
  // A whole parameter, on the CPU; collective.
  at::Tensor parameter(const std::string& name);
  // The most micro-batches that each worker held at once; collective, the same on all.
  std::vector<int> in_flight();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

struct RunReport {
  std::vector<StepReport> steps;
  std::string data;            // what was trained on, in words
  std::vector<int> in_flight;  // [rank] most micro-batches held at once
  int stopped = 0;             // by which signal; 0: it took all steps
  Seconds median_step_s = 0;   // the first step warms up and does not count if there are others
};

// Trains `steps` steps, saving checkpoints if they are asked for. `progress` is called on every
// worker.
RunReport train(const Plan& plan, Communicator& group, const TrainOptions& options, int64_t steps,
                const std::function<void(const StepReport&)>& progress = nullptr);

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
