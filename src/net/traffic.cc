#include "net/traffic.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "cluster/channels.h"
#include "core/error.h"

namespace motley::net {

const char* to_string(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::ring:
      return "ring";
    case Algorithm::tree:
      return "tree";
    case Algorithm::hierarchical:
      return "hierarchical";
    case Algorithm::direct:
      return "direct";
    case Algorithm::automatic:
      return "automatic";
  }
  return "?";
}

Algorithm parse_algorithm(const std::string& name) {
  for (Algorithm a : {Algorithm::ring, Algorithm::tree, Algorithm::hierarchical, Algorithm::direct,
                      Algorithm::automatic})
    if (name == to_string(a)) return a;
  throw user_error("net", "algorithm is '{}'; give ring, tree, hierarchical, direct or automatic",
                   name);
}

int tree_parent(int ranks, int rank) {
  if (rank == 0) return -1;
  int bit = rank & -rank;
  int parent = (rank ^ bit) | (bit << 1);
  return parent < ranks ? parent : rank ^ bit;
}

int second_tree_parent(int ranks, int rank) {
  if (ranks % 2 == 0) {
    int parent = tree_parent(ranks, ranks - 1 - rank);
    return parent < 0 ? -1 : ranks - 1 - parent;
  }
  int parent = tree_parent(ranks, (rank + ranks - 1) % ranks);
  return parent < 0 ? -1 : (parent + 1) % ranks;
}

namespace {

using Run = std::vector<int>;

// Builds the transfers of one group.
class Builder {
 public:
  // `load` is empty, and is empty again when done.
  Builder(const Topology& topology, const std::vector<int>& devices, Bytes bytes,
          const Tuning& tuning, LinkLoad* load)
      : net_(topology),
        n_(static_cast<double>(devices.size())),
        bytes_(bytes),
        tuning_(tuning),
        load_(*load) {
    MOTLEY_CHECK(devices.size() >= 2 && bytes >= 0);
    order_ = devices;
    // Nearest to the root first: each group of the tree is then one stretch.
    int root = devices[0];
    std::vector<std::pair<int, int>> keyed;
    for (int d : devices) keyed.push_back({d == root ? -1000 : -net_.common_depth(root, d), d});
    std::sort(keyed.begin(), keyed.end());
    for (size_t i = 0; i < keyed.size(); ++i) {
      order_[i] = keyed[i].second;
      MOTLEY_CHECK(i == 0 || order_[i] != order_[i - 1], "device {} twice", order_[i]);
    }
    for (int d : order_) {
      if (runs_.empty() || net_.island(runs_.back()[0]) != net_.island(d)) runs_.emplace_back();
      runs_.back().push_back(d);
    }
  }

  Chain build(Collective collective, Algorithm algorithm) {
    switch (algorithm) {
      case Algorithm::ring:
        ring(collective);
        break;
      case Algorithm::tree:
        tree(collective);
        break;
      case Algorithm::hierarchical:
        hierarchical(collective);
        break;
      case Algorithm::direct:
        direct(collective);
        break;
      case Algorithm::automatic:
        MOTLEY_CHECK(false, "chosen before");
    }
    if (!chain_.empty()) chain_[0].delay += tuning_.launch;
    return std::move(chain_);
  }

 private:
  // Ends a transfer: what has been loaded, `bytes` a unit flow.
  void emit(Bytes bytes, Seconds delay) {
    Transfer t;
    t.bytes = bytes;
    t.uses = load_.take();
    t.delay = delay;
    chain_.push_back(std::move(t));
  }

