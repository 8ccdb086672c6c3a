// The cluster: which devices there are, how fast each is, and how they are joined.
//
// A cluster is a tree. Leaves are devices; every inner node is a Group whose children are joined by
// its link: a switch (every child has a full-duplex port of `bandwidth`), a ring, or a bus (one
// half-duplex medium shared by all children). The port of a node on the switch above it is that
// node's NIC: all its devices share it. `uplink` overrides it for one group, so that hosts with
// different NICs can stand side by side.
//
// Beside its link a group may have other media: direct links between pairs of its devices (NVLink),
// and several NICs, each near some of its devices. A message between two devices takes the direct
// link that joins them, or else the tree; it never passes through a third device.
//
// The file (YAML; docs/cluster-file.md):
//
//   name: hapt-64
//   link: {bandwidth: 5 Gbps, latency: 1 ms}          # joins the groups below
//   groups:
//     - name: a100
//       link: {bandwidth: 200 Gbps, latency: 10 us}
//       groups:
//         - name: node
//           count: 4
//           link: {bandwidth: 300 GB/s, latency: 5 us}
//           devices: [{type: A100-40GB, count: 8}]
//     - ...
//   device_types:                                     # optional: new ones, or other numbers for
//   known ones
//     - {name: slow-cpu, flops: 20 GFLOPS, memory: 4 GiB, memory_bandwidth: 5 GB/s, overhead: 10
//     us}
#pragma once

#include <string>
#include <vector>

#include "cluster/backend.h"
#include "core/collective.h"
#include "core/id.h"
#include "core/units.h"

