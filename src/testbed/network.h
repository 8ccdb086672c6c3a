// The network of a cluster file, built on one machine out of network namespaces.
//
// Every worker gets a namespace of its own; the bridges stand in one more, the hub:
//
//     worker namespace        hub
//     eth0 ---- port ---- [bridge of the leaf group] ---- port ---- [bridge of its parent] ...
//
// A port is a veth pair with HTB at both ends, so that each direction runs at the bandwidth that
// the cluster file gives the port: the group's link, or the child's own uplink. A ring runs at the
// bandwidth of its hops, as a switch of that bandwidth does; a bus of n members gives each 1/(2n)
// of it. A group with one child limits nothing.
//
// Latency: half of it at either port on the way, in each direction. Ports of links slower than
// kRelayedLatency are two TAP devices instead of a veth pair, and a thread of this process carries
// the frames between them, each after its delay. Shorter latencies are not added to what the
// machine has, some 50 us.
//
// The namespaces have no name anywhere and the machine's own is not touched: they live as long as a
// process or a descriptor of this one is in them, so that nothing is left over however it ends.
//
// Without root the command is started again as root of a user namespace, where it may do all this;
// this process then only waits for it. Where neither is possible open_network says why and the
// caller falls back on pacing sockets (runtime/emulate.h).
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "cluster/cluster.h"

namespace motley {

constexpr Seconds kRelayedLatency = 400e-6;

class Network {
 public:
  ~Network();
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;

  // "network namespaces" or "network namespaces of a user namespace".
  const std::string& mode() const;
  // A descriptor of a worker's namespace, for setns() between fork and exec.
  int worker(int rank) const;
  // The address of a worker, for the others.
  static std::string worker_address(int rank);
  // The address that every worker reaches and on which sockets made by in_hub() can listen.
  const std::string& hub_address() const;
  // Runs a body whose calls make sockets of the hub, on a thread of its own.
  void in_hub(const std::function<void()>& body) const;

 private:
  friend std::unique_ptr<Network> open_network(const Cluster&, std::string*);
  struct Impl;
  explicit Network(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// The interface of every worker.
constexpr const char* kWorkerInterface = "eth0";

// Nothing, with *why in a few words, where the machine does not allow it. To be called before the
// command has done anything that it may not do twice. REQUIRES: at most 1000 devices.
std::unique_ptr<Network> open_network(const Cluster& cluster, std::string* why);

}  // namespace motley
