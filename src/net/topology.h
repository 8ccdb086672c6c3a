// The network as a list of links and the paths over them, built from a Cluster.
//
// A link is one direction of a port, one direction of a ring hop, or a whole half-duplex bus. What
// a message crosses follows the cluster tree. It climbs from the sender to the lowest common group,
// passes it, and descends:
//
//   climbing out of x, a child of p:   switch: x's port up.  bus: the bus.  ring: nothing (a ring
//                                      joins the children; each child reaches the outside directly)
//   passing p from child x to child y: switch: x up, y down.  bus: the bus, once.
//                                      ring: the hops on the shorter side; equally short sides
//                                      carry half each
//   descending into y:                 as climbing, in the other direction
//
// A child group with an `uplink` of its own has a port of that bandwidth whatever joins it to its
// siblings; on a switch a port without one has the switch's bandwidth. All devices below a group
// share its port: that is the node's NIC.
//
// Devices that a direct link joins use it and nothing else; others never go through a third device.
// A group with several NICs has a port for each in place of its one. A NIC hangs at the smallest
// group that holds all devices near it: what leaves by it crosses nothing between that group and the
// one that the NIC belongs to.
//
// Latency of a path: the sum of the latencies of the groups it crosses, once for each side it
// climbs or descends and once for the group it passes.
//
// Where broadcasts of a group, chains of messages, were measured to be slower than its slowest
// port, its links are as slow as they are, and a group of devices has their latency if it is
// larger.
//
// Cost: building is linear in devices + groups; a path costs its length.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "cluster/cluster.h"
#include "core/units.h"

namespace motley::net {

struct NetworkLink {
  std::string name;  // "node[1] up", "gpu 17 down", "node[0] hop 3 cw", "host[2] bus"
  BytesPerSecond bandwidth = 0;
  int group = -1;  // of the cluster, whose link, direct link or NIC it is a part of
};

// How many unit flows cross a link; a fraction where a flow is split over two ways.
struct LinkUse {
  int link = 0;
  double flows = 0;
  friend bool operator==(const LinkUse&, const LinkUse&) = default;
};

// Sums uses by link. Costs O(1) an addition and nothing for links never touched.
class LinkLoad {
 public:
  explicit LinkLoad(int links) : flows_(static_cast<size_t>(links), 0.0) {}
  void add(int link, double flows) {
    if (flows_[link] == 0) touched_.push_back(link);
    flows_[link] += flows;
  }
  // The uses so far, by link number; starts anew.
  std::vector<LinkUse> take();
  // The same in any order, put behind what is there.
  void take(std::vector<LinkUse>* uses);

 private:
  std::vector<double> flows_;
  std::vector<int> touched_;
};

class Topology {
 public:
  explicit Topology(const Cluster& cluster);

  int devices() const { return devices_; }
  const std::vector<NetworkLink>& links() const { return links_; }

  // Adds `flows` unit flows from one device to another. REQUIRES: from != to.
  void add_path(int from, int to, double flows, LinkLoad* load) const;

  // Adds one unit flow from each of `devices` to each other one, without listing the pairs:
  // O(devices * depth + children of the rings touched), but for clusters with direct links or
  // several NICs a group, whose pairs are listed.
  void add_all_pairs(const std::vector<int>& devices, LinkLoad* load) const;

  Seconds latency(int from, int to) const;
  // Whether no group has direct links or several NICs.
  bool plain() const { return direct_.empty() && ports_.empty(); }

  // The devices that NCCL joins first: the outermost group above the device that has direct links,
  // or else the group that holds it directly. Its devices and their direct links, numbered from its
  // first device.
  int island(int device) const { return island_[device]; }
  int first_of(int node) const { return first_[node]; }
  const std::vector<DirectLink>& direct_of(int island) const;
  // The number of NICs of the outermost group above the device that has several, at least 1, and
  // which of them is near the device.
  int nics(int device) const { return nics_.empty() ? 1 : nics_[device]; }
  int nic(int device) const { return nics_.empty() ? 0 : nic_[device]; }
  // The group of the cluster that joins two devices: of their direct link, or the lowest above both.
  int joining_group(int a, int b) const;

  // The group that holds the device directly, and the depth of the lowest group that holds both.
  int leaf_group(int device) const { return parent_[device]; }
  int common_depth(int a, int b) const;

  // The bandwidth into the group that holds exactly the devices [first, first + count), over the
  // narrowest of the ports that lead only to it and all direct links into it; infinity if no group
  // or device is that range or nothing bounds it.
  BytesPerSecond bandwidth_into(int first, int count) const;

 private:
  // Tree nodes: devices are 0 .. devices-1, group g is devices + g.
  void cross_ring(int group, int from, int to, double flows, LinkLoad* load) const;
  void pairs_on_ring(int group, const std::vector<double>& members, LinkLoad* load) const;
  int lift(int node, int depth) const;
  void add_media(const Cluster& cluster, const std::vector<std::string>& names);
  // Adds what a message crosses between a device and the group above the node of depth `top` + 1
  // that it is below, which is returned.
  int climb(int device, int top, bool up, double flows, LinkLoad* load) const;
  const std::pair<int, int>* direct(int from, int to) const;  // (other, link); null: none

  int devices_ = 0;
  std::vector<NetworkLink> links_;
  std::vector<int> parent_;         // tree node of the parent group; -1 for the root
  std::vector<int> depth_;          // root 0
  std::vector<int> position_;       // among the parent's children
  std::vector<int> up_, down_;      // port links of a node, -1: none
  std::vector<int> first_, count_;  // devices below
  std::vector<int> children_;       // of a group, how many
  std::vector<LinkKind> kind_;      // of a group
  std::vector<Seconds> latency_;    // of a group
  // Direct links, each way one: [device] (other, link); empty where there are none at all. And what
  // they are a part of.
  std::vector<std::vector<std::pair<int, int>>> direct_;
  std::vector<Seconds> direct_latency_;           // [link]; of others 0
  std::vector<int> island_;                       // [device] tree node
  std::vector<std::vector<DirectLink>> islands_;  // [group]
  // Groups with NICs: [group] of each device below, in order; the link up, after which comes the
  // one down, and the tree node that the NIC hangs at. Empty: one port.
  struct NicPort {
    int up = 0, at = 0;
  };
  std::vector<std::vector<NicPort>> ports_;
  std::vector<int> nics_, nic_;  // [device]; empty: no group has several
  std::vector<int> medium_;  // of a group: its bus link, or the first of its 2 * children ring hops
};

}  // namespace motley::net