namespace motley {

// What one operator was measured to take on a device: overhead + flops / rate + bytes / bandwidth.
// The sum, not the larger of the two: measured times of cores and of small calls follow it.
struct OpRate {
  std::string op;  // "aten::mm"; "motley::adamw" and "motley::sgd" update one parameter,
                   // "motley::step" is what a step takes beyond operators, bytes being its inputs
  Seconds overhead = 0;
  FlopsPerSecond flops = 0;               // 0: not limited by arithmetic
  BytesPerSecond memory_bandwidth = 0;    // 0: not limited by memory
  Bytes cached = 0;                       // bytes of a call beyond these move at ...
  BytesPerSecond uncached_bandwidth = 0;  // ... (optimizers); 0: there is no such limit
  // Of the machine that launches calls ahead of the device, which takes the time above for each; 0:
  // the device launches them itself, and the overhead holds it.
  Seconds launch = 0;
  friend bool operator==(const OpRate&, const OpRate&) = default;
};

constexpr double kMostInterference = 100;  // see DeviceType

struct DeviceType {
  std::string name;
  FlopsPerSecond flops = 0;             // sustained, single precision, large matrix products
  FlopsPerSecond half_flops = 0;        // sustained, 16-bit inputs
  Bytes memory = 0;                     // usable for tensors
  BytesPerSecond memory_bandwidth = 0;  // sustained
  Seconds overhead = 0;                 // per operator launch
  double speed =
      1;  // emulation: share of one core of the machine it is emulated on (0: not emulated)
  std::vector<OpRate> ops;  // measured, by name; before the numbers above where there is one
  Bytes reserved = 0;       // besides `memory`: context, workspaces and buffers that libraries keep
  double interference = 0;  // by what part computation is slower while a collective runs beside it
  friend bool operator==(const DeviceType&, const DeviceType&) = default;
};

// Known accelerators, by name; see catalogue.cc for the numbers and where they are from.
const std::vector<DeviceType>& device_catalogue();

enum class LinkKind { switched, ring, bus };
const char* to_string(LinkKind kind);

struct Link {
  LinkKind kind = LinkKind::switched;
  BytesPerSecond bandwidth =
      0;  // switched: of one port in one direction; ring: of one hop in one direction; bus: in all
  Seconds latency = 0;    // one way, of one message
  std::string type = {};  // of the catalogue of links, empty: only what is above is known
  friend bool operator==(const Link&, const Link&) = default;
};

// A kind of link and what collectives were measured to get out of it: five constants.
struct LinkType {
  std::string name;
  BytesPerSecond nominal = 0;  // of a port, or of one direct link, in one direction, as it is sold
  double share = 1;            // of `nominal` that collectives of large tensors reach
  double message = 1;          // of `nominal * share` that one message between two devices reaches
  Seconds latency = 0;         // one way, a round of a collective included
  Seconds start = 0;           // of a collective on the devices, whatever its size
};
// By name; see catalogue.cc.
const std::vector<LinkType>& link_catalogue();
// Null if there is none of the name.
const LinkType* find_link_type(const std::string& name);

// Between two devices of a group, both ways; they are counted from the group's first.
struct DirectLink {
  int a = 0, b = 0;
  int links = 1;                 // as many side by side
  BytesPerSecond bandwidth = 0;  // of one of them in one direction
  Seconds latency = 0;
  friend bool operator==(const DirectLink&, const DirectLink&) = default;
};

// A port of a group on the link above it, for the devices that are near it.
struct Nic {
  BytesPerSecond bandwidth = 0;  // in one direction
  std::vector<int> near;         // devices, counted from the group's first, ascending
  friend bool operator==(const Nic&, const Nic&) = default;
};

// The collectives of a group as they were measured. With p devices, S bytes in all and m the
// largest share, each takes rounds * max(least, bytes a round / bandwidth + latency):
//
//   all_reduce                   2 (p-1) rounds of S / p
//   all_gather, reduce_scatter   p-1 rounds of m S
//   all_to_all                   p-1 rounds; in all as many bytes through the slowest port as there
//                                are behind it for others
//   broadcast                    p-1 rounds of S
inline constexpr Collective kMeasuredCollectives[] = {
    Collective::all_reduce, Collective::all_gather, Collective::reduce_scatter,
    Collective::all_to_all, Collective::broadcast};

struct CollectiveRate {
  Collective collective = Collective::all_reduce;
  Seconds latency = 0;  // of a round
  BytesPerSecond bandwidth = 0;
  Seconds least = 0;  // of a round: what is acknowledged travels on a far link twice, however small
  friend bool operator==(const CollectiveRate&, const CollectiveRate&) = default;
};

using DeviceId = Id<struct DeviceTag>;
using GroupId = Id<struct GroupTag>;

struct Device {
  int type = 0;  // into Cluster::types
  GroupId parent;
};

struct Group {
  std::string name;
  GroupId parent;                        // invalid for the root
  Link link;                             // joins the children
  BytesPerSecond uplink = 0;             // this group's port on the link above, if > 0
  std::vector<DirectLink> direct;        // each pair once, a < b
  std::vector<Nic> nics;                 // each device below is near one; empty: one port
  std::vector<CollectiveRate> measured;  // over all devices below; at most one of a form
  Backend backend = {};                  // between the devices below; without a name: not said
  std::vector<GroupId> children;         // either groups ...
  int first_device = 0;  // ... or devices; both kinds of group know the range of devices below them
  int device_count = 0;
};

struct Cluster {
  std::string name;
  std::vector<DeviceType> types;  // those in use
  std::vector<Device> devices;    // in file order: the rank order
  std::vector<Group> groups;      // groups[0] is the root; parents before children

  int size() const { return static_cast<int>(devices.size()); }
  const DeviceType& type_of(int device) const { return types[devices[device].type]; }
  std::vector<int> count_by_type() const;
};

// Limits on what a file may ask for.
#ifdef MOTLEY_FUZZ
constexpr int kMaxDevices = 1 << 9;  // the same checks, sooner
#else
constexpr int kMaxDevices = 1 << 17;
#endif

// Reads a cluster file, or the name of a shipped one ("hap-64": clusters/hap-64.yaml beside the
// program or in the source tree). Throws UserError naming file, field, value and remedy.
Cluster load_cluster(const std::string& path_or_name);
Cluster parse_cluster(const std::string& yaml, const std::string& name);

// The YAML text of a cluster; parse_cluster(to_yaml(c)) equals c.
std::string to_yaml(const Cluster& cluster);

// A cluster of at most `workers` devices that this machine can emulate and on which time runs
// slower, but computation and communication in the same proportion. Devices are taken one by one
// from the child of the root, then the type, that has given the fewest. Speeds are proportional to
// flops and add up to `cores` (none above one core, none below a hundredth). Bandwidths are divided
// by what the devices are slowed down by, and shrink with the devices that share them; latencies
// stay.
Cluster scaled_down(const Cluster& cluster, int workers, double cores = 1.1);

// A flat cluster for tests: `counts[i]` devices of `types[i]`, all on one switch.
Cluster flat_cluster(const std::vector<DeviceType>& types, const std::vector<int>& counts,
                     Link link);

}  // namespace motley
