#include "planner/sub_clusters.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <set>

#include "core/error.h"
#include "net/messages.h"

namespace motley::planner {

namespace {

constexpr double kGoodLink = 2;  // times as long as inside, that a message between may take
constexpr int kNodes = 16;       // most of a sub-cluster of unequal devices
constexpr int kPermuted = 3;     // most sub-clusters that follow each other in all orders

// Seconds per byte.
double between(const net::Topology& topology, int a, int b) {
  const Bytes bytes = 1e6;
  const auto time = [&](Bytes size) { return net::messages_time(topology, {{a, b, size}}); };
  return (time(2 * bytes) - time(bytes)) / bytes;
}

class Links {
 public:
  Links(const Cluster& cluster, const std::vector<Part>& parts)
      : cluster_(cluster), topology_(cluster), parts_(parts) {
    for (const Part& part : parts) inside_.push_back(inside(part));
  }

  // Machines are one place, whatever joins their devices.
  bool good(int a, int b) const {
    const Part &x = parts_[a], &y = parts_[b];
    if (x.shape.nodes == 1 && y.shape.nodes == 1 &&
        cluster_.devices[x.devices[0]].parent == cluster_.devices[y.devices[0]].parent)
      return true;
    const double worst = std::max(between(topology_, x.devices.front(), y.devices.front()),
                                  between(topology_, x.devices.back(), y.devices.back()));
    // A single device goes by what it is joined to.
    const bool lone[] = {x.devices.size() == 1, y.devices.size() == 1};
    const auto [less, more] = std::minmax(inside_[a], inside_[b]);
    const double most = lone[0] && lone[1] ? less
                        : lone[0]          ? inside_[b]
                        : lone[1]          ? inside_[a]
                                           : more;
    return worst <= kGoodLink * most;
  }

 private:
  // Between nodes, or in the only one; of a single device, to the nearest other.
  double inside(const Part& part) const {
    const auto& d = part.devices;
    if (part.shape.nodes > 1) return between(topology_, d[0], d[part.shape.devices]);
    if (d.size() > 1) return between(topology_, d[0], d[1]);
    double least = std::numeric_limits<double>::infinity();
    for (int other = 0; other < cluster_.size(); ++other)
      if (other != d[0]) least = std::min(least, between(topology_, d[0], other));
    return least;
  }