  // Loads `flows` on one ring, half each way round, and returns the sum of the latencies of its
  // hops.
  Seconds load_one_ring(const std::vector<int>& ring, double flows) {
    Seconds latency = 0;
    for (size_t i = 0; i < ring.size(); ++i) {
      int next = ring[(i + 1) % ring.size()];
      net_.add_path(ring[i], next, flows / 2, &load_);
      net_.add_path(next, ring[i], flows / 2, &load_);
      latency += net_.latency(ring[i], next);
    }
    return latency;
  }
  // Loads what the devices' rings carry of one unit flow: the channels of their direct links, each
  // as much as it is fast, or one ring in the order given; returns the greatest latency.
  Seconds load_ring(const std::vector<int>& devices) {
    const std::vector<Channel> channels =
        direct_among(devices).empty()
            ? std::vector<Channel>()
            : ring_channels(static_cast<int>(devices.size()), direct_among(devices));
    if (channels.empty()) return load_one_ring(devices, 1);
    Seconds latency = 0;
    const double sum = sum_of(channels);
    for (const Channel& channel : channels)
      latency =
          std::max(latency, load_one_ring(devices_of(channel, devices), channel.bandwidth / sum));
    return latency;
  }
  // The direct links among devices of one island, numbered in their order; empty for others.
  std::vector<DirectLink> direct_among(const std::vector<int>& devices) const {
    const int island = net_.island(devices[0]), first = net_.first_of(island);
    if (net_.direct_of(island).empty()) return {};
    std::vector<int> members;
    for (int d : devices) {
      if (net_.island(d) != island) return {};
      members.push_back(d - first);
    }
    return links_among(net_.direct_of(island), members);
  }
  static double sum_of(const std::vector<Channel>& channels) {
    double sum = 0;
    for (const Channel& channel : channels) sum += channel.bandwidth;
    return sum;
  }
  static std::vector<int> devices_of(const Channel& channel, const std::vector<int>& devices) {
    std::vector<int> order;
    for (int i : channel.order) order.push_back(devices[i]);
    return order;
  }
  // The devices of a run from one near a NIC to another, along a chain of direct links if there is
  // one.
  std::vector<int> from_nic(const Run& run, int nic) const {
    std::vector<int> near;
    for (size_t i = 0; i < run.size(); ++i)
      if (net_.nic(run[i]) == nic) near.push_back(static_cast<int>(i));
    if (near.empty()) near.push_back(0);
    if (run.size() > 1 && !direct_among(run).empty()) {
      const std::vector<int> chain =
          chain_from(static_cast<int>(run.size()), direct_among(run), near);
      if (!chain.empty()) return devices_of({chain, 0}, run);
    }
    std::vector<int> order = run;
    std::rotate(order.begin(), order.begin() + near[0], order.end());
    // The last one near it leads out.
    if (near.size() > 1)
      std::rotate(order.begin() + near.back() - near[0], order.begin() + near.back() - near[0] + 1,
                  order.end());
    return order;
  }
  // Of a ring through several runs: one from each NIC of the root's.
  std::vector<std::vector<int>> orders_across() const {
    std::vector<std::vector<int>> orders(net_.nics(order_[0]));
    for (size_t nic = 0; nic < orders.size(); ++nic)
      for (const Run& run : runs_) {
        const std::vector<int> part = from_nic(run, static_cast<int>(nic));
        orders[nic].insert(orders[nic].end(), part.begin(), part.end());
      }
    return orders;
  }
  // Loads a chain that carries `flows` along `order`, or against it; returns its latency.
  Seconds load_chain(const std::vector<int>& order, double flows, bool forward) {
    Seconds latency = 0;
    for (size_t i = 0; i + 1 < order.size(); ++i) {
      net_.add_path(forward ? order[i] : order[i + 1], forward ? order[i + 1] : order[i], flows,
                    &load_);
      latency += net_.latency(order[i], order[i + 1]);
    }
    return latency;
  }
  // The physical order with each run but for the root reversed.
  std::vector<int> mirrored(const std::vector<Run>& runs) const {
    std::vector<int> order;
    for (size_t r = 0; r < runs.size(); ++r) {
      if (r == 0) order.push_back(runs[0][0]);
      order.insert(order.end(), runs[r].rbegin(), runs[r].rend() - (r == 0 ? 1 : 0));
    }
    return order;
  }
  std::vector<int> heads() const {
    std::vector<int> heads;
    for (const Run& run : runs_) heads.push_back(run[0]);
    return heads;
  }
  // One chain within each run, all at once; returns the greatest latency.
  Seconds load_run_chains(bool forward) {
    Seconds latency = 0;
    for (const Run& run : runs_) {
      latency = std::max(latency, load_chain(run, 0.5, forward));
      latency = std::max(latency, load_chain(mirrored({run}), 0.5, forward));
    }
    return latency;
  }

