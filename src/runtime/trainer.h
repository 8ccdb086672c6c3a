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
// A checkpoint does not depend on the plan (checkpoint_folder.h): a run may go on from it on another
// cluster. One that is damaged is told of, and the one before it is used.
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
#include "runtime/plan_model.h"
#include "runtime/slow_devices.h"
#include "runtime/worker.h"

namespace motley {

struct TrainOptions {
  uint64_t seed = 0;
  double learning_rate = 0;      // 0: 1e-3 for AdamW, 1e-2 for SGD
  double clip = 0;               // largest norm of the gradient; 0: no clipping
  std::string data;              // empty: see data.h
  std::string checkpoint;        // folder; empty: none
  int64_t checkpoint_every = 0;  // steps; 0: every save_seconds. At the end, too
  Seconds save_seconds = 600;
  int checkpoint_keep = 3;  // how many stay
  // Folder in memory (recent.h) where this worker leaves its pieces after every step, and from where
  // it goes on if attempts before this one have; empty: none.
  std::string recent;
  int attempt = 0;
  // The signal that this process was asked to stop by; 0: none. With a checkpoint, all workers stop
  // after the same step and save.
  std::function<int()> stop_signal;
  double speed = 0;              // padding of this worker (emulate.h); 0: none
  at::Device device = at::kCPU;  // of this worker: where the group's tensors are
  bool overlap = true;           // false: every collective is waited for where it stands
  // Told of devices that are slower than planned, behind a step; on every worker, on CPUs alone.
  std::function<void(int64_t step, const SlowDevice&)> slow;
};

struct StepReport {
  int64_t step = 0;
  double loss = 0;
  double gradient_norm = 0;  // before clipping; 0 without clipping
  Seconds seconds = 0;
  Seconds computed = 0;  // of them by instructions of this device, on a CPU
};

class Trainer {
 public:
  // `plan` must be sound (check) and outlive the trainer. Goes on from the checkpoint if there is
  // one.
  Trainer(const Plan& plan, Communicator& group, const TrainOptions& options);
  ~Trainer();

  StepReport step();
  int64_t next() const;  // the number of the next step
  const std::string& data_description() const;
  // Copies what this worker has to save, and begins to write it. REQUIRES: !saving(). Collective.
  void save();
  bool saving() const;   // a checkpoint is begun and not concluded
  bool written() const;  // this worker has written its part of it, or failed to
  // Waits until all have written, and makes it the newest checkpoint. Collective.
  struct Written {
    bool all = false;
    std::string why;  // this worker could not
  };
  Written conclude();
  // A whole parameter, on the CPU; collective.
  at::Tensor parameter(const std::string& name);
  // The most micro-batches that each worker held at once; collective, the same on all.
  std::vector<int> in_flight();
  // What each worker has communicated since the trainer was made; likewise.
  std::vector<Worker::Communication> communication();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

struct RunReport {
  std::vector<StepReport> steps;
  std::string data;            // what was trained on, in words
  std::vector<int> in_flight;  // [rank] most micro-batches held at once
  // [rank] In a step, the first not counted if there are others.
  std::vector<Worker::Communication> communication;
  int stopped = 0;            // by which signal; 0: it took all steps
  Seconds median_step_s = 0;  // the first step warms up and does not count if there are others
};

// Trains `steps` steps, those of attempts before counted, saving checkpoints if they are asked for. `progress` is called on every
// worker.
RunReport train(const Plan& plan, Communicator& group, const TrainOptions& options, int64_t steps,
                const std::function<void(const StepReport&)>& progress = nullptr);

}  // namespace motley