  const Cluster& cluster_;
  net::Topology topology_;
  const std::vector<Part>& parts_;
  std::vector<double> inside_;  // [part]
};

using Nodes = std::vector<std::vector<int>>;  // devices of each

// `kinds`: [device] of the cluster.
Part part_of_nodes(const Cluster& cluster, const std::vector<int>& kinds, const Nodes& nodes,
                   std::vector<int> covers) {
  Part part;
  part.shape.nodes = static_cast<int>(nodes.size());
  part.shape.devices = static_cast<int>(nodes[0].size());
  part.shape.memory = std::numeric_limits<double>::infinity();
  for (const auto& node : nodes)
    for (int d : node) {
      part.devices.push_back(d);
      part.shape.kinds.push_back(kinds[d]);
      part.shape.memory = std::min(part.shape.memory, cluster.type_of(d).memory);
    }
  part.shape.name = fmt::format("{} unequal from {}", part.devices.size(), part.devices[0]);
  part.covers = std::move(covers);
  return part;
}

// [member] its nodes, all of one size, as small as possible but at most kNodes in all: machines,
// parts of the only ones, or several. None if there are no such.
std::vector<Nodes> nodes_of(const std::vector<Part>& parts, const std::vector<int>& members) {
  int machine = 0, all = 0, total = 0;  // devices that divide machines, and members
  bool single = true;
  for (int m : members) {
    machine = std::gcd(machine, parts[m].shape.devices);
    all = std::gcd(all, parts[m].shape.size());
    total += parts[m].shape.size();
    single = single && parts[m].shape.nodes == 1;
  }
  int size = single ? 1 : machine;
  while (size <= all &&
         (all % size != 0 || (machine % size != 0 && size % machine != 0) || total / size > kNodes))
    ++size;
  if (size > all) return {};
  std::vector<Nodes> nodes;
  for (int m : members) {
    const auto& devices = parts[m].devices;
    nodes.emplace_back();
    for (auto at = devices.begin(); at != devices.end(); at += size)
      nodes.back().emplace_back(at, at + size);
  }
  return nodes;
}

// One after another in any order, and in turns.
void add_arrangements(const Cluster& cluster, const std::vector<Part>& parts,
                      const std::vector<int>& members, std::vector<Part>* result) {
  const std::vector<Nodes> nodes = nodes_of(parts, members);
  if (nodes.empty()) return;
  std::vector<int> kinds(cluster.size());
  for (int m : members)
    for (int d : parts[m].devices) kinds[d] = m;
  std::vector<int> order(members.size());
  std::iota(order.begin(), order.end(), 0);
  do {
    Nodes row;
    for (int i : order) row.insert(row.end(), nodes[i].begin(), nodes[i].end());
    result->push_back(part_of_nodes(cluster, kinds, row, members));
  } while (order.size() <= kPermuted && std::next_permutation(order.begin(), order.end()));
  int turns = 0;
  for (const Nodes& n : nodes) turns = std::gcd(turns, static_cast<int>(n.size()));
  if (turns == 1) return;
  Nodes row;
  for (int turn = 0; turn < turns; ++turn)
    for (const Nodes& n : nodes) {
      const auto each = static_cast<int64_t>(n.size()) / turns;
      row.insert(row.end(), n.begin() + turn * each, n.begin() + (turn + 1) * each);
    }
  result->push_back(part_of_nodes(cluster, kinds, row, members));
}

// Neighbouring machines of the same devices in the same order, of several types.
void add_machines(const Cluster& cluster, const std::vector<Part>& parts,
                  std::vector<Part>* result) {
  struct Machine {
    std::vector<int> types, devices;
    GroupId above;
  };
  std::vector<int> types;
  for (const Device& device : cluster.devices) types.push_back(device.type);
  std::vector<Machine> machines;
  for (const Group& group : cluster.groups) {
    if (!group.children.empty()) continue;
    Machine machine{{}, {}, group.parent};
    for (int d = group.first_device; d < group.first_device + group.device_count; ++d) {
      machine.types.push_back(cluster.devices[d].type);
      machine.devices.push_back(d);
    }
    machines.push_back(std::move(machine));
  }
  for (size_t i = 0, end; i < machines.size(); i = end) {
    const Machine& first = machines[i];
    for (end = i; end < machines.size() && machines[end].types == first.types &&
                  machines[end].above == first.above;)
      ++end;
    const bool equal = std::equal(first.types.begin() + 1, first.types.end(), first.types.begin());
    if (end - i < 2 || equal || end - i > kNodes) continue;
    Nodes nodes;
    std::vector<int> covers;
    for (size_t m = i; m < end; ++m) nodes.push_back(machines[m].devices);
    const int from = nodes.front().front(), to = nodes.back().back();
    for (size_t p = 0; p < parts.size(); ++p)
      if (parts[p].devices.front() >= from && parts[p].devices.back() <= to)
        covers.push_back(static_cast<int>(p));
    result->push_back(part_of_nodes(cluster, types, nodes, std::move(covers)));
  }
}

}  // namespace

std::vector<Part> equal_parts(const Cluster& cluster) {
  std::vector<Part> parts;
  int parent = -1;  // of the last node
  for (const Group& group : cluster.groups) {
    if (!group.children.empty()) continue;
    for (int d = group.first_device; d < group.first_device + group.device_count;) {
      int end = d;
      while (end < group.first_device + group.device_count &&
             cluster.devices[end].type == cluster.devices[d].type)
        ++end;
      const bool whole = end - d == group.device_count;
      const int above = whole && group.parent.valid() ? group.parent.index : -1;
      Part* last = parts.empty() ? nullptr : &parts.back();
      const bool alike = last && whole && above >= 0 && above == parent &&
                         last->shape.devices == end - d &&
                         cluster.devices[last->devices[0]].type == cluster.devices[d].type;
      if (!alike) {
        parts.emplace_back();
        last = &parts.back();
        last->shape.name = fmt::format("{} from {}", cluster.type_of(d).name, d);
        last->shape.nodes = 0;
        last->shape.devices = end - d;
        last->shape.memory = cluster.type_of(d).memory;
      }
      ++last->shape.nodes;
      parent = above;
      for (; d < end; ++d) last->devices.push_back(d);
    }
  }
  return parts;
}

std::vector<Part> unequal_parts(const Cluster& cluster, const std::vector<Part>& parts) {
  const auto count = static_cast<int>(parts.size());
  const Links links(cluster, parts);
  std::vector<int> region(count);  // by its first part
  std::iota(region.begin(), region.end(), 0);
  for (int a = 0; a < count; ++a)
    for (int b = 0; b < a; ++b)
      if (region[a] != region[b] && links.good(a, b))
        std::replace(region.begin(), region.end(), std::max(region[a], region[b]),
                     std::min(region[a], region[b]));
  std::vector<Part> result;
  for (int first = 0; first < count; ++first) {
    std::vector<int> members;
    for (int p = 0; p < count; ++p)
      if (region[p] == first) members.push_back(p);
    if (members.size() > 1) add_arrangements(cluster, parts, members, &result);
  }
  add_machines(cluster, parts, &result);
  return result;
}

std::vector<std::vector<int>> uses_of_unequal(const std::vector<Part>& parts, int equal) {
  const auto covers = [&](int unequal, int part) {
    const std::vector<int>& covered = parts[unequal].covers;
    return std::find(covered.begin(), covered.end(), part) != covered.end();
  };
  std::set<std::vector<int>> uses;
  const auto with = [&](const std::vector<int>& chosen) {
    std::vector<int> use = chosen;
    for (int c = 0; c < equal; ++c)
      if (std::none_of(chosen.begin(), chosen.end(), [&](int u) { return covers(u, c); }))
        use.push_back(c);
    std::sort(use.begin(), use.end());
    uses.insert(std::move(use));
  };
  const int count = static_cast<int>(parts.size());
  for (int u = equal; u < count; ++u) {
    with({u});
    std::vector<int> together = {u};
    for (int other = equal; other < count; ++other)
      if (std::none_of(together.begin(), together.end(), [&](int t) {
            return std::any_of(parts[other].covers.begin(), parts[other].covers.end(),
                               [&](int c) { return covers(t, c); });
          }))
        together.push_back(other);
    with(together);
  }
  return {uses.begin(), uses.end()};
}

std::vector<int> share_of(const Part& part, int count, int k) {
  const size_t size = part.devices.size() / static_cast<size_t>(count);
  return {part.devices.begin() + static_cast<int64_t>(k * size),
          part.devices.begin() + static_cast<int64_t>((k + 1) * size)};
}

namespace {

// [stage] positions in a share that begins at position `first` of nodes of `node` devices each;
// empty if not all go into as few nodes as they can.
std::vector<std::vector<int>> pack(int first, int share, int node, const std::vector<int>& sizes) {
  std::vector<std::vector<int>> free;  // of each node
  for (int at = 0; at < share; ++at) {
    const size_t n = static_cast<size_t>((first + at) / node - first / node);
    if (n == free.size()) free.emplace_back();
    free[n].push_back(at);
  }
  std::vector<size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return sizes[a] > sizes[b]; });
  std::vector<std::vector<int>> seats(sizes.size());
  for (const size_t s : order) {
    int left = sizes[s];
    for (std::vector<int>& of_node : free)
      if (left >= node && static_cast<int>(of_node.size()) == node) {
        seats[s].insert(seats[s].end(), of_node.begin(), of_node.end());
        of_node.clear();
        left -= node;
      }
    if (left == 0) continue;
    std::vector<int>* best = nullptr;  // the fullest with room
    for (std::vector<int>& of_node : free)
      if (static_cast<int>(of_node.size()) >= left &&
          (best == nullptr || of_node.size() < best->size()))
        best = &of_node;
    if (best == nullptr) return {};
    seats[s].insert(seats[s].end(), best->begin(), best->begin() + left);
    best->erase(best->begin(), best->begin() + left);
    std::sort(seats[s].begin(), seats[s].end());
  }
  return seats;
}