  void ring(Collective collective) {
    if (collective == Collective::reduce || collective == Collective::broadcast) {
      bool forward = collective == Collective::broadcast;
      if (runs_.size() == 1 && direct_chains(forward)) return;
      Seconds latency = load_chain(order_, 0.5, forward);
      latency = std::max(latency, load_chain(mirrored(runs_), 0.5, forward));
      emit(bytes_, latency);
      return;
    }
    double rounds = collective == Collective::all_reduce ? 2 : 1;
    Seconds latency = 0;
    if (runs_.size() == 1) {
      latency = load_ring(order_);
    } else {
      const std::vector<std::vector<int>> orders = orders_across();
      for (const std::vector<int>& order : orders)
        latency = std::max(latency, load_one_ring(order, 1 / static_cast<double>(orders.size())));
    }
    emit(rounds * (n_ - 1) / n_ * bytes_, rounds * (n_ - 1) / n_ * latency);
  }

  // A broadcast (or reduction) along the rings of the direct links, both ways round from the root, or
  // along chains where there is no ring. False: there are neither.
  bool direct_chains(bool forward) {
    const std::vector<DirectLink> direct = direct_among(order_);
    if (direct.empty()) return false;
    const int n = static_cast<int>(order_.size());
    std::vector<Channel> channels = ring_channels(n, direct);
    const bool rings = n > 2 && !channels.empty();
    if (!rings) channels = chain_channels(n, direct, 0);
    if (channels.empty()) return false;
    Seconds latency = 0;
    const double sum = sum_of(channels);
    for (const Channel& channel : channels) {
      std::vector<int> order = devices_of(channel, order_);
      const double flows = channel.bandwidth / sum;
      latency = std::max(latency, load_chain(order, rings ? flows / 2 : flows, forward));
      std::reverse(order.begin() + 1, order.end());
      if (rings) latency = std::max(latency, load_chain(order, flows / 2, forward));
    }
    emit(bytes_, latency);
    return true;
  }

  // Trees inside an island are chains along its direct links. False: there are none.
  template <typename Up, typename Down>
  bool direct_trees(Collective collective, bool rooted, const Up& up, const Down& down) {
    const std::vector<DirectLink> direct = direct_among(order_);
    if (direct.empty()) return false;
    const int n = static_cast<int>(order_.size());
    const std::vector<Channel> channels = chain_channels(n, direct, rooted ? 0 : -1);
    if (channels.empty()) return false;
    Seconds latency = 0;
    const double sum = sum_of(channels);
    for (const Channel& channel : channels) {
      const std::vector<int> order = devices_of(channel, order_);
      const double flows = 2 * channel.bandwidth / sum;  // two trees have the whole
      Seconds along = 0;
      for (int i = 1; i < n; ++i) {
        const double below = n - i;
        if (up(below) > 0) net_.add_path(order[i], order[i - 1], flows * up(below), &load_);
        if (down(below) > 0) net_.add_path(order[i - 1], order[i], flows * down(below), &load_);
        along += net_.latency(order[i - 1], order[i]);
      }
      latency = std::max(latency, along);
    }
    emit(bytes_, rooted ? latency : 2 * latency);
    if (collective == Collective::all_reduce) chain_.back().cap = kChainShare * sum;
    return true;
  }

  // One of the two trees, given the parent of every run (-1: the tree's root). `up(s)` and
  // `down(s)` are the flows over an edge with s devices below it. Returns the latency of the
  // deepest path.
  template <typename Up, typename Down>
  Seconds load_tree(const std::vector<int>& parents, bool rooted, const Up& up, const Down& down) {
    int runs = static_cast<int>(runs_.size());
    std::vector<std::vector<int>> children(runs);
    int top = 0;
    for (int r = 0; r < runs; ++r)
      if (parents[r] < 0)
        top = r;
      else
        children[parents[r]].push_back(r);
    // Runs, parents first.
    std::vector<int> sequence = {top};
    for (size_t i = 0; i < sequence.size(); ++i)
      for (int c : children[sequence[i]]) sequence.push_back(c);
    std::vector<double> below(runs, 0.0);
    std::vector<Seconds> depth(runs, 0.0);
    for (size_t i = sequence.size(); i-- > 0;) {
      int r = sequence[i];
      below[r] += static_cast<double>(runs_[r].size());
      if (parents[r] >= 0) below[parents[r]] += below[r];
    }
    auto edge = [&](int parent, int child, double s) {
      if (up(s) > 0) net_.add_path(child, parent, up(s), &load_);
      if (down(s) > 0) net_.add_path(parent, child, down(s), &load_);
    };
    // A rooted operation has its root in run 0: it feeds the tree's root, and no edge leads to it.
    Seconds feed = 0, deepest = 0;
    if (rooted && top != 0) {
      edge(runs_[0][0], runs_[top][0], n_);
      feed = net_.latency(runs_[0][0], runs_[top][0]);
    }
    for (int r : sequence) {
      const Run& run = runs_[r];
      depth[r] = feed;
      if (parents[r] >= 0) {
        int parent = runs_[parents[r]][0];
        depth[r] = depth[parents[r]] + net_.latency(parent, run[0]);
        if (!(rooted && r == 0)) edge(parent, run[0], below[r]);
      }
      Seconds along = depth[r];
      for (size_t i = 1; i < run.size(); ++i) {
        edge(run[i - 1], run[i], static_cast<double>(run.size() - i));
        along += net_.latency(run[i - 1], run[i]);
      }
      deepest = std::max(deepest, along);
    }
    return deepest;
  }

