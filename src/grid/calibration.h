// What the grid's cost model knows of the hardware: constants of device types and of link types, and
// a few of the runtime. From the catalogue (cluster.h) where nothing was measured, else fitted
// (bench/trials_bench.cc) or from measured layer times (LayerTimes). None belongs to a model or to a
// cluster, so that what one cluster taught holds for the next (docs/predictions.md).
#pragma once

#include <map>
#include <string>
#include <utility>

#include "cluster/cluster.h"
#include "grid/model.h"
#include "grid/strategy.h"

namespace motley::grid {

// Of a device type.
struct Rates {
  FlopsPerSecond flops = 0;   // large matrix products in the model's precision
  BytesPerSecond memory = 0;  // of elementwise operators and the optimizer
  Seconds launch = 0;         // of one kernel, on the host
  Seconds collective = 0;     // of a collective of a tensor-parallel group, on the host
  Seconds step = 0;           // host work once a step
  Bytes context = 0;  // of the driver and the kernels of PyTorch and its libraries, once loaded
  int channels = 0;   // that NCCL opens in a communicator inside a machine
};

// What NCCL keeps of a communicator for each channel: buffers of its three protocols, 4 MiB, 4.7 MiB
// and 0.5 MiB (NCCL_BUFFSIZE and those of LL128 and LL), to one neighbour and from another.
constexpr Bytes kChannelBytes = 2 * 9.2 * 1024 * 1024;
// Communicators of Megatron and DeepSpeed beside those of the degrees above 1: of all ranks, and of the
// ranks that share a model.
constexpr int kCommunicators = 2;

// Of a link type.
struct LinkRates {
  double message = 1;  // of the bandwidth of collectives that a message between stages reaches
  Seconds start = 0;   // of a collective, whatever its size
};

struct Calibration {
  std::map<std::string, Rates> types;      // by name of the device type
  std::map<std::string, LinkRates> links;  // by name of the link type; of others a LinkRates{}
  // Of the framework.
  Seconds message_launch = 0;   // of a pipeline message, on the host
  double optimizer_passes = 0;  // over a parameter's gradient, weight and optimizer state
  // Host time and device time of a layer overlap: the layer takes (host^k + device^k)^(1/k).
  double overlap_power = 0;
  // What the allocator holds beside the activations, as a share of them.
  double fragmentation = 0.15;
};

// The catalogue's numbers for every device and link type of the cluster, under the runtime's framework.
Calibration default_calibration(const Cluster& cluster, const Precision& precision,
                                Runtime runtime = Runtime::motley);

// A forward pass of a whole layer timed by itself on one device, host and all.
struct LayerProfile {
  int micro_batch = 1;
  Seconds forward = 0;
};

// By how much host and device are slower than a formula says, where both together, (host^k +
// device^k)^(1/k), were measured to take `seconds`. Neither takes longer than both. What is missing is
// the launches', of which a formula knows least (their logarithm to 0.7, that of rates to 0.2), unless
// it is so little that the device's rate may be the reason; then neither is changed, as a layer timed
// by itself waits for the host at its end.
struct Slower {
  double host = 1, device = 1;
};
Slower slower_than(Seconds host, Seconds device, Seconds seconds, double overlap_power);

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

  // Of layers whose times are not there: a profile of one micro-batch, which tells how many launches
  // they take, or how well their kernels run, however they are cut. Equal layers have the profile of
  // the first.
  void add(const std::string& type, int layer, LayerProfile profile);
  const LayerProfile* profile(const std::string& type, int layer) const;

 private:
  std::map<std::pair<std::string, int>, LayerProfile> profiles_;
  std::map<std::pair<std::string, int>, std::map<int, std::map<int, Time>>> table_;
};

}  // namespace motley::grid
