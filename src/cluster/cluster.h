// The cluster: which devices there are, how fast each is, and how they are joined.
//
// A cluster is a tree. Leaves are devices; every inner node is a Group whose children are joined by
// its link: a switch (every child has a full-duplex port of `bandwidth`), a ring, or a bus (one
// half-duplex medium shared by all children). The port of a node on the switch above it is that
// node's NIC: all its devices share it. `uplink` overrides it for one group, so that hosts with
// different NICs can stand side by side.
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

#include "core/id.h"
#include "core/units.h"

namespace motley {

struct DeviceType {
  std::string name;
  FlopsPerSecond flops = 0;             // sustained, single precision, large matrix products
  FlopsPerSecond half_flops = 0;        // sustained, 16-bit inputs
  Bytes memory = 0;                     // usable by the training process
  BytesPerSecond memory_bandwidth = 0;  // sustained
  Seconds overhead = 0;                 // per operator launch
  double speed =
      1;  // emulation: share of one core of the machine it is emulated on (0: not emulated)
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
  Seconds latency = 0;  // one way, of one message
  friend bool operator==(const Link&, const Link&) = default;
};

using DeviceId = Id<struct DeviceTag>;
using GroupId = Id<struct GroupTag>;

struct Device {
  int type = 0;  // into Cluster::types
  GroupId parent;
};

struct Group {
  std::string name;
  GroupId parent;                 // invalid for the root
  Link link;                      // joins the children
  BytesPerSecond uplink = 0;      // this group's port on the link above, if > 0
  std::vector<GroupId> children;  // either groups ...
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
constexpr int kMaxDevices = 1 << 17;

// Reads a cluster file, or the name of a shipped one ("hap-64": clusters/hap-64.yaml beside the
// program or in the source tree). Throws UserError naming file, field, value and mend.
Cluster load_cluster(const std::string& path_or_name);
Cluster parse_cluster(const std::string& yaml, const std::string& name);

// The YAML text of a cluster; parse_cluster(to_yaml(c)) equals c.
std::string to_yaml(const Cluster& cluster);

// A flat cluster for tests: `counts[i]` devices of `types[i]`, all on one switch.
Cluster flat_cluster(const std::vector<DeviceType>& types, const std::vector<int>& counts,
                     Link link);

}  // namespace motley
