#include "grid/placement.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <tuple>

#include "cluster/part.h"
#include "core/error.h"

namespace motley::grid {

Nodes nodes_of(const Cluster& cluster) {
  Nodes nodes;
  std::map<std::tuple<std::vector<int>, int, double, double, double>, int> kinds;
  for (GroupId id : machines_of(cluster)) {
    const Group& group = cluster.groups[id.index];
    std::vector<int> devices(group.device_count), types;
    std::iota(devices.begin(), devices.end(), group.first_device);
    for (int d : devices) types.push_back(cluster.devices[d].type);
    auto key = std::tuple(types, static_cast<int>(group.link.kind), group.link.bandwidth,
                          group.link.latency, group.uplink);
    const int kind = kinds.try_emplace(key, static_cast<int>(kinds.size())).first->second;
    nodes.devices.push_back(std::move(devices));
    nodes.kind.push_back(kind);
    nodes.parent.push_back(group.parent.index);
  }
  nodes.kinds = static_cast<int>(kinds.size());
  return nodes;
}

std::vector<std::vector<int>> heuristic_placements(const Cluster& cluster, int pp, int dp,
                                                   int size) {
  const Nodes nodes = nodes_of(cluster);
  const size_t groups = static_cast<size_t>(pp) * dp;
  std::vector<int> order(nodes.kinds);
  std::iota(order.begin(), order.end(), 0);
  std::vector<std::vector<int>> node_orders;
  constexpr int kMaxKinds = 4;
  std::vector<int> file(nodes.devices.size());
  std::iota(file.begin(), file.end(), 0);
  node_orders.push_back(file);
  do {
    std::vector<int> sorted = file;
    std::vector<int> rank(nodes.kinds);
    for (int i = 0; i < nodes.kinds; ++i) rank[order[i]] = i;
    std::stable_sort(sorted.begin(), sorted.end(),
                     [&](int a, int b) { return rank[nodes.kind[a]] < rank[nodes.kind[b]]; });
    node_orders.push_back(std::move(sorted));
  } while (nodes.kinds <= kMaxKinds && std::next_permutation(order.begin(), order.end()));

  std::set<std::vector<int>> seen;
  std::vector<std::vector<int>> result;
  for (const std::vector<int>& node_order : node_orders) {
    // Groups inside nodes where that gives enough of them, else cut from one line of devices.
    std::vector<int> line;
    for (int n : node_order) {
      const auto& devices = nodes.devices[n];
      const size_t whole = devices.size() / size * size;
      line.insert(line.end(), devices.begin(), devices.begin() + static_cast<int64_t>(whole));
    }
    if (line.size() < groups * size) {
      line.clear();
      for (int n : node_order)
        line.insert(line.end(), nodes.devices[n].begin(), nodes.devices[n].end());
    }
    if (line.size() < groups * size) continue;
    line.resize(groups * size);
    for (bool pipeline_inside : {false, true}) {
      std::vector<int> devices(line.size());
      for (int s = 0; s < pp; ++s)
        for (int r = 0; r < dp; ++r) {
          const size_t to = (static_cast<size_t>(s) * dp + r) * size;
          const size_t from = (pipeline_inside ? static_cast<size_t>(r) * pp + s
                                               : static_cast<size_t>(s) * dp + r) *
                              size;
          std::copy_n(line.begin() + static_cast<int64_t>(from), size,
                      devices.begin() + static_cast<int64_t>(to));
        }
      if (seen.insert(devices).second) result.push_back(std::move(devices));
    }
  }
  return result;
}

bool enumerate_placements(const Cluster& cluster, int pp, int dp, int size, int64_t limit,
                          const std::function<void(const std::vector<int>&)>& visit) {
  const Nodes nodes = nodes_of(cluster);
  const int groups = pp * dp;
  std::vector<int> used(nodes.devices.size(), 0), node_of(groups, -1), devices;
  // Groups that a node still has room for.
  const auto room = [&](size_t n) {
    return (static_cast<int>(nodes.devices[n].size()) - used[n]) / size;
  };
  int rooms = 0;
  for (size_t n = 0; n < used.size(); ++n) rooms += room(n);
  if (rooms < groups) return true;
  int64_t visited = 0;
  bool complete = true;
  auto place = [&](auto&& self, int group) -> void {
    if (!complete) return;
    if (group == groups) {
      if (visited == limit) {
        complete = false;
        return;
      }
      ++visited;
      visit(devices);
      return;
    }
    std::set<std::pair<int, int>> untouched;  // (kind, parent) tried already
    // Replicas may be renamed: in the first stage their nodes come in order, and have to have room for
    // those that are left of it.
    const bool ordered = group < dp;
    const int least = ordered && group > 0 ? node_of[group - 1] : 0;
    int behind = 0;
    for (size_t n = least; ordered && n < used.size(); ++n) behind += room(n);
    for (int n = least; n < static_cast<int>(used.size()); behind -= room(n), ++n) {
      if (ordered && behind < dp - group) break;
      if (room(n) == 0) continue;
      if (used[n] == 0 && !untouched.insert({nodes.kind[n], nodes.parent[n]}).second) continue;
      for (int k = 0; k < size; ++k) devices.push_back(nodes.devices[n][used[n] + k]);
      used[n] += size;
      node_of[group] = n;
      self(self, group + 1);
      used[n] -= size;
      devices.resize(devices.size() - size);
    }
  };
  place(place, 0);
  return complete;
}

}  // namespace motley::grid
