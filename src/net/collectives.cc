#include "net/collectives.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace motley {

namespace {

constexpr int kMaxHops = 256;  // rings longer than this have their rounds not looked at one by one

}  // namespace

CollectiveModel::CollectiveModel(const Cluster& cluster,
                                 const std::vector<ReductionProgram>& reductions)
    : devices_(cluster.size()) {
  for (const ReductionProgram& r : reductions)
    reductions_.push_back({{}, {}, r.from, r.fixed, r.seconds_per_byte, r.least});
  bandwidth_ = std::numeric_limits<double>::infinity();
  if (devices_ == 1) {
    rates_.fill({Collective::all_reduce, 0, bandwidth_});
    return;
  }
  for (const Group& group : cluster.groups)
    if (group.children.size() > 1 || (group.children.empty() && group.device_count > 1))
      latency_ = std::max(latency_, group.link.latency);
  ports_ = ports_of(cluster, GroupId(0));
  for (const Port& port : ports_) bandwidth_ = std::min(bandwidth_, port.bandwidth);
  rates_.fill({Collective::all_reduce, latency_, bandwidth_});
  for (const CollectiveRate& rate : cluster.groups[0].measured) {
    rates_[static_cast<size_t>(rate.collective)] = rate;
    measured_[static_cast<size_t>(rate.collective)] = true;
  }
  if (cluster.groups[0].measured.empty() || devices_ > kMaxHops) return;
  slowness_.assign(devices_, 0);
  for (int d = 0; d < devices_; ++d)
    for (const Port& port : ports_) {
      auto below = [&](int x) { return x >= port.first && x < port.first + port.count; };
      if (below(d) != below((d + 1) % devices_))
        slowness_[d] = std::max(slowness_[d], bandwidth_ / port.bandwidth);
    }
}

Seconds CollectiveModel::all_reduce(Bytes bytes) const {
  for (size_t i = reductions_.size(); i-- > 0;)
    if (bytes >= reductions_[i].from) return reductions_[i].seconds(bytes);
  return plain_all_reduce(bytes);
}

Seconds CollectiveModel::plain_all_reduce(Bytes bytes) const {
  if (devices_ == 1) return 0;
  double p = devices_, steps = std::ceil(std::log2(p));
  if (measured_[static_cast<size_t>(Collective::all_reduce)]) {
    const CollectiveRate& r = rate(Collective::all_reduce);
    return 2 * (p - 1) * std::max(r.least, bytes / p / r.bandwidth + r.latency);
  }
  return std::min(2 * (p - 1) / p * bytes / bandwidth_ + 2 * (p - 1) * latency_,
                  2 * bytes / bandwidth_ + 2 * steps * latency_);
}

Seconds CollectiveModel::least_all_reduce() const {
  const double p = devices_;
  return measured_[static_cast<size_t>(Collective::all_reduce)]
             ? 2 * (p - 1) * rate(Collective::all_reduce).least
             : 0;
}

Seconds CollectiveModel::fixed_all_reduce() const {
  const double p = devices_;
  return measured_[static_cast<size_t>(Collective::all_reduce)]
             ? 2 * (p - 1) * rate(Collective::all_reduce).latency
             : plain_all_reduce(0);
}

CollectiveModel::ShareProfile CollectiveModel::profile(const std::vector<double>& shares) const {
  ShareProfile result;
  result.least = shares[0];
  std::vector<double> prefix(shares.size() + 1, 0);
  for (size_t d = 0; d < shares.size(); ++d) {
    prefix[d + 1] = prefix[d] + shares[d];
    result.largest = std::max(result.largest, shares[d]);
    result.least = std::min(result.least, shares[d]);
  }
  for (const Port& port : ports_) {
    double s = prefix[port.first + port.count] - prefix[port.first];
    result.exchange = std::max(result.exchange, s * (1 - s) / port.bandwidth);
  }
  const int p = devices_;
  result.rounds = (p - 1) * result.largest;
  for (int d = 0; d < p; ++d)
    result.chain =
        std::max(result.chain, (slowness_.empty() ? 1 : slowness_[d]) * (1 - shares[(d + 1) % p]));
  if (slowness_.empty()) return result;
  result.rounds = 0;
  for (int round = 0; round + 1 < p; ++round) {
    double slowest = 0;
    for (int d = 0; d < p; ++d)
      slowest = std::max(slowest, slowness_[d] * shares[(d - round + p) % p]);
    result.rounds += slowest;
  }
  return result;
}