  void tree(Collective collective) {
    int runs = static_cast<int>(runs_.size());
    std::vector<int> first(runs), second(runs);
    for (int r = 0; r < runs; ++r) {
      first[r] = tree_parent(runs, r);
      second[r] = second_tree_parent(runs, r);
    }
    bool rooted = collective == Collective::reduce || collective == Collective::broadcast;
    auto up = [&](double s) {
      if (collective == Collective::broadcast) return 0.0;
      return collective == Collective::all_gather ? 0.5 * s / n_ : 0.5;
    };
    auto down = [&](double s) {
      if (collective == Collective::reduce) return 0.0;
      if (collective == Collective::reduce_scatter) return 0.5 * s / n_;
      return collective == Collective::all_gather ? 0.5 * (n_ - s) / n_ : 0.5;
    };
    if (runs == 1 && direct_trees(collective, rooted, up, down)) return;
    Seconds latency =
        std::max(load_tree(first, rooted, up, down), load_tree(second, rooted, up, down));
    emit(bytes_, rooted ? latency : 2 * latency);
    Transfer& t = chain_.back();
    if (tuning_.tree_share < 1)
      for (const LinkUse& use : t.uses)
        t.cap = std::min(t.cap, tuning_.tree_share * net_.links()[use.link].bandwidth);
  }

  // Reduce-scatter (or all-gather) rings within all runs, then the same across their i-th devices.
  void ring_within_runs(double rounds) {
    double m = static_cast<double>(runs_[0].size());
    if (m == 1) return;
    Seconds latency = 0;
    for (const Run& run : runs_) latency = std::max(latency, load_ring(run));
    emit(rounds * (m - 1) / m * bytes_, rounds * (m - 1) / m * latency);
  }
  void ring_across_runs(double rounds) {
    double r = static_cast<double>(runs_.size()), m = static_cast<double>(runs_[0].size());
    if (r == 1) return;
    Seconds latency = 0;
    for (size_t i = 0; i < runs_[0].size(); ++i) {
      std::vector<int> across;
      for (const Run& run : runs_) across.push_back(run[i]);
      latency = std::max(latency, load_ring(across));
    }
    emit(rounds * (r - 1) / r * bytes_ / m, rounds * (r - 1) / r * latency);
  }
  // The heads scatter (or gather) each run's share: a hop carries all but the share it leads from.
  void ring_of_heads() {
    double r = static_cast<double>(runs_.size()), least = n_;
    for (const Run& run : runs_) least = std::min(least, static_cast<double>(run.size()));
    Seconds latency = load_ring(heads());
    emit((n_ - least) / n_ * bytes_, (r - 1) / r * latency);
  }
  void all_reduce_of_heads() {
    double r = static_cast<double>(runs_.size());
    Seconds latency = load_ring(heads());
    emit(2 * (r - 1) / r * bytes_, 2 * (r - 1) / r * latency);
  }
  void chains_in_runs(bool forward) {
    Seconds latency = load_run_chains(forward);
    emit(bytes_, latency);
  }

