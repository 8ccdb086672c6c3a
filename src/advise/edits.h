// "What if": edits of a cluster in words. Every device keeps its identity, so that a plan for one
// cluster can be tried on another that has the same devices.
//
//   add 8 H100-80GB               machines like those of the type, or of 8 joined like the best
//   add 8 V100-16GB link 150 GB/s   that there are; `link`: what joins the devices of a machine
//   drop v100                     devices of a type or of groups of that name
//   drop 4 v100                   the last four of them
//   replace v100 with H100-80GB   in the same places
//   cross-link 100 Gbps           what joins the children of the root; cross-link latency 5 us
//   link node 600 GB/s            what joins the members of groups of that name; link node latency
//   memory v100 32 GiB            of each device
//   speed v100 1.5                times as fast
//
// Several edits are joined by ";" or " and ". Names are those of types and groups, in either case,
// or their beginnings.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cluster/cluster.h"

namespace motley::advise {

struct Variant {
  std::string name;  // the edit, or "as it is"
  Cluster cluster;
  std::vector<int64_t> ids;  // [device]; equal for the same device
  std::string key;           // equal for the same devices in the same cluster
};

// The cluster as it is: device d is d.
Variant unchanged(const Cluster& cluster);

// Throws UserError that names the edit and what is wrong with it. New devices get ids from *next
// on.
Variant edited(const Variant& variant, const std::string& edit, int64_t* next);

// Without all but some devices. REQUIRES: `keep` is ascending, not empty.
Variant part_of(const Variant& variant, const std::vector<int>& keep, const std::string& name);

// Devices become another type in their places; they are new devices.
Variant replaced(const Variant& variant, const std::vector<int>& devices, const DeviceType& type,
                 const std::string& name, int64_t* next);

}  // namespace motley::advise
