#include "discover/levels.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <numeric>
#include <tuple>

#include "core/error.h"
#include "core/median.h"

namespace motley::discover {

namespace {

// Sets of workers, each with its place in the tree so far.
using Sets = std::vector<std::vector<int>>;

class Builder {
 public:
  explicit Builder(const Distances& distances) : d_(distances) {}

  // The workers of `items`, each of which stays together.
  Level build(const Sets& items,
              const std::function<Level(const std::vector<int>&)>& inside) const {
    if (items.size() == 1) return inside(items[0]);
    Sets parts = by_latency(items);
    if (parts.size() == 1 || !explained(parts)) {
      Sets others = by_bandwidth(items);
      if (others.size() > 1 && others.size() < items.size()) parts = std::move(others);
    }
    const bool flat = parts.size() == 1;
    if (flat) parts = items;
    Level level;
    for (const auto& part : parts) {
      Sets of;
      for (const auto& item : items)
        if (std::find(part.begin(), part.end(), item[0]) != part.end()) of.push_back(item);
      level.groups.push_back(build(of, inside));
      const auto& below = level.groups.back().workers;
      level.workers.insert(level.workers.end(), below.begin(), below.end());
    }
    measure(&level);
    return level;
  }

  // The link between the groups of a level: ports, and what latency it adds.
  void measure(Level* level) const {
    std::vector<double> latencies;
    for (size_t a = 0; a < level->groups.size(); ++a) {
      Level& group = level->groups[a];
      group.port = 0;
      for (size_t b = 0; b < level->groups.size(); ++b) {
        if (a == b) continue;
        const Level& other = level->groups[b];
        group.port = std::max(group.port, bandwidth(group.workers, other.workers));
        latencies.push_back(latency(group.workers, other.workers) -
                            (own_latency(group) + own_latency(other)) / 2);
      }
      level->bandwidth = std::max(level->bandwidth, group.port);
    }
    level->latency = std::max(0.0, median(latencies));
    const bool singles =
        std::all_of(level->groups.begin(), level->groups.end(), [&](const Level& g) {
          return g.workers.size() == 1 && g.port * kAlike > level->bandwidth;
        });
    if (!singles) return;
    std::vector<double> ports;
    for (const Level& group : level->groups) ports.push_back(group.port);
    level->bandwidth = median(ports);
    level->groups.clear();
  }

  BytesPerSecond bandwidth(const std::vector<int>& a, const std::vector<int>& b) const {
    return between(a, b,
                   [&](int i, int j) { return (d_.bandwidth[i][j] + d_.bandwidth[j][i]) / 2; });
  }
  Seconds latency(const std::vector<int>& a, const std::vector<int>& b) const {
    return between(a, b, [&](int i, int j) { return (d_.latency[i][j] + d_.latency[j][i]) / 2; });
  }

 private:
  // What a message between two of the group takes, of which its ends see half each.
  static Seconds own_latency(const Level& level) {
    if (level.workers.size() == 1) return 0;
    Seconds below = 0;
    for (const Level& group : level.groups)
      below += own_latency(group) / static_cast<double>(level.groups.size());
    return level.latency + below;
  }
  template <typename F>
  double between(const std::vector<int>& a, const std::vector<int>& b, F value) const {
    std::vector<double> all;
    for (int i : a)
      for (int j : b)
        if (d_.bandwidth[i][j] > 0 && d_.bandwidth[j][i] > 0) all.push_back(value(i, j));
    MOTLEY_CHECK(!all.empty(), "nothing was measured between two groups");
    return median(all);
  }

  // The components that are left without the pairs of the longest class of latencies.
  Sets by_latency(const Sets& items) const {
    const size_t n = items.size();
    std::vector<double> times;
    std::vector<std::vector<double>> of(n, std::vector<double>(n, 0));
    for (size_t a = 0; a < n; ++a)
      for (size_t b = a + 1; b < n; ++b)
        times.push_back(of[a][b] = of[b][a] = latency(items[a], items[b]));
    std::sort(times.rbegin(), times.rend());
    double least = times[0];
    for (double t : times) {
      if (t * kAlikeLatency < least && least - t >= kNoLatency) break;
      least = t;
    }
    std::vector<size_t> part(n);
    std::iota(part.begin(), part.end(), size_t{0});
    for (size_t a = 0; a < n; ++a)
      for (size_t b = 0; b < a; ++b)
        if (of[a][b] < least) join(part[a], part[b], &part);
    return sets_of(items, part);
  }

