// Calibration: measures what the devices and links of a cluster do, all workers at once, and fits
// the numbers the cost model works with.
//
// Devices. Operators are measured where they are used: the executor runs steps of small reference
// models of the zoo on each device by itself, at several batch sizes, and every call is timed. Of
// each operator all calls are fitted together, by least squares with the weight 1 / seconds and no
// negative coefficient:
//
//     seconds = overhead + flops / rate + bytes / bandwidth          (OpRate)
//
// with the flops and bytes that the cost model knows of the call. All are then scaled by one
// number, so that the reference steps as wholes take what they were measured to. The optimizers are
// fitted to updates of parameters of several sizes, and "motley::step" is what a step of a tiny
// model takes that this does not explain. Beside that the classes matmul, convolution, elementwise
// and launch are measured against size and dtype: they give DeviceType's own numbers, which stand
// for the operators that no reference model has.
//
// On an emulated device (emulate.h) a call takes the least of its CPU times / speed, and the device
// is padded while it is measured, so that all share the machine as they do in training. On other
// CPUs it takes the median of wall times. On CUDA models are larger, and the device is given work
// first, so that the machine launches calls ahead of it as in training: a call takes the median of
// the times from the end of the call before it to its own end. How long the machine takes to launch
// each (OpRate::launch) is measured in the same steps, so that what they take in all is explained.
//
// Interference. Steps of a model run on every device, alone and while messages of gradients' size
// go around; by what part they take longer is DeviceType::interference.
//
// Stages. The layers of a model, cut as the pipeline engine cuts it, run forward and backward by
// themselves on every device, and neighbouring layers on sub-meshes of several devices, which run
// their program together as a stage's group does; the slowest device counts. What is held between
// the passes is counted by storage, without parameters and inputs.
//
// Links. Every group of the cluster tree measures each form of collective against size; the slowest
// member's median counts. Fitted is seconds = max(rounds * least, rounds * latency + traffic /
// bandwidth) (CollectiveRate).
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cluster/profile.h"
#include "comm/communicator.h"
#include "cost/cost.h"
#include "shard/program.h"

namespace motley {

// A layer of a pipeline whose passes are measured on each device by itself, or layers that some
// devices of one type run together. Theory and program outlive the calibration.
struct StageShape {
  std::string shape, model;  // as ProfiledStage
  int64_t micro_batch = 1;
  const Theory* theory = nullptr;
  std::vector<int> devices = {};  // ascending; none: each by itself
  int nodes = 1;
  const Program* program = nullptr;  // of the devices, in phases
  std::vector<double> ratios = {};
};

struct CalibrateOptions {
  double speed = 0;  // padding of this worker; 0: a real device
  at::Device device = at::kCPU;
  // Steps whose operators are measured (model, batch); empty: reference_steps().
  std::vector<std::pair<std::string, int64_t>> steps;
  Seconds budget = 24;  // for them; every step runs at least twice
  bool half = false;    // in bf16 too, as mixed precision computes (graph/precision.h)
  // Who trains by another optimizer than libtorch's in C++: a step of it on these parameters, whose
  // gradients are there.
  std::function<std::function<void()>(Optimizer, const std::vector<at::Tensor>&)> optimizer;
  bool quick = false;  // fewer reference steps, sizes and repeats, where a minute is too long
  std::optional<ProfiledDevice> classes;  // of this device, if measured before: measure_classes()
  std::vector<StageShape> stages;
  // A group of some ranks of the whole, in order, that meets under a name of its own; called by its
  // members alone. Not given: as stages of pipelines are grouped (comm/subgroup.h).
  std::function<std::unique_ptr<Communicator>(const std::vector<int>& ranks,
                                              const std::string& name)>
      subgroup;
  std::function<void(const std::string&)> progress;  // what comes next
};

std::vector<std::pair<std::string, int64_t>> reference_steps(bool quick = false,
                                                             at::Device device = at::kCPU);

// The classes of operators of this device alone, and the device's own numbers from them; not its
// type. Takes some 4 s.
ProfiledDevice measure_classes(double speed, at::Device device);

// Collective. The whole profile on rank 0, its own devices' part elsewhere.
Profile calibrate(Communicator& group, const Cluster& cluster, const CalibrateOptions& options);

}  // namespace motley
