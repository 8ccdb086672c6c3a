// Emulation of a mixed cluster on one machine, with real training underneath.
//
// Speed. A device of speed s (DeviceType::speed, a share of one core of this machine) sleeps after
// its work until start + cpu_time / s, by the CPU clock of its thread. Work that is repeated takes
// 1 / s of the least CPU time that it ever took: what else runs on the machine, and on its host,
// makes a core up to a quarter slower for seconds, and is no part of the emulated device. The first
// time it is not padded, since the system finds memory for it then. Very small ops are padded
// together, since sleeps shorter than the timer can do would be too long; sleeping too long, or
// being descheduled, is carried over as debt of at most 5 ms. No privileges are needed, and the
// share holds within a percent or two as long as the speeds sum up to less than the cores and none
// is more than about 0.8.
//
// Links. SO_MAX_PACING_RATE on the socket to each peer. A ring crosses every port once in each
// direction, so it runs at the bandwidth of the slowest port between the two devices; when all
// pairs talk at once, each gets its part of every port on its way:
//
//   ring        min over ports of bandwidth
//   all pairs   min over ports of bandwidth / (ordered pairs of devices that cross the port)
//
// That is for where network namespaces (testbed/network.h) cannot be had: they limit what links
// carry in all, whoever talks, and delay it too. Neither emulates memory limits or the CPU time of
// the network stack.
#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "cluster/cluster.h"
#include "comm/gloo.h"
#include "testbed/network.h"

namespace motley {

// The padding of one device. before() and after() go around every instruction, as
// ExecutorOptions::before and after; `compute` is false for what is not padded. `work` names what
// was done since the last call, the same whenever it is repeated; null: nothing that is repeated.
class Padding {
 public:
  explicit Padding(double speed);
  void before(bool compute);
  void after(bool compute, const void* work = nullptr);

 private:
  void account(const void* work = nullptr);  // since the mark
  void sleep();
  void mark();

  double speed_;
  Seconds owed_ = 0;  // sleep still to be done; negative: slept too long
  Seconds wall_ = 0, cpu_ = 0;
  std::unordered_map<const void*, Seconds> least_;  // CPU time of repeated work
};

// Bandwidth of the connection between two devices; infinite if nothing limits it.
BytesPerSecond pair_bandwidth(const Cluster& cluster, int a, int b, Traffic traffic);

// Limits the bandwidth of the group's sockets from now on and says what is in effect: "paced
// sockets" or "no pacing: <why>". Collective.
std::string limit_bandwidth(ProcessCommunicator& group, const Cluster& cluster);

// The network of a cluster for workers of this machine; nothing, after a line on standard error
// that says why, where links have to be paced sockets.
std::unique_ptr<Network> network_for(const Cluster& cluster);

// In a worker: the mode of the network it was started in; otherwise limit_bandwidth(). Collective.
std::string emulate_links(ProcessCommunicator& group, const Cluster& cluster);

// What this group can do, measured under the emulation in effect, all workers at once. Collective.
struct Measured {
  FlopsPerSecond flops = 0;             // of this device, matrix products
  BytesPerSecond memory_bandwidth = 0;  // of this device, elementwise
  Seconds overhead = 0;                 // of this device, per operator
  BytesPerSecond ring_bandwidth = 0;    // of the group's all-reduce
  Seconds latency = 0;                  // of one hop of a ring
};
Measured measure(Communicator& group, double speed);

// Runs steps of a model of the zoo on every device, padded, with one sample and with `batch` of them,
// and scales the device's numbers so that the cost model prices both as they were measured: what
// launches take shows in the one, what the work takes in the other. Collective. REQUIRES: batch > 1.
void fit_to_model(Communicator& group, double speed, const std::string& model, int64_t batch,
                  Measured* mine);

// Every device type as its slowest member measured, and the links of the whole cluster scaled so
// that the ring has the measured bandwidth and latency. Collective; the same on every worker.
Cluster calibrated(Communicator& group, const Cluster& cluster, const Measured& mine);

}  // namespace motley
