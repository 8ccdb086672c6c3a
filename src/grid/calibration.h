// What the grid's cost model knows of the hardware beyond the cluster file: rates per device type
// and how much of a link's nominal bandwidth each kind of communication reaches. A few physical
// numbers; from the catalogue where nothing was measured, else fitted (bench/trials_bench.cc) or
// from measured layer times (LayerTimes).
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "cluster/cluster.h"
#include "grid/model.h"

namespace motley::grid {

struct Rates {
  FlopsPerSecond flops = 0;   // large matrix products in the model's precision
  BytesPerSecond memory = 0;  // of elementwise operators and the optimizer
  Seconds launch = 0;         // of one kernel
};

struct Calibration {
  std::map<std::string, Rates> types;  // by name of the device type
  // Shares of a link's nominal bandwidth: links between devices of one leaf group, and all others.
  double ring_inside = 0.8, ring_across = 0.8;        // collectives
  double message_inside = 0.8, message_across = 0.8;  // pipeline messages
  Seconds collective_launch = 20e-6;  // of a collective of a tensor-parallel group, on the host
  Seconds hop_time = 0;         // of each of its ring's 2 (n - 1) hops, beyond the link's latency
  Seconds collective_time = 0;  // of the same, on the device, whatever its size
  Seconds message_launch = 50e-6;  // of a pipeline message
  double optimizer_passes = 3;     // over a parameter's gradient, weight and optimizer state
  Seconds step = 0;                // host work once a step
  // Host time and device time of a layer overlap: the layer takes (host^k + device^k)^(1/k).
  double overlap_power = 4;
  // A matrix product cut tp ways runs at 1 / (1 + narrow * tp / hidden) of the rate.
  double narrow = 0;
  // How many times as long as its formula says a block takes: by tensor-parallel degree and
  // micro-batch (0: all others of the degree). Kernels run more or less well at the sizes that a
  // degree leaves them, as a profile of the layer, or trials, would tell. Nothing known: 1.
  std::map<std::pair<int, int>, double> time_scale;
  double time_scale_of(int tp, int micro_batch) const;
  // Memory besides what the model states: per device, and as a share of the activations.
  Bytes context = 1.0e9;
  double fragmentation = 0.15;
};

// The catalogue's rates for every type of the cluster.
Calibration default_calibration(const Cluster& cluster, const Precision& precision);

// Measured device seconds of a layer, by device type, tensor-parallel degree and micro-batch,
// all-reduces included; the host's launches are added as for layers that were not measured. Between
// measured micro-batches times are interpolated linearly, below the smallest they shrink in
// proportion, beyond the largest they grow as its last interval.
class LayerTimes {
 public:
  struct Time {
    Seconds forward = 0, backward = 0;
  };
  void add(const std::string& type, int tp, int micro_batch, int layer, Time time);
  bool empty() const { return table_.empty(); }
  // False if (type, tp, layer) was never measured.
  bool find(const std::string& type, int tp, double micro_batch, int layer, Time* time) const;

 private:
  std::map<std::pair<std::string, int>, std::map<int, std::map<int, Time>>> table_;
};

}  // namespace motley::grid
