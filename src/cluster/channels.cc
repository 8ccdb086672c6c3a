#include "cluster/channels.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <mutex>

#include "core/error.h"

namespace motley {

namespace {

constexpr int kTried = 200000;   // steps of the search
constexpr size_t kKnown = 4096;  // answers kept
constexpr double kSlack = 1e-9;

struct Edge {
  int links = 0;
  BytesPerSecond bandwidth = 0;
};

class Packing {
 public:
  Packing(int n, const std::vector<DirectLink>& links, bool ring, int first)
      : n_(n), ring_(ring), first_(first), edges_(n, std::vector<Edge>(n)) {
    for (const DirectLink& l : links) {
      MOTLEY_CHECK(l.a >= 0 && l.b >= 0 && l.a < n && l.b < n && l.a != l.b && l.links > 0);
      edges_[l.a][l.b] = edges_[l.b][l.a] = {l.links, l.bandwidth};
    }
  }

  std::vector<Channel> run() {
    pack(0);
    return best_;
  }

 private:
  // Of the channels that the links left at one device allow.
  BytesPerSecond bound() const {
    BytesPerSecond least = std::numeric_limits<double>::infinity(), most = 0;
    for (int v = 0; v < n_; ++v) {
      std::vector<BytesPerSecond> ends;
      for (const Edge& e : edges_[v]) ends.insert(ends.end(), e.links, e.bandwidth);
      std::sort(ends.rbegin(), ends.rend());
      BytesPerSecond sum = 0;
      const size_t taken = ring_ ? 2 : 1;  // a chain may end at a device
      for (size_t i = taken - 1; i < ends.size(); i += taken) sum += ends[i];
      least = std::min(least, sum);
      for (BytesPerSecond b : ends) most += b / 2;
    }
    return std::min(least, most / (ring_ ? n_ : n_ - 1));
  }

  void pack(BytesPerSecond sum) {
    if (sum > most_ * (1 + kSlack)) most_ = sum, best_ = now_;
    if (sum + bound() <= most_ * (1 + kSlack) || tried_ > kTried) return;
    std::vector<int> order;
    std::vector<bool> used(n_, false);
    const int from = ring_ ? 0 : first_;
    for (int v = from < 0 ? 0 : from; v < (from < 0 ? n_ : from + 1); ++v) {
      order = {v};
      used[v] = true;
      extend(&order, &used, std::numeric_limits<double>::infinity(), sum);
      used[v] = false;
    }
  }

  void extend(std::vector<int>* order, std::vector<bool>* used, BytesPerSecond slowest,
              BytesPerSecond sum) {
    if (++tried_ > kTried) return;
    const int last = order->back();
    if (static_cast<int>(order->size()) == n_) {
      // A ring is met in both directions, and so is a chain that may begin anywhere.
      if ((ring_ || first_ < 0) && (*order)[ring_ ? 1 : 0] > last) return;
      const Edge& back = edges_[last][(*order)[0]];
      if (ring_ && back.links == 0) return;
      if (!now_.empty() && *order < now_.back().order) return;  // in another sequence
      const Channel channel{*order, ring_ ? std::min(slowest, back.bandwidth) : slowest};
      take(channel.order, -1);
      now_.push_back(channel);
      pack(sum + channel.bandwidth);
      now_.pop_back();
      take(channel.order, 1);
      return;
    }
    for (int v = 0; v < n_; ++v) {
      const Edge& e = edges_[last][v];
      if ((*used)[v] || e.links == 0) continue;
      order->push_back(v);
      (*used)[v] = true;
      extend(order, used, std::min(slowest, e.bandwidth), sum);
      (*used)[v] = false;
      order->pop_back();
    }
  }

  void take(const std::vector<int>& order, int links) {
    for (size_t i = 0; i + (ring_ ? 0 : 1) < order.size(); ++i) {
      const int a = order[i], b = order[(i + 1) % order.size()];
      edges_[a][b].links += links;
      edges_[b][a].links = edges_[a][b].links;
    }
  }

