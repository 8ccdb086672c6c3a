// Steps of a model on one device, as the executor runs them, and the times of their calls.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "cost/cost.h"
#include "measure/device_clock.h"
#include "runtime/executor.h"
#include "shard/program.h"

namespace motley {

// A step of a model on one device and the times of its calls.
struct MeasuredStep {
  Graph graph;
  std::unique_ptr<Theory> theory;
  Program program;
  std::vector<Work> work;                     // [node]
  std::vector<std::vector<double>> seconds;   // [node] of its call
  std::vector<std::vector<double>> launches;  // [node] of the machine, to launch it
};

class StepRunner {
 public:
  StepRunner(const std::string& model, int64_t batch, bool half, DeviceClock& watch,
             HeadStart* ahead, Communicator& self, at::Device device);
  // A graph of inputs alone, which are drawn.
  StepRunner(const std::string& text, DeviceClock& watch, HeadStart* ahead, Communicator& self,
             at::Device device);

  // Seconds of a step, of whose calls `timed` says what is noted: nothing; how long each takes; or,
  // on a device with a stream, how long the machine takes to launch each, or the device for all.
  enum class Timed { nothing, calls, launches, all };
  Seconds run(Timed timed);
  const MeasuredStep& measured() const { return step_; }
  // How long the machine took to launch the last step without marks.
  Seconds launched() const { return launched_; }

 private:
  StepRunner(Graph graph, bool half, DeviceClock& watch, HeadStart* ahead, Communicator& self,
             at::Device device);
  void set(ValueId value, const at::Tensor& whole);

  DeviceClock& watch_;
  HeadStart* ahead_;  // nullptr: none is needed
  Shares shares_;
  at::Device device_;
  MeasuredStep step_;
  std::unique_ptr<Executor> executor_;
  std::optional<StreamTimes> stream_;
  std::vector<int> marked_;  // [mark but the first] after which node
  Seconds begun_ = 0, launched_ = 0;
  int node_ = -1;
  Timed timed_ = Timed::nothing;
  int64_t number_ = 0;
};

}  // namespace motley
