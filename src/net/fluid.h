// A fluid network simulator: what is in flight shares the links max-min fairly.
//
// A *transfer* is a set of unit flows that move in step, such as the hops of a pipelined ring:
// every flow carries `bytes`, `uses` says how many of the flows cross each link, and all advance at
// the one rate r (bytes/s of a flow). A *chain* is transfers one after another. All chains start at
// 0.
//
// At any moment the rates of the active transfers are max-min fair under
//
//     for every link l:      sum over transfers t of  uses(t, l) * r(t)  <=  bandwidth(l)
//     for every transfer t:  r(t) <= cap(t)
//
// that is, no rate can grow without shrinking one that is not larger. They are found by progressive
// filling: all rates rise together; when a link is full the transfers on it are frozen. When a
// transfer ends, the rates are computed anew. Transfers that never share a link, directly or
// through others, are simulated apart.
//
// Cost: filling is O(U log L) for U uses on L links, once per event; an event is a transfer that
// starts or ends, and those at the same moment (within 1e-12 of the time) are one event.
#pragma once

#include <limits>
#include <vector>

#include "core/units.h"
#include "net/topology.h"

namespace motley::net {

struct Transfer {
  Bytes bytes = 0;            // of one unit flow
  std::vector<LinkUse> uses;  // flows > 0, each link once
  BytesPerSecond cap = std::numeric_limits<double>::infinity();
  Seconds delay = 0;  // latency, before the first byte moves
};

using Chain = std::vector<Transfer>;

struct FluidResult {
  Seconds makespan = 0;
  std::vector<Seconds> finish;  // of each chain
  int64_t events = 0;
};

FluidResult simulate(const std::vector<NetworkLink>& links, const std::vector<Chain>& chains);

// The max-min fair rates of transfers active together. A transfer that uses no link and has no cap
// has an infinite rate.
std::vector<double> max_min_rates(const std::vector<NetworkLink>& links,
                                  const std::vector<const Transfer*>& active);

}  // namespace motley::net