  const int n_;
  const bool ring_;
  const int first_;
  std::vector<std::vector<Edge>> edges_;
  std::vector<Channel> now_, best_;
  BytesPerSecond most_ = 0;
  int tried_ = 0;
};

// Both a ring and a chain of two devices is one of their links.
std::vector<Channel> links_of_two(const std::vector<DirectLink>& links, int first) {
  const std::vector<int> order = first == 1 ? std::vector<int>{1, 0} : std::vector<int>{0, 1};
  std::vector<Channel> channels;
  for (const DirectLink& l : links) channels.insert(channels.end(), l.links, {order, l.bandwidth});
  return channels;
}

// The same machine is asked for again and again.
std::vector<Channel> remembered(int n, const std::vector<DirectLink>& links, bool ring, int first) {
  using Key = std::vector<double>;
  static std::mutex mutex;
  static std::map<Key, std::vector<Channel>> known;
  Key key = {static_cast<double>(n), ring ? 1. : 0., static_cast<double>(first)};
  for (const DirectLink& l : links)
    key.insert(key.end(), {static_cast<double>(l.a), static_cast<double>(l.b),
                           static_cast<double>(l.links), l.bandwidth});
  {
    const std::lock_guard lock(mutex);
    if (const auto it = known.find(key); it != known.end()) return it->second;
  }
  std::vector<Channel> channels = Packing(n, links, ring, first).run();
  const std::lock_guard lock(mutex);
  if (known.size() > kKnown) known.clear();
  return known.emplace(std::move(key), std::move(channels)).first->second;
}

}  // namespace

std::vector<Channel> ring_channels(int n, const std::vector<DirectLink>& links) {
  MOTLEY_CHECK(n >= 2);
  return n == 2 ? links_of_two(links, 0) : remembered(n, links, true, 0);
}

std::vector<Channel> chain_channels(int n, const std::vector<DirectLink>& links, int first) {
  MOTLEY_CHECK(n >= 2 && first < n);
  return n == 2 ? links_of_two(links, first) : remembered(n, links, false, first);
}

std::vector<DirectLink> links_among(const std::vector<DirectLink>& links,
                                    const std::vector<int>& devices) {
  std::vector<DirectLink> among;
  const auto place = [&](int d) {
    const auto at = std::find(devices.begin(), devices.end(), d);
    return at == devices.end() ? -1 : static_cast<int>(at - devices.begin());
  };
  for (DirectLink link : links) {
    link.a = place(link.a), link.b = place(link.b);
    if (link.a > link.b) std::swap(link.a, link.b);
    if (link.a >= 0) among.push_back(link);
  }
  return among;
}

BytesPerSecond direct_bandwidth(int n, const std::vector<DirectLink>& links) {
  const BytesPerSecond rings = ring_bandwidth(n, ring_channels(n, links));
  if (rings > 0) return rings;
  BytesPerSecond chains = 0;
  for (const Channel& channel : chain_channels(n, links)) chains += channel.bandwidth;
  return kChainShare * chains * 2 * (n - 1) / n;
}

std::vector<int> chain_from(int n, const std::vector<DirectLink>& links,
                            const std::vector<int>& ends) {
  std::vector<std::vector<bool>> joined(n, std::vector<bool>(n));
  for (const DirectLink& l : links) joined[l.a][l.b] = joined[l.b][l.a] = true;
  std::vector<int> order, open;  // open: ends anywhere
  std::vector<bool> used(n);
  int tried = 0;
  const std::function<bool(int)> extend = [&](int v) {
    if (++tried > kTried) return false;
    order.push_back(v);
    used[v] = true;
    if (static_cast<int>(order.size()) == n) {
      if (open.empty()) open = order;
      if (std::find(ends.begin(), ends.end(), v) != ends.end()) return true;
    }
    for (int w = 0; w < n; ++w)
      if (!used[w] && joined[v][w] && extend(w)) return true;
    order.pop_back();
    used[v] = false;
    return false;
  };
  for (int end : ends)
    if (extend(end)) return order;
  return open;
}

BytesPerSecond ring_bandwidth(int n, const std::vector<Channel>& channels) {
  BytesPerSecond sum = 0;
  for (const Channel& channel : channels) sum += (n == 2 ? 1 : 2) * channel.bandwidth;
  return sum;
}

}  // namespace motley
