#include <algorithm>
#include <limits>
#include <map>
#include <mutex>
#include <utility>

#include "grid/estimate.h"
#include "grid/ring_uses.h"
#include "net/traffic.h"

namespace motley::grid {

void RingUses::add(const net::Topology& topology, const std::vector<int>& devices,
                   net::LinkLoad* load) {
  constexpr size_t kMostNumbers = 10'000'000;
  std::unique_lock lock(mutex_);
  const auto it = known_.find(devices);
  const std::vector<net::LinkUse>* uses = it == known_.end() ? nullptr : &it->second;
  lock.unlock();
  net::Chain chain;
  if (uses == nullptr) {
    chain = net::traffic(topology, Collective::all_reduce, net::Algorithm::ring, devices, 1);
    uses = &chain[0].uses;
  }
  for (const net::LinkUse& use : *uses) load->add(use.link, use.flows);
  if (chain.empty()) return;
  lock.lock();
  const size_t numbers = devices.size() + 3 * uses->size();
  if (numbers_ + numbers > kMostNumbers) return;
  if (known_.try_emplace(devices, std::move(chain[0].uses)).second) numbers_ += numbers;
}

namespace {

// Rings and messages that run together, and the links they cross.
class Flows {
 public:
  Flows(const net::Topology& topology, RingUses* rings)
      : topology_(topology), rings_(*rings), load_(static_cast<int>(topology.links().size())) {}

  // Forgets all flows; those to come take links of this bandwidth.
  void start(const std::vector<double>& bandwidth) {
    bandwidth_ = &bandwidth;
    flows_.assign(topology_.links().size(), 0.0);
    uses_.clear();
    first_ = {0};
  }

  // Flows are numbered as they come. Devices are visited in the order of the cluster file.
  void add_ring(std::vector<int>* devices) {
    std::sort(devices->begin(), devices->end());
    if (!topology_.plain()) {  // channels
      rings_.add(topology_, *devices, &load_);
      finish();
      return;
    }
    for (size_t i = 0; i < devices->size(); ++i)
      topology_.add_path((*devices)[i], (*devices)[(i + 1) % devices->size()], 1, &load_);
    finish();
  }
  void add_message(int from, int to) {
    if (from != to) topology_.add_path(from, to, 1, &load_);
    finish();
  }
  // Seconds per byte that a flow carries, all flows sharing their links.
  double seconds_per_byte(int flow) const {
    double slowest = 0;
    for (size_t u = first_[flow]; u < first_[flow + 1]; ++u)
      slowest = std::max(slowest, flows_[uses_[u].link] / (*bandwidth_)[uses_[u].link]);
    return slowest;
  }

 private:
  void finish() {
    load_.take(&uses_);
    for (size_t u = first_.back(); u < uses_.size(); ++u) flows_[uses_[u].link] += uses_[u].flows;
    first_.push_back(uses_.size());
  }

