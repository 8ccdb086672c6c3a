#include "net/topology.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <utility>

#include "cluster/part.h"
#include "core/error.h"

namespace motley::net {

std::vector<LinkUse> LinkLoad::take() {
  std::sort(touched_.begin(), touched_.end());
  std::vector<LinkUse> uses;
  uses.reserve(touched_.size());
  for (int link : touched_) {
    if (flows_[link] > 0) uses.push_back({link, flows_[link]});
    flows_[link] = 0;
  }
  touched_.clear();
  return uses;
}

void LinkLoad::take(std::vector<LinkUse>* uses) {
  for (int link : touched_) {
    if (flows_[link] > 0) uses->push_back({link, flows_[link]});
    flows_[link] = 0;
  }
  touched_.clear();
}

Topology::Topology(const Cluster& cluster) : devices_(cluster.size()) {
  size_t nodes = static_cast<size_t>(devices_) + cluster.groups.size();
  parent_.assign(nodes, -1);
  depth_.assign(nodes, 0);
  position_.assign(nodes, 0);
  up_.assign(nodes, -1);
  down_.assign(nodes, -1);
  first_.assign(nodes, 0);
  count_.assign(nodes, 1);
  children_.assign(nodes, 0);
  kind_.assign(nodes, LinkKind::switched);
  latency_.assign(nodes, 0);
  medium_.assign(nodes, -1);

  auto link = [&](std::string name, BytesPerSecond bandwidth, int group) {
    MOTLEY_CHECK(bandwidth > 0, "{}", name);
    links_.push_back({std::move(name), bandwidth, group});
    return static_cast<int>(links_.size()) - 1;
  };
  // Where the chains of broadcasts were measured, messages are as slow: [group]
  std::vector<double> reached(cluster.groups.size(), 1);
  for (size_t g = 0; g < cluster.groups.size(); ++g)
    for (const CollectiveRate& rate : cluster.groups[g].measured)
      if (rate.collective == Collective::broadcast)
        reached[g] =
            std::min(1., rate.bandwidth / slowest_port(cluster, GroupId(static_cast<int64_t>(g))));
  auto attach = [&](int node, int group, BytesPerSecond uplink, const std::string& name) {
    const Link& shared = cluster.groups[group - devices_].link;
    parent_[node] = group;
    depth_[node] = depth_[group] + 1;
    position_[node] = children_[group]++;
    BytesPerSecond port = uplink > 0                          ? uplink
                          : shared.kind == LinkKind::switched ? shared.bandwidth
                                                              : 0;
    port *= reached[group - devices_];
    if (port > 0) {
      up_[node] = link(name + " up", port, group - devices_);
      down_[node] = link(name + " down", port, group - devices_);
    }
  };
  std::vector<std::string> names(cluster.groups.size());
  for (size_t g = 0; g < cluster.groups.size(); ++g) {
    const Group& group = cluster.groups[g];
    int node = devices_ + static_cast<int>(g);
    kind_[node] = group.link.kind;
    latency_[node] = group.link.latency;
    for (const CollectiveRate& rate : group.measured)
      if (rate.collective == Collective::broadcast && group.children.empty())
        latency_[node] = std::max(latency_[node], rate.latency);
    first_[node] = group.first_device;
    count_[node] = group.device_count;
    if (group.parent.valid()) {
      MOTLEY_CHECK(group.parent.index < static_cast<int>(g));
      int parent = devices_ + group.parent.index;
      names[g] = fmt::format("{}[{}]", group.name, children_[parent]);
      if (group.parent.index != 0) names[g] = names[group.parent.index] + "." + names[g];
      attach(node, parent, group.uplink, names[g]);
    } else {
      names[g] = group.name;
    }
  }
  for (int d = 0; d < devices_; ++d) {
    first_[d] = d;
    attach(d, devices_ + cluster.devices[d].parent.index, 0, fmt::format("device {}", d));
  }
  for (size_t g = 0; g < cluster.groups.size(); ++g) {
    int node = devices_ + static_cast<int>(g);
    const Link& shared = cluster.groups[g].link;
    if (shared.kind == LinkKind::bus) {
      medium_[node] = link(names[g] + " bus", reached[g] * shared.bandwidth, static_cast<int>(g));
    } else if (shared.kind == LinkKind::ring && children_[node] > 1) {
      medium_[node] = static_cast<int>(links_.size());
      for (const char* way : {"cw", "ccw"})
        for (int hop = 0; hop < children_[node]; ++hop)
          link(fmt::format("{} hop {} {}", names[g], hop, way), reached[g] * shared.bandwidth,
               static_cast<int>(g));
    }
  }
  add_media(cluster, names);
}

void Topology::add_media(const Cluster& cluster, const std::vector<std::string>& names) {
  const int groups = static_cast<int>(cluster.groups.size());
  island_.assign(parent_.begin(), parent_.begin() + devices_);
  islands_.resize(groups);
  for (int g = groups; g-- > 0;) {  // children before parents
    const Group& group = cluster.groups[g];
    for (const DirectLink& d : group.direct) {
      direct_.resize(devices_);
      for (bool back : {false, true}) {
        const int from = group.first_device + (back ? d.b : d.a);
        const int to = group.first_device + (back ? d.a : d.b);
        if (direct(from, to)) continue;  // an inner group's
        direct_[from].push_back({to, static_cast<int>(links_.size())});
        direct_latency_.resize(links_.size() + 1, 0);
        direct_latency_.back() = d.latency;
        links_.push_back(
            {fmt::format("{} direct {} to {}", names[g], from, to), d.bandwidth * d.links, g});
      }
    }
    if (group.direct.empty()) continue;
    for (int i = 0; i < group.device_count; ++i) island_[group.first_device + i] = devices_ + g;
    islands_[g] = group.direct;
  }
  for (int g = 0; g < groups; ++g) {
    const Group& group = cluster.groups[g];
    if (group.nics.size() < 2) continue;
    const int node = devices_ + g;
    ports_.resize(groups);
    nics_.resize(devices_, 1), nic_.resize(devices_, 0);
    ports_[g].resize(group.device_count);
    up_[node] = down_[node] = -1;
    for (size_t n = 0; n < group.nics.size(); ++n) {
      const Nic& nic = group.nics[n];
      NicPort port{static_cast<int>(links_.size()), parent_[group.first_device + nic.near[0]]};
      for (const char* way : {"up", "down"})
        links_.push_back({fmt::format("{} nic {} {}", names[g], n, way), nic.bandwidth,
                          parent_[node] - devices_});
      const int last = group.first_device + nic.near.back();
      while (last >= first_[port.at] + count_[port.at]) port.at = parent_[port.at];
      for (int d : nic.near) {
        const int device = group.first_device + d;
        ports_[g][d] = port;
        if (nics_[device] > 1) continue;  // an outer group's count
        nics_[device] = static_cast<int>(group.nics.size());
        nic_[device] = static_cast<int>(n);
      }
    }
  }
}

const std::pair<int, int>* Topology::direct(int from, int to) const {
  if (direct_.empty()) return nullptr;
  for (const auto& entry : direct_[from])
    if (entry.first == to) return &entry;
  return nullptr;
}

const std::vector<DirectLink>& Topology::direct_of(int island) const {
  return islands_[island - devices_];
}

int Topology::joining_group(int a, int b) const {
  if (const auto* link = direct(a, b)) return links_[link->second].group;
  return lift(a, common_depth(a, b)) - devices_;
}

int Topology::lift(int node, int depth) const {
  while (depth_[node] > depth) node = parent_[node];
  return node;
}

int Topology::common_depth(int a, int b) const {
  int depth = std::min(depth_[a], depth_[b]);
  a = lift(a, depth), b = lift(b, depth);
  while (a != b) a = parent_[a], b = parent_[b];
  return depth_[a];
}

// Hop i clockwise joins child i to i + 1; hop i counter-clockwise joins i + 1 to i.
void Topology::cross_ring(int group, int from, int to, double flows, LinkLoad* load) const {
  int n = children_[group], clockwise = (to - from + n) % n;
  auto walk = [&](bool cw, double amount) {
    if (cw)
      for (int i = from; i != to; i = (i + 1) % n) load->add(medium_[group] + i, amount);
    else
      for (int i = from; i != to; i = (i + n - 1) % n)
        load->add(medium_[group] + n + (i + n - 1) % n, amount);
  };
  if (2 * clockwise == n) {
    walk(true, flows / 2);
    walk(false, flows / 2);
  } else {
    walk(2 * clockwise < n, flows);
  }
}

int Topology::climb(int device, int top, bool up, double flows, LinkLoad* load) const {
  // The outermost group below `top` with NICs, and the one that is near the device.
  int outer = -1;
  NicPort nic;
  if (!ports_.empty())
    for (int x = parent_[device]; depth_[x] > top; x = parent_[x])
      if (!ports_[x - devices_].empty()) {
        outer = x;
        nic = ports_[x - devices_][device - first_[x]];
      }
  const std::vector<int>& port = up ? up_ : down_;
  int x = device;
  for (;; x = parent_[x]) {
    if (x == (outer >= 0 ? nic.at : -1)) {
      load->add(up ? nic.up : nic.up + 1, flows);
      x = outer;
    } else if (port[x] >= 0) {
      load->add(port[x], flows);
    }
    if (depth_[x] == top + 1) return x;
    if (kind_[parent_[x]] == LinkKind::bus) load->add(medium_[parent_[x]], flows);
  }
}

void Topology::add_path(int from, int to, double flows, LinkLoad* load) const {
  MOTLEY_CHECK(from != to);
  if (const auto* link = direct(from, to)) {
    load->add(link->second, flows);
    return;
  }
  const int top = common_depth(from, to);
  const int x = climb(from, top, true, flows, load), y = climb(to, top, false, flows, load);
  const int group = parent_[x];
  if (kind_[group] == LinkKind::bus) load->add(medium_[group], flows);
  if (kind_[group] == LinkKind::ring) cross_ring(group, position_[x], position_[y], flows, load);
}

void Topology::add_all_pairs(const std::vector<int>& devices, LinkLoad* load) const {
  if (!direct_.empty() || !ports_.empty()) {
    for (int from : devices)
      for (int to : devices)
        if (from != to) add_path(from, to, 1, load);
    return;
  }
  // Members below every tree node touched; nodes are taken deepest first so that a group is
  // complete before it is counted into its parent.
  double n = static_cast<double>(devices.size());
  std::vector<std::pair<int, double>> layer;  // (node, members), all of one depth
  std::vector<std::vector<std::pair<int, double>>> by_depth;
  for (int d : devices) {
    if (static_cast<size_t>(depth_[d]) >= by_depth.size()) by_depth.resize(depth_[d] + 1);
    by_depth[depth_[d]].push_back({d, 1.0});
  }
  std::vector<double> positions;
  for (size_t depth = by_depth.size(); depth-- > 1;) {
    layer = std::move(by_depth[depth]);
    std::sort(layer.begin(), layer.end(), [&](const auto& a, const auto& b) {
      return std::pair(parent_[a.first], position_[a.first]) <
             std::pair(parent_[b.first], position_[b.first]);
    });
    for (size_t i = 0; i < layer.size();) {
      int group = parent_[layer[i].first];
      double members = 0, squares = 0;
      size_t first = i;
      for (; i < layer.size() && parent_[layer[i].first] == group; ++i) {
        auto [node, m] = layer[i];
        members += m;
        squares += m * m;
        if (m == n) continue;
        if (up_[node] >= 0) load->add(up_[node], m * (n - m));
        if (down_[node] >= 0) load->add(down_[node], m * (n - m));
      }
      double inside = members * members - squares, crossing = 2 * members * (n - members);
      if (kind_[group] == LinkKind::bus && inside + crossing > 0)
        load->add(medium_[group], inside + crossing);
      if (kind_[group] == LinkKind::ring && inside > 0) {
        positions.assign(children_[group], 0.0);
        for (size_t k = first; k < i; ++k) positions[position_[layer[k].first]] = layer[k].second;
        pairs_on_ring(group, positions, load);
      }
      by_depth[depth - 1].push_back({group, members});
    }
  }
}

// Clockwise traffic of hop a (from child a to a + 1), with m the members of each child and w_d = 1
// for distances below n/2, 1/2 at n/2: the flows that start at a join, those that end at a leave,
//   L[a] = L[a-1] + m[a] * sum_d w_d m[a+d] - m[a] * sum_d w_d m[a-d],
// and L[0] follows from the mean: the sum over hops is the sum over pairs of their distance.
// Counter-clockwise traffic of hop a is that of the reversed pairs, which have the same counts.
void Topology::pairs_on_ring(int group, const std::vector<double>& members, LinkLoad* load) const {
  int n = children_[group], half = n / 2;
  std::vector<double> prefix(2 * static_cast<size_t>(n) + 1, 0.0);  // of m repeated twice
  std::vector<double> moment = prefix;                              // of index * m
  for (int i = 0; i < 2 * n; ++i) {
    prefix[i + 1] = prefix[i] + members[i % n];
    moment[i + 1] = moment[i] + i * members[i % n];
  }
  double tie = n % 2 == 0 ? 0.5 : 1.0;  // weight of distance `half`
  std::vector<double> level(n, 0.0);
  double distances = 0, sum = 0;
  for (int a = 0; a < n; ++a) {
    // starts: distances 1..half after a; ends: the same before a, taken one turn later.
    double far = members[(a + half) % n], behind = members[(a + n - half) % n];
    double starts = prefix[a + half + 1] - prefix[a + 1] - (1 - tie) * far;
    double ends = prefix[a + n] - prefix[a + n - half] - (1 - tie) * behind;
    level[a] = (a > 0 ? level[a - 1] : 0) + members[a] * (starts - ends);
    distances += members[a] * (moment[a + half + 1] - moment[a + 1] -
                               a * (prefix[a + half + 1] - prefix[a + 1]) - (1 - tie) * half * far);
    sum += level[a];
  }
  double base = (distances - sum) / n;
  for (int a = 0; a < n; ++a) {
    double flows = level[a] + base;
    if (flows < 1e-9) continue;
    load->add(medium_[group] + a, flows);
    load->add(medium_[group] + n + a, flows);
  }
}

Seconds Topology::latency(int from, int to) const {
  if (const auto* link = direct(from, to)) return direct_latency_[link->second];
  int top = common_depth(from, to);
  Seconds total = 0;
  for (int x = parent_[from]; depth_[x] > top; x = parent_[x]) total += latency_[x];
  for (int y = parent_[to]; depth_[y] > top; y = parent_[y]) total += latency_[y];
  return total + latency_[lift(from, top)];
}

BytesPerSecond Topology::bandwidth_into(int first, int count) const {
  BytesPerSecond least = std::numeric_limits<double>::infinity(), beside = 0;
  for (int d = 0; d < devices_ && !direct_.empty(); ++d)
    for (const auto& [to, link] : direct_[d])
      if ((d < first || d >= first + count) && to >= first && to < first + count)
        beside += links_[link].bandwidth;
  for (int node = first; node >= 0 && count_[node] <= count; node = parent_[node])
    if (first_[node] == first && count_[node] == count && down_[node] >= 0)
      least = std::min(least, links_[down_[node]].bandwidth);
    else if (node >= devices_ && !ports_.empty() && !ports_[node - devices_].empty() &&
             first_[node] == first && count_[node] == count) {
      std::set<int> ways;
      for (const NicPort& port : ports_[node - devices_]) ways.insert(port.up);
      BytesPerSecond sum = 0;
      for (int way : ways) sum += links_[way].bandwidth;
      least = std::min(least, sum);
    }
  return least + beside;
}

}  // namespace motley::net
