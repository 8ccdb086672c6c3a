// Groups of devices that run something together.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "cluster/cluster.h"
#include "cost/cost.h"
#include "net/device_states.h"
#include "net/reduction.h"

namespace motley::planner {

// Groups of devices as clusters of their own, each kind once: groups that look alike are one. For
// several threads, on which the numbers of kinds depend.
class DeviceGroups {
 public:
  struct Kind {
    int number = 0;
    Cluster cluster;
    std::vector<ReductionProgram> reductions;  // of all its devices
    OverReplicas replicas;
    CostModel model;
    Kind(int n, Cluster c, OverReplicas r, bool planned);
  };

  // `planned`: large all-reduces are planned reductions, else the plain collective.
  explicit DeviceGroups(const Cluster& cluster, bool planned = true)
      : cluster_(cluster), planned_(planned) {}
  const Cluster& whole() const { return cluster_; }
  bool planned() const { return planned_; }
  // REQUIRES: devices ascending. The reference stays valid.
  const Kind& of(const std::vector<int>& devices);
  // The k-th of groups that communicate at the same time, a stage's in all replicas: what they
  // share is divided among them. `joint`, if given, prices gradients as reduced over all of them.
  const Kind& of(const net::Groups& groups, size_t k, const ReductionProgram* joint);

 private:
  const Kind& alone(const std::vector<int>& devices);
  const Kind& kind_of(Cluster part, OverReplicas replicas);

  const Cluster& cluster_;
  const bool planned_;
  std::mutex mutex_;  // of what follows
  std::map<std::vector<int>, const Kind*> by_devices_;
  struct Together {
    int number = 0;
    Cluster shared;  // what each of the groups has of it
  };
  std::map<net::Groups, Together> together_;
  std::map<std::tuple<int, size_t, bool>, const Kind*> by_groups_;  // by number of Together
  std::map<std::string, std::unique_ptr<Kind>> kinds_;              // by text
};

// Groups of a cluster that hold devices and no other groups.
int count_nodes(const Cluster& cluster);

// Seconds of a value of `bytes` from one group of devices to another, each receiver taking all of
// it (`whole`) or its part.
Seconds handover(const Cluster& cluster, const std::vector<int>& from, const std::vector<int>& to,
                 Bytes bytes, bool whole);

}  // namespace motley::planner