  // Whoever reaches one another best is joined first, until ports, one for each part, explain what
  // is between the parts.
  Sets by_bandwidth(const Sets& items) const {
    const size_t n = items.size();
    std::vector<std::tuple<double, size_t, size_t>> pairs;
    for (size_t a = 0; a < n; ++a)
      for (size_t b = a + 1; b < n; ++b) pairs.emplace_back(-bandwidth(items[a], items[b]), a, b);
    std::sort(pairs.begin(), pairs.end());
    std::vector<size_t> part(n);
    std::iota(part.begin(), part.end(), size_t{0});
    Sets parts = items;
    for (const auto& [_, a, b] : pairs) {
      if (explained(parts)) break;
      if (part[a] == part[b]) continue;
      join(part[a], part[b], &part);
      parts = sets_of(items, part);
    }
    return parts;
  }

  static void join(size_t a, size_t b, std::vector<size_t>* part) {
    for (size_t& p : *part)
      if (p == std::max(a, b)) p = std::min(a, b);
  }
  static Sets sets_of(const Sets& items, const std::vector<size_t>& part) {
    std::map<size_t, std::vector<int>> parts;
    for (size_t a = 0; a < items.size(); ++a)
      parts[part[a]].insert(parts[part[a]].end(), items[a].begin(), items[a].end());
    Sets result;
    for (auto& [_, workers] : parts) result.push_back(std::move(workers));
    return result;
  }

  bool explained(const Sets& parts) const {
    std::vector<double> port(parts.size(), 0);
    for (size_t a = 0; a < parts.size(); ++a)
      for (size_t b = 0; b < parts.size(); ++b)
        if (a != b) port[a] = std::max(port[a], bandwidth(parts[a], parts[b]));
    for (size_t a = 0; a < parts.size(); ++a)
      for (size_t b = 0; b < a; ++b)
        if (std::min(port[a], port[b]) > kAlike * bandwidth(parts[a], parts[b])) return false;
    return true;
  }

  const Distances& d_;
};

bool has(const Level& level, int worker) {
  return std::find(level.workers.begin(), level.workers.end(), worker) != level.workers.end();
}

const Level* group_of(const Level& level, int worker) {
  for (const Level& group : level.groups)
    if (has(group, worker)) return &group;
  return nullptr;
}

}  // namespace

Distances::Distances(int size)
    : bandwidth(static_cast<size_t>(size), std::vector<double>(static_cast<size_t>(size), 0)),
      latency(bandwidth) {}

Level levels_of(const Distances& distances, const std::vector<int>& machines) {
  std::map<int, std::vector<int>> of;
  for (int w = 0; w < distances.size(); ++w) of[machines[static_cast<size_t>(w)]].push_back(w);
  Sets items;
  for (auto& [_, workers] : of) items.push_back(std::move(workers));
  std::sort(items.begin(), items.end());
  const Builder builder(distances);
  auto one = [](const std::vector<int>& workers) {
    Level level;
    level.workers = workers;
    return level;
  };
  return builder.build(items, [&](const std::vector<int>& machine) {
    Sets alone;
    for (int w : machine) alone.push_back({w});
    return builder.build(alone, one);
  });
}

BytesPerSecond bandwidth_between(const Level& level, int a, int b) {
  const Level *x = group_of(level, a), *y = group_of(level, b);
  if (x != nullptr && x == y) return bandwidth_between(*x, a, b);
  BytesPerSecond least = level.bandwidth;
  for (const Level* group : {x, y})
    if (group != nullptr) least = std::min(least, group->port);
  return least;
}

Seconds latency_between(const Level& level, int a, int b) {
  const Level *x = group_of(level, a), *y = group_of(level, b);
  if (x != nullptr && x == y) return latency_between(*x, a, b);
  Seconds sum = level.latency;
  // Of a group's own link one end alone is passed.
  for (int worker : {a, b})
    for (const Level* group = group_of(level, worker); group != nullptr;
         group = group_of(*group, worker))
      if (group->workers.size() > 1) sum += group->latency / 2;
  return sum;
}

}  // namespace motley::discover