  void hierarchical(Collective collective) {
    bool equal = true;
    for (const Run& run : runs_) equal = equal && run.size() == runs_[0].size();
    switch (collective) {
      case Collective::all_reduce:
        if (equal) {
          ring_within_runs(1);
          ring_across_runs(2);
          ring_within_runs(1);
        } else {
          chains_in_runs(false);
          all_reduce_of_heads();
          chains_in_runs(true);
        }
        break;
      case Collective::reduce_scatter:
        if (equal) {
          ring_within_runs(1);
          ring_across_runs(1);
        } else {
          chains_in_runs(false);
          ring_of_heads();
          shares_in_runs(true);
        }
        break;
      case Collective::all_gather:
        if (equal) {
          ring_across_runs(1);
          ring_within_runs(1);
        } else {
          shares_in_runs(false);
          ring_of_heads();
          chains_in_runs(true);
        }
        break;
      case Collective::reduce:
        if (runs_[0].size() > 1 || !equal) chains_in_runs(false);
        if (runs_.size() > 1) emit_head_chain(false);
        break;
      case Collective::broadcast:
        if (runs_.size() > 1) emit_head_chain(true);
        if (runs_[0].size() > 1 || !equal) chains_in_runs(true);
        break;
      default:
        MOTLEY_CHECK(false, "{}", to_string(collective));
    }
  }
  void emit_head_chain(bool forward) {
    std::vector<int> order = heads();
    Seconds latency = load_chain(order, 1, forward);
    emit(bytes_, latency);
  }
  // Each head hands its run's devices their S/n, or collects it.
  void shares_in_runs(bool out) {
    Seconds latency = 0;
    for (const Run& run : runs_)
      for (size_t i = 1; i < run.size(); ++i) {
        net_.add_path(out ? run[0] : run[i], out ? run[i] : run[0], 1, &load_);
        latency = std::max(latency, net_.latency(run[0], run[i]));
      }
    emit(bytes_ / n_, latency);
  }

  void direct(Collective collective) {
    // The farthest pair of a tree: from anywhere to the farthest, and from there again.
    auto farthest_from = [&](int from) {
      std::pair<Seconds, int> best(-1, from);
      for (int d : order_)
        if (d != from) best = std::max(best, {net_.latency(from, d), d});
      return best;
    };
    Seconds farthest = farthest_from(farthest_from(order_[0]).second).first;
    if (collective == Collective::reduce || collective == Collective::broadcast) {
      for (int d : order_) {
        if (d == order_[0]) continue;
        bool out = collective == Collective::broadcast;
        net_.add_path(out ? order_[0] : d, out ? d : order_[0], 1, &load_);
      }
      emit(bytes_, farthest);
      return;
    }
    for (int round = 0; round < (collective == Collective::all_reduce ? 2 : 1); ++round) {
      net_.add_all_pairs(order_, &load_);
      emit(bytes_ / n_, farthest);
    }
  }

  const Topology& net_;
  double n_;
  Bytes bytes_;
  Tuning tuning_;
  LinkLoad& load_;
  std::vector<int> order_;  // physical, the root first
  std::vector<Run> runs_;
  Chain chain_;
};

}  // namespace

namespace {

// NCCL's choice for a collective by itself.
Algorithm chosen(const Topology& topology, Collective collective, const std::vector<int>& devices,
                 Bytes bytes, const Tuning& tuning, LinkLoad* load) {
  const auto alone = [&](Algorithm algorithm) {
    return simulate(topology.links(),
                    {Builder(topology, devices, bytes, tuning, load).build(collective, algorithm)})
        .makespan;
  };
  return alone(Algorithm::tree) < alone(Algorithm::ring) ? Algorithm::tree : Algorithm::ring;
}

Chain build(const Topology& topology, Collective collective, Algorithm algorithm,
            const std::vector<int>& devices, Bytes bytes, const Tuning& tuning, LinkLoad* load) {
  if (algorithm == Algorithm::automatic)
    algorithm = chosen(topology, collective, devices, bytes, tuning, load);
  return Builder(topology, devices, bytes, tuning, load).build(collective, algorithm);
}

}  // namespace

Chain traffic(const Topology& topology, Collective collective, Algorithm algorithm,
              const std::vector<int>& devices, Bytes bytes, const Tuning& tuning) {
  LinkLoad load(static_cast<int>(topology.links().size()));
  return build(topology, collective, algorithm, devices, bytes, tuning, &load);
}

Seconds collective_time(const Topology& topology, Collective collective, Algorithm algorithm,
                        const std::vector<std::vector<int>>& groups, Bytes bytes,
                        const Tuning& tuning) {
  std::vector<Chain> chains;
  chains.reserve(groups.size());
  LinkLoad load(static_cast<int>(topology.links().size()));
  for (const std::vector<int>& group : groups)
    chains.push_back(build(topology, collective, algorithm, group, bytes, tuning, &load));
  return simulate(topology.links(), chains).makespan;
}

}  // namespace motley::net
