// The cluster that the workers of a launch are on: measured, as a cluster file and a profile.
//
// Each worker says what it is (Facts). Then, in this order:
//
//   1. messages between pairs of workers, alone: latency and bandwidth in both directions. Of more
//      than kAlone machines the pairs of a round go side by side
//   2. the tree of groups that explains them (levels.h); inside of a machine with GPUs that of
//      `nvidia-smi topo -m`, with measured numbers
//   3. what the port of a group carries when all of its workers send at the same time, and
//      all-reduces of the groups, one by one and side by side
//   4. classes of operators on every device, all at the same time; devices of one kind that differ
//      by more than kThrottled are two types, and the slower one is complained of
//   5. a quick calibration of operators and collectives for the profile (measure/calibrate.h)
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "cluster/profile.h"
#include "comm/communicator.h"
#include "core/file.h"
#include "cost/cost.h"
#include "discover/levels.h"

namespace motley::discover {

constexpr int kAlone = 12;
constexpr double kThrottled = 1.15;  // devices of one kind are alike within this
constexpr double kSlowLink = 1.25;   // ports of one level likewise

// What a worker knows of itself.
struct Facts {
  std::string host;         // for people
  std::string machine;      // equal for workers with one network of their own
  std::string kind;         // of the device: "NVIDIA A100-SXM4-40GB", "cpu"
  Bytes memory = 0;         // of the device
  Bytes taken = 0;          // of it, by other processes
  int gpu = -1;             // its number on the machine; -1: none
  double speed = 0;         // emulated share of a core; 0: a real device
  std::string topo, query;  // nvidia-smi's, of the machine; empty: none
};
Json to_json(const Facts& facts);
// Throws UserError.
Facts parse_facts(const std::string& json, const std::string& name);

struct DiscoverOptions {
  std::string name = "cluster";
  // What the group talks over, and over what the workers of one machine do; they go into the file.
  // Empty: nothing is said; `inside`: over the same.
  std::string backend, inside;
  // [rank] Connected to each other worker, over which its messages go; empty: there are none. Then
  // the latency of a link is that of its packets, not of messages of the backend.
  std::vector<int> sockets;
  bool profile = true;  // step 5
  // CalibrateOptions::optimizer
  std::function<std::function<void()>(Optimizer, const std::vector<at::Tensor>&)> optimizer;
  std::function<void(const std::string&)> progress;  // what comes next
};

// The collectives of a group as they were measured, bytes/s that each member's port carries.
struct LevelRate {
  std::vector<int> workers;
  BytesPerSecond alone = 0, beside = 0;  // beside: while its siblings reduce too; 0: it has none
};

// What a device sustains, by itself while all others compute too.
struct DeviceRates {
  FlopsPerSecond flops = 0, half_flops = 0;
  BytesPerSecond memory_bandwidth = 0;
  Seconds overhead = 0;
};

struct Discovered {
  std::string yaml;  // the cluster file
  Cluster cluster;   // what it says
  Profile profile;
  std::vector<int> ranks;  // [device of the file] the worker that is it
  Level levels;
  Distances distances{0};
  std::vector<DeviceRates> devices;   // [worker]
  std::vector<LevelRate> rates;       // of groups with two workers and more, outer ones first
  std::vector<std::string> warnings;  // what looks wrong
  std::string drawing;                // for a terminal
  Seconds seconds = 0;
};

// For scripts: levels with their members, ports, latencies and all-reduces; and all pairs.
Json to_json(const Discovered& found);

// Collective; the same on rank 0 as anywhere, but for the profile, which rank 0 alone has whole.
// Throws UserError where the backend has no messages.
Discovered discover(Communicator& group, const Facts& mine, const DiscoverOptions& options);

// The parts of it.
Distances measure_distances(Communicator& group, const std::vector<int>& machines,
                            const std::vector<int>& sockets);
// The shortest time in which the other end of a connection acknowledged anything, by the kernel's
// clock: without what waking a process takes. 0: it is not known.
Seconds round_trip_of(int socket);
// Improves the ports of `level` and below by what they carry side by side.
void measure_ports(Communicator& group, const Distances& distances, Level* level);
std::vector<LevelRate> measure_reductions(Communicator& group, const Level& level);

// [worker] The number of its type: devices of one kind whose rates are alike. Types are numbered in
// the order of their first worker. Complains of those that are slower than others of their kind.
std::vector<int> types_of(const std::vector<Facts>& facts, const std::vector<DeviceRates>& rates,
                          std::vector<std::string>* warnings);
// Complains of links that carry less than others of their level, or less in one direction.
void check_links(const Level& level, const Distances& distances, const std::vector<Facts>& facts,
                 std::vector<std::string>* warnings);
// The file, and the order of its devices.
std::string cluster_file(const std::string& name, const Level& level, const Distances& distances,
                         const std::vector<Facts>& facts, const std::vector<DeviceRates>& rates,
                         const std::vector<int>& types, std::vector<int>* ranks,
                         const std::string& backend = "", const std::string& inside = "");
std::string draw(const Discovered& found, const std::vector<Facts>& facts);

}  // namespace motley::discover
