// What rings of devices take of the links, worked out once for each set of devices: a search asks
// for few sets over and over.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <vector>

#include "net/topology.h"

namespace motley::grid {

class RingUses {
 public:
  // Adds those of an all-reduce's ring of devices, in the order of the cluster file. All calls are
  // of one topology. For several threads.
  void add(const net::Topology& topology, const std::vector<int>& devices, net::LinkLoad* load);

 private:
  std::mutex mutex_;  // of what follows
  std::map<std::vector<int>, std::vector<net::LinkUse>> known_;
  size_t numbers_ = 0;  // that are kept, about
};

}  // namespace motley::grid