  const net::Topology& topology_;
  RingUses& rings_;
  const std::vector<double>* bandwidth_ = nullptr;
  net::LinkLoad load_;
  std::vector<double> flows_;       // [link]
  std::vector<net::LinkUse> uses_;  // of all flows
  std::vector<size_t> first_;       // [flow], and the end
};

// `start`: [group] of a collective that crosses it.
Seconds ring_latency(const net::Topology& topology, const std::vector<Seconds>& start,
                     const std::vector<int>& devices) {
  Seconds hop = 0, begin = 0;
  for (size_t i = 0; i + 1 < devices.size(); ++i) {
    hop = std::max(hop, topology.latency(devices[i], devices[i + 1]));
    begin = std::max(begin, start[topology.joining_group(devices[i], devices[i + 1])]);
  }
  return begin + 2 * (static_cast<double>(devices.size()) - 1) * hop;
}

void worsen(Mesh::Ring* ring, const Mesh::Ring& other) {
  ring->size = std::max(ring->size, other.size);
  ring->seconds_per_byte = std::max(ring->seconds_per_byte, other.seconds_per_byte);
  ring->latency = std::max(ring->latency, other.latency);
}

// The devices of every group: their types and memory.
void set_groups(const Cluster& cluster, const Strategy& s, Mesh& mesh) {
  const int groups = s.pp * s.dp;
  mesh.mix.assign(groups, 0);
  mesh.memory.assign(s.pp, std::numeric_limits<double>::infinity());
  mesh.mean_memory.assign(s.pp, 0);
  std::vector<int> types;
  for (int g = 0; g < groups; ++g) {
    types.clear();
    Bytes least = std::numeric_limits<double>::infinity();
    for (int k = 0; k < s.cp * s.tp; ++k) {
      const int d = s.devices[static_cast<size_t>(g) * s.cp * s.tp + k];
      const int type = cluster.devices[d].type;
      least = std::min(least, cluster.types[type].memory);
      if (types.empty() || type != types.back()) types.push_back(type);
    }
    std::sort(types.begin(), types.end());
    types.erase(std::unique(types.begin(), types.end()), types.end());
    const auto known = std::find(mesh.mixes.begin(), mesh.mixes.end(), types);
    mesh.mix[g] = static_cast<int>(known - mesh.mixes.begin());
    if (known == mesh.mixes.end()) mesh.mixes.push_back(types);
    mesh.memory[g / s.dp] = std::min(mesh.memory[g / s.dp], least);
    mesh.mean_memory[g / s.dp] += least / s.dp;
  }
}

void set_rings(const net::Topology& topology, const std::vector<double>& bandwidth,
               const std::vector<Seconds>& start, const Strategy& s, RingUses* uses, Mesh& mesh) {
  const int groups = s.pp * s.dp;
  mesh.tensor.resize(groups);
  mesh.context.resize(groups);
  mesh.data.resize(s.pp);
  Flows flows(topology, uses);
  // Rings of one kind all run at once. devices_of(o, k) lists the devices of ring k of an owner.
  auto rings = [&](int owners, int each, int size, auto&& devices_of,
                   std::vector<Mesh::Ring>* out) {
    if (size < 2) return;
    flows.start(bandwidth);
    std::vector<Seconds> latency;
    std::vector<int> devices;
    for (int o = 0; o < owners; ++o)
      for (int k = 0; k < each; ++k) {
        devices.clear();
        devices_of(o, k, &devices);
        latency.push_back(ring_latency(topology, start, devices));
        flows.add_ring(&devices);
      }
    const double share = 2.0 * (size - 1) / size;
    for (int o = 0; o < owners; ++o)
      for (int k = 0; k < each; ++k) {
        const int flow = o * each + k;
        worsen(&(*out)[o], {size, share * flows.seconds_per_byte(flow), latency[flow]});
      }
  };
  rings(
      groups, s.cp, s.tp,
      [&](int g, int c, std::vector<int>* devices) {
        for (int t = 0; t < s.tp; ++t) devices->push_back(s.device(g / s.dp, g % s.dp, c, t));
      },
      &mesh.tensor);
  rings(
      groups, s.tp, s.cp,
      [&](int g, int t, std::vector<int>* devices) {
        for (int c = 0; c < s.cp; ++c) devices->push_back(s.device(g / s.dp, g % s.dp, c, t));
      },
      &mesh.context);
  rings(
      s.pp, s.tp, s.dp * s.cp,
      [&](int stage, int t, std::vector<int>* devices) {
        for (int r = 0; r < s.dp; ++r)
          for (int c = 0; c < s.cp; ++c) devices->push_back(s.device(stage, r, c, t));
      },
      &mesh.data);
  if (s.pp > 1) {
    std::vector<Mesh::Ring> tied(1);
    rings(
        1, s.dp * s.cp * s.tp, 2,
        [&](int, int k, std::vector<int>* devices) {
          const size_t last = static_cast<size_t>(s.pp - 1) * s.dp * s.cp * s.tp;
          devices->assign({s.devices[k], s.devices[last + k]});
        },
        &tied);
    mesh.tied = tied[0];
  }
}

void set_messages(const net::Topology& topology, const std::vector<double>& bandwidth,
                  const Strategy& s, RingUses* uses, Mesh& mesh) {
  const int groups = s.pp * s.dp;
  Flows flows(topology, uses);
  mesh.message_seconds_per_byte.assign(groups, 0.0);
  mesh.message_latency.assign(groups, 0.0);
  for (int b = 0; s.pp > 1 && b < s.pp; ++b) {
    if (b == s.pp - 1 && s.interleave == 1) break;
    flows.start(bandwidth);
    for (int r = 0; r < s.dp; ++r)
      for (int c = 0; c < s.cp; ++c)
        for (int t = 0; t < s.tp; ++t) {
          const int from = s.device(b, r, c, t), to = s.device((b + 1) % s.pp, r, c, t);
          flows.add_message(from, to);
          Seconds& latency = mesh.message_latency[static_cast<size_t>(b) * s.dp + r];
          latency = std::max(latency, topology.latency(from, to));
        }
    for (int r = 0, flow = 0; r < s.dp; ++r)
      for (int k = 0; k < s.cp * s.tp; ++k, ++flow) {
        double& worst = mesh.message_seconds_per_byte[static_cast<size_t>(b) * s.dp + r];
        worst = std::max(worst, flows.seconds_per_byte(flow));
      }
  }
}

// Which replicas are alike.
void set_like(const Strategy& s, Mesh& mesh) {
  std::map<std::vector<double>, int> kinds;
  std::vector<double> column;
  for (int r = 0; r < s.dp; ++r) {
    column.clear();
    for (int stage = 0; stage < s.pp; ++stage) {
      const size_t g = static_cast<size_t>(stage) * s.dp + r;
      const Mesh::Ring &t = mesh.tensor[g], &c = mesh.context[g];
      column.insert(column.end(), {static_cast<double>(mesh.mix[g]), t.seconds_per_byte, t.latency,
                                   c.seconds_per_byte, c.latency, mesh.message_seconds_per_byte[g],
                                   mesh.message_latency[g]});
    }
    mesh.like.push_back(kinds.try_emplace(column, r).first->second);
  }
}

}  // namespace

Mesh Estimator::mesh(const Strategy& s) const {
  Mesh mesh = groups(s);
  add_links(s, &mesh);
  return mesh;
}

Mesh Estimator::groups(const Strategy& s) const {
  Mesh mesh;
  mesh.pp = s.pp, mesh.dp = s.dp, mesh.tp = s.tp, mesh.cp = s.cp;
  set_groups(cluster_, s, mesh);
  return mesh;
}

void Estimator::add_links(const Strategy& s, Mesh* mesh) const {
  set_rings(topology_, ring_bandwidth_, start_, s, ring_uses_.get(), *mesh);
  set_messages(topology_, message_bandwidth_, s, ring_uses_.get(), *mesh);
  set_like(s, *mesh);
}

}  // namespace motley::grid