// [stage] Of those of pipeline k of `count` that take `sizes` of a part.
std::vector<std::vector<int>> seats_in(const Part& part, int count, int k,
                                       const std::vector<int>& sizes) {
  const std::vector<int> share = share_of(part, count, k);
  const int size = static_cast<int>(share.size()), first = k * size, node = part.shape.devices;
  std::vector<std::vector<int>> seats;
  bool straddles = false;
  for (int at = 0; const int taken : sizes) {
    seats.emplace_back(taken);
    std::iota(seats.back().begin(), seats.back().end(), at);
    at += taken;
    const int nodes = (first + at - 1) / node - (first + at - taken) / node + 1;
    straddles = straddles || nodes > (taken + node - 1) / node;
  }
  if (straddles && part.shape.kinds.empty())
    if (auto packed = pack(first, size, node, sizes); !packed.empty()) seats = std::move(packed);
  for (std::vector<int>& seat : seats) {
    for (int& d : seat) d = share[d];
    std::sort(seat.begin(), seat.end());
  }
  return seats;
}

}  // namespace

std::vector<std::vector<int>> seats_of(const std::vector<Part>& parts,
                                       const pipeline::PipelinePlan& plan, int k) {
  std::vector<std::vector<int>> sizes(parts.size());  // [part] of its stages, in order
  for (const pipeline::Stage& s : plan.stages) sizes[s.mesh.cluster].push_back(s.mesh.size());
  std::vector<std::vector<std::vector<int>>> seats;
  for (size_t p = 0; p < parts.size(); ++p)
    seats.push_back(seats_in(parts[p], plan.pipelines, k, sizes[p]));
  std::vector<size_t> next(parts.size(), 0);
  std::vector<std::vector<int>> result;
  for (const pipeline::Stage& s : plan.stages)
    result.push_back(std::move(seats[s.mesh.cluster][next[s.mesh.cluster]++]));
  return result;
}

std::vector<int> devices_of(const Part& part, const pipeline::Mesh& mesh) {
  std::vector<int> devices;
  for (int n = 0; n < mesh.nodes; ++n)
    for (int d = 0; d < mesh.devices; ++d)
      devices.push_back(part.devices[mesh.at + n * part.shape.devices + d]);
  std::sort(devices.begin(), devices.end());
  return devices;
}

std::vector<std::vector<int>> stage_meshes(const Cluster& cluster) {
  std::vector<std::vector<int>> meshes;
  std::set<std::vector<int>> known;
  std::vector<Part> parts = equal_parts(cluster);
  for (Part& part : unequal_parts(cluster, parts)) parts.push_back(std::move(part));
  for (const Part& part : parts)
    for (pipeline::Shapes shapes : {pipeline::Shapes::paper, pipeline::Shapes::uneven})
      for (int d = 0; d < (part.shape.kinds.empty() ? 1 : part.shape.size()); ++d)
        pipeline::for_each_mesh(part.shape, 0, shapes, d, [&](const pipeline::Mesh& mesh, int) {
          std::vector<int> devices = devices_of(part, mesh);
          if (known.insert(devices).second) meshes.push_back(std::move(devices));
        });
  return meshes;
}

}  // namespace motley::planner