Seconds CollectiveModel::rounds(Collective collective, Bytes bytes,
                                const ShareProfile& shares) const {
  if (devices_ == 1) return 0;
  const CollectiveRate& r = rate(collective);
  const double p = devices_;
  const double latencies =
      measured_[static_cast<size_t>(collective)] ? p - 1 : std::ceil(std::log2(p));
  return std::max(latencies * r.least, shares.rounds * bytes / r.bandwidth + latencies * r.latency);
}

Seconds CollectiveModel::chains(Collective collective, Bytes bytes,
                                const ShareProfile& shares) const {
  if (devices_ == 1) return 0;
  const CollectiveRate& r = rate(collective);
  const double p = devices_;
  const double awaited = std::max(0.0, chunk_bytes(shares.largest * bytes) - shares.least * bytes);
  return (shares.chain * bytes + (p - 2) * awaited) / r.bandwidth + 2 * (p - 1) * r.latency;
}

Seconds CollectiveModel::all_gather_grouped(Bytes bytes, const ShareProfile& shares) const {
  return chains(Collective::all_gather, bytes, shares);
}

Seconds CollectiveModel::reduce_scatter_grouped(Bytes bytes, const ShareProfile& shares) const {
  return chains(Collective::reduce_scatter, bytes, shares);
}

Seconds CollectiveModel::all_gather(Bytes bytes, const ShareProfile& shares) const {
  return rounds(Collective::all_gather, bytes, shares);
}

Seconds CollectiveModel::reduce_scatter(Bytes bytes, const ShareProfile& shares) const {
  return rounds(Collective::reduce_scatter, bytes, shares);
}

Seconds CollectiveModel::all_to_all(Bytes bytes, const ShareProfile& shares) const {
  if (devices_ == 1) return 0;
  const CollectiveRate& r = rate(Collective::all_to_all);
  return shares.exchange * bytes * (bandwidth_ / r.bandwidth) + exchange_latency();
}

Seconds CollectiveModel::exchange_latency() const {
  const double p = devices_;
  const double latencies =
      measured_[static_cast<size_t>(Collective::all_to_all)] ? p - 1 : std::ceil(std::log2(p));
  return latencies * rate(Collective::all_to_all).latency;
}

std::vector<CollectiveModel::ExchangePort> CollectiveModel::exchange_ports() const {
  std::vector<ExchangePort> result;
  const double slowness = bandwidth_ / rate(Collective::all_to_all).bandwidth;
  for (const Port& port : ports_)
    result.push_back({port.first, port.count, slowness / port.bandwidth});
  return result;
}

double CollectiveModel::exchange(const std::vector<double>& from,
                                 const std::vector<double>& to) const {
  if (devices_ == 1 || from == to) return 0;
  std::vector<double> a(from.size() + 1, 0), b(to.size() + 1, 0);
  for (size_t d = 0; d < from.size(); ++d) {
    a[d + 1] = a[d] + from[d];
    b[d + 1] = b[d] + to[d];
  }
  double worst = 0;
  for (const ExchangePort& port : exchange_ports()) {
    const int end = port.first + port.count;
    const double stays =
        std::max(0.0, std::min(a[end], b[end]) - std::max(a[port.first], b[port.first]));
    const double held = a[end] - a[port.first], needed = b[end] - b[port.first];
    worst = std::max(worst, (std::max(held, needed) - stays) * port.seconds_per_byte);
  }
  return worst;
}

Seconds CollectiveModel::exchange(Bytes bytes, double seconds_per_byte) const {
  return seconds_per_byte > 0 ? seconds_per_byte * bytes + exchange_latency() : 0;
}

}  // namespace motley
