// Closed-form times of collectives over all devices of a cluster, for searches that price thousands
// of them.
//
// A ring visits the devices in the order of the tree, so that it enters every group once; it is
// as fast as the slowest port it crosses. A tree (recursive halving and doubling) pays fewer
// latencies; small messages take the cheaper of both. With p devices, S bytes in all, B the slowest
// port and L the largest latency on the way:
//
//   all-reduce       min( 2(p-1)/p S/B + 2(p-1) L,  2 S/B + 2 ceil(log2 p) L )
//   all-gather       shards padded to the largest, m = the largest share:  min( (p-1) m S/B + (p-1)
//   L,  ... log2 ... ) reduce-scatter   as all-gather all-to-all       per port: a group with share
//   s of the tensor sends s (1 - s) S and receives as much; the worst port
//
// Where the collectives of the whole cluster were measured (CollectiveRate), they take their
// measured rounds instead. A round of a ring of uneven shards then takes as long as the slowest of
// the transfers it consists of: the largest shard goes over the slowest link in some rounds only.
//
// An all-reduce that a reduction program (reduction.h) takes over costs what the program says.
//
// An exchange turns pieces in some shares into pieces of the same dimension in others (HAP section
// 5.2). Devices hold intervals in device order, so a port sends what the devices below it held and
// no longer need, and receives what they did not hold; the worst port, and the latencies of an
// all-to-all. Nothing at all where the shares are equal.
//
// All-gather and reduce-scatter have a second form, grouped: a pipelined chain around the ring for
// every shard, all chains at once, in chunks. What crosses a link is all shards but one, however
// uneven they are. A device sends its own shard first; only if that is shorter than a chunk does it
// wait for its neighbour's, so the p-2 devices that pass one on fill their links with the rest; and
// every chain pays to start:
//
//   (1 - least share) S/B + (p-2) max(0, chunk - least share S)/B + 2(p-1) L
//
// The fluid simulator of this module (fluid.h) is the reference for what sharing and other
// algorithms cost.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "cluster/cluster.h"
#include "cluster/part.h"
#include "core/units.h"
#include "net/reduction.h"

namespace motley {

// Of the messages of a grouped all-gather or reduce-scatter: an eighth of the largest piece, from
// 16 to 256 KiB.
constexpr double chunk_bytes(double largest_piece) {
  return std::min(largest_piece, std::clamp(largest_piece / 8, 16. * 1024, 256. * 1024));
}

class CollectiveModel {
 public:
  // `reductions`: what large all-reduces do instead, by ascending `from`.
  explicit CollectiveModel(const Cluster& cluster,
                           const std::vector<ReductionProgram>& reductions = {});

  // What the times below need of the shares (fraction of a tensor that each device holds, sum 1):
  // one pass over the devices, after which a collective costs a few operations whatever the size of
  // the cluster.
  struct ShareProfile {
    double largest = 0, least = 0;  // shares
    double exchange = 0;  // max over ports of s (1 - s) / bandwidth, s the share below the port
    double rounds = 0;  // of an all-gather: sum over rounds of the largest share on a slowest link
    double chain = 0;   // of a grouped one: largest share of the tensor that crosses a link
  };
  ShareProfile profile(const std::vector<double>& shares) const;
  // Seconds per byte of the whole tensor that an exchange between these shares takes, latencies
  // apart.
  double exchange(const std::vector<double>& from, const std::vector<double>& to) const;
  // The devices below a port, and seconds per byte that crosses it in one direction of an exchange.
  struct ExchangePort {
    int first, count;
    double seconds_per_byte;
  };
  std::vector<ExchangePort> exchange_ports() const;

  // `bytes`: size of the whole tensor.
  Seconds all_reduce(Bytes bytes) const;
  Seconds plain_all_reduce(Bytes bytes) const;  // whatever reductions there are
  // What small ones take at least where that was measured; else 0.
  Seconds least_all_reduce() const;
  // Latencies of one that bytes decide: plain_all_reduce(0) where no least was measured.
  Seconds fixed_all_reduce() const;
  Seconds all_gather(Bytes bytes, const ShareProfile& shares) const;
  Seconds reduce_scatter(Bytes bytes, const ShareProfile& shares) const;
  Seconds all_gather_grouped(Bytes bytes, const ShareProfile& shares) const;
  Seconds reduce_scatter_grouped(Bytes bytes, const ShareProfile& shares) const;
  Seconds all_to_all(Bytes bytes, const ShareProfile& shares) const;
  // `seconds_per_byte`: exchange() of the shares.
  Seconds exchange(Bytes bytes, double seconds_per_byte) const;

  // all_gather = fixed + slope * largest share, for the load-balancing LP; the same for
  // reduce_scatter.
  Seconds latency_of_ring() const { return rate(Collective::all_reduce).latency; }
  BytesPerSecond ring_bandwidth() const { return rate(Collective::all_reduce).bandwidth; }
  int devices() const { return devices_; }

 private:
  const CollectiveRate& rate(Collective collective) const {
    return rates_[static_cast<size_t>(collective)];
  }
  Seconds exchange_latency() const;
  // p-1 rounds of the largest share.
  Seconds rounds(Collective collective, Bytes bytes, const ShareProfile& shares) const;
  // A chain per share.
  Seconds chains(Collective collective, Bytes bytes, const ShareProfile& shares) const;

  int devices_;
  std::vector<ReductionProgram> reductions_;  // their times alone
  BytesPerSecond bandwidth_ = 0;              // of the slowest port on a ring through all devices
  Seconds latency_ = 0;                       // the largest on the way
  std::vector<Port> ports_;
  std::vector<double>
      slowness_;  // [device] of the hop to the next one: 1 if it crosses the slowest
                  // port; empty where nothing was measured or for many devices
  std::array<CollectiveRate, kCollectives>
      rates_;  // [collective] of the slowest port if not measured
  std::array<bool, kCollectives> measured_{};
};

}  // namespace motley
