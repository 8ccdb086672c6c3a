#include "reduce/cluster.h"

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <unordered_map>
#include <utility>

#include "cluster/part.h"
#include "core/error.h"
#include "net/collectives.h"
#include "reduce/best.h"

namespace motley::reduce {

namespace {

constexpr int kMostDevices = kMostReduced;
constexpr int kMostSteps = 3;
constexpr double kGain = 0.97;
// Tensors wait whole at the heads, which costs more than links do: on emulated clusters a program
// simulated to take 0.86 of the plain time took 1.2 of it.
constexpr double kGainOfHeads = 0.8;
constexpr Bytes kLarge = 1e9;
constexpr Bytes kSmallest = 4096;

// Up and down the tree of groups, through the first device of each.
std::vector<ReductionStep> through_heads(const Cluster& cluster) {
  std::vector<net::Groups> by_depth;
  std::vector<GroupId> level = {GroupId(0)};
  while (!level.empty()) {
    std::vector<GroupId> below;
    net::Groups groups;
    for (GroupId id : level) {
      const Group& g = cluster.groups[id.index];
      std::vector<int> members;
      for (GroupId child : g.children) members.push_back(cluster.groups[child.index].first_device);
      if (g.children.empty()) {
        members.resize(g.device_count);
        std::iota(members.begin(), members.end(), g.first_device);
      }
      if (members.size() > 1) groups.push_back(std::move(members));
      below.insert(below.end(), g.children.begin(), g.children.end());
    }
    if (!groups.empty()) by_depth.push_back(std::move(groups));
    level = std::move(below);
  }
  std::vector<ReductionStep> steps;
  for (size_t d = by_depth.size(); d-- > 1;) steps.push_back({Collective::reduce, by_depth[d]});
  steps.push_back({Collective::all_reduce, by_depth[0]});
  for (size_t d = 1; d < by_depth.size(); ++d)
    steps.push_back({Collective::broadcast, by_depth[d]});
  return steps;
}

std::vector<ReductionStep> synthesised(const Cluster& cluster, const net::Topology& network,
                                       const Hierarchy& hierarchy) {
  const Matrix matrix = placements(hierarchy, {cluster.size()})[0];
  PlacementCost cost({&network, net::Algorithm::ring, {}}, kLarge, hierarchy, matrix, {0});
  const BestProgram best = best_program(program_space(cost.levels(), kMostSteps), &cost);
  std::vector<ReductionStep> steps;
  for (const Step& step : best.program)
    steps.push_back({step.collective, lower(step.form, cost.hierarchy())});
  return steps;
}

// The steps of one reduction or several alike; what is held is followed in the first of them, whose
// groups come first.
Seconds seconds_of(const std::vector<ReductionStep>& steps, const ReductionProgram& first,
                   const net::Topology& network, Bytes bytes) {
  std::vector<double> held(steps.size(), 1);
  if (first.steps.size() == steps.size())
    held = held_in_steps(first.steps, static_cast<int>(first.devices.size()));
  Seconds seconds = 0;
  for (size_t s = 0; s < steps.size(); ++s)
    seconds += net::collective_time(network, steps[s].collective, net::Algorithm::ring,
                                    steps[s].groups, held[s] * bytes);
  return seconds;
}

// What is faster than one ring in a cluster of several levels; fewer than two steps: nothing.
std::vector<ReductionStep> steps_for(const Cluster& cluster) {
  int levels = 0;
  for (const Group& g : cluster.groups)
    levels += g.children.size() > 1 || (g.children.empty() && g.device_count > 1);
  if (levels < 2) return {};
  const std::optional<Hierarchy> hierarchy = hierarchy_of(cluster);
  return hierarchy ? synthesised(cluster, net::Topology(cluster), *hierarchy)
                   : through_heads(cluster);
}

}  // namespace

std::optional<Hierarchy> hierarchy_of(const Cluster& cluster) {
  auto name_of = [&](const std::vector<GroupId>& groups) {
    std::string name = cluster.groups[groups[0].index].name;
    for (GroupId id : groups)
      if (cluster.groups[id.index].name != name) return std::string("group");
    return name;
  };
  Hierarchy hierarchy;
  std::vector<GroupId> groups = {GroupId(0)};
  while (!groups.empty()) {
    const Group& first = cluster.groups[groups[0].index];
    std::vector<GroupId> below;
    for (GroupId id : groups) {
      const Group& g = cluster.groups[id.index];
      if (g.children.size() != first.children.size() || g.device_count != first.device_count)
        return std::nullopt;
      below.insert(below.end(), g.children.begin(), g.children.end());
    }
    // The devices of a machine with direct links are one level, as P2 puts them.
    const bool machine = std::any_of(groups.begin(), groups.end(), [&](GroupId id) {
      return !cluster.groups[id.index].direct.empty();
    });
    if (machine) below.clear();
    if (first.children.empty() || machine)
      hierarchy.push_back({"device", first.device_count});
    else
      hierarchy.push_back({name_of(below), static_cast<int>(first.children.size())});
    groups = std::move(below);
  }
  return hierarchy;
}

std::vector<double> held_in_steps(const std::vector<ReductionStep>& steps, int devices) {
  net::SparseStates states(devices);
  std::vector<double> held;
  for (const ReductionStep& step : steps) {
    const std::vector<int>& members = step.groups[0];
    int chunks = 0;
    for (const auto& [chunk, count] : states.held(members[0])) chunks += count;
    held.push_back(static_cast<double>(chunks) / devices);
    if (step.collective == Collective::all_gather)
      held.back() *= static_cast<double>(members.size());
    states.apply(step.collective, step.groups);
  }
  return held;
}

Seconds seconds_of(const std::vector<ReductionStep>& steps, const net::Topology& network,
                   Bytes bytes) {
  std::vector<int> all(static_cast<size_t>(network.devices()));
  std::iota(all.begin(), all.end(), 0);
  return seconds_of(steps, {all, steps, 0, 0, 0}, network, bytes);
}

namespace {

std::vector<ReductionProgram> find_reductions(const Cluster& cluster, const net::Groups& groups) {
  std::vector<ReductionProgram> programs;
  std::map<std::string, std::vector<ReductionStep>> known;  // by the part of the tree
  double gain = kGain;
  for (const std::vector<int>& devices : groups) {
    std::vector<int> ascending = devices;
    std::sort(ascending.begin(), ascending.end());
    const Cluster part = part_of(cluster, ascending);
    auto [it, fresh] = known.try_emplace(look_of(part));
    if (fresh) it->second = steps_for(part);
    if (!hierarchy_of(part)) gain = kGainOfHeads;
    const std::vector<ReductionStep>& steps = it->second;
    if (steps.size() < 2) return {};
    ReductionProgram program{devices, steps, 0, 0, 0};
    for (ReductionStep& step : program.steps)
      for (std::vector<int>& members : step.groups)
        for (int& member : members)
          member = static_cast<int>(std::find(devices.begin(), devices.end(), ascending[member]) -
                                    devices.begin());
    programs.push_back(std::move(program));
  }

  // All groups at once, on the devices of the cluster.
  const net::Topology network(cluster);
  std::vector<ReductionStep> steps = programs[0].steps;
  for (size_t s = 0; s < steps.size(); ++s) {
    steps[s].groups.clear();
    for (const ReductionProgram& program : programs) {
      if (program.steps.size() != steps.size() ||
          program.steps[s].collective != steps[s].collective)
        return {};
      for (std::vector<int> members : program.steps[s].groups) {
        for (int& member : members) member = program.devices[member];
        steps[s].groups.push_back(std::move(members));
      }
    }
  }
  const std::vector<ReductionStep> plain = {{Collective::all_reduce, groups}};
  // Seconds at no bytes and per byte: of the plain collective in simulation, and of the program.
  auto line = [](auto&& seconds) {
    const Seconds fixed = seconds(0);
    return std::pair(fixed, (seconds(kLarge) - fixed) / kLarge);
  };
  const auto [plain_fixed, plain_slope] =
      line([&](Bytes bytes) { return seconds_of(plain, programs[0], network, bytes); });
  auto [fixed, slope] =
      line([&](Bytes bytes) { return seconds_of(steps, programs[0], network, bytes); });
  Seconds least = 0;
  std::function<Seconds(Bytes)> plain_s = [f = plain_fixed, b = plain_slope](Bytes bytes) {
    return f + b * bytes;
  };
  std::optional<CollectiveModel> model;
  if (groups.size() == 1) {
    std::vector<int> ascending = groups[0];
    std::sort(ascending.begin(), ascending.end());
    model.emplace(part_of(cluster, ascending));
    plain_s = [&](Bytes bytes) { return model->plain_all_reduce(bytes); };
    const Seconds model_fixed = model->fixed_all_reduce();
    const double model_slope = (plain_s(kLarge) - model_fixed) / kLarge;
    if (plain_fixed > 0) {
      least = fixed * model->least_all_reduce() / plain_fixed;
      fixed *= model_fixed / plain_fixed;
    }
    if (plain_slope > 0) slope *= model_slope / plain_slope;
  }
  Bytes from = 0;
  for (Bytes bytes = kSmallest; bytes <= kLarge; bytes *= 2) {
    if (std::max(least, fixed + slope * bytes) >= gain * plain_s(bytes))
      from = 0;
    else if (from == 0)
      from = bytes;
  }
  if (from == 0) return {};
  for (ReductionProgram& program : programs) {
    program.from = from;
    program.fixed = fixed;
    program.seconds_per_byte = slope;
    program.least = least;
  }
  return programs;
}

// What reductions_of found, by cluster and groups: the engines of one plan ask for the same many
// times, on two threads. It forgets everything once it holds more than kMostBytes.
class Known {
 public:
  std::vector<ReductionProgram> of(const Cluster& cluster, const net::Groups& groups) {
    std::string key = look_of(cluster);
    for (const std::vector<int>& devices : groups) {
      key.append(reinterpret_cast<const char*>(devices.data()), devices.size() * sizeof(int));
      key += '|';
    }
    std::shared_ptr<Entry> entry;
    {
      const std::lock_guard lock(mutex_);
      std::shared_ptr<Entry>& place = entries_[key];
      if (!place) place = std::make_shared<Entry>();
      entry = place;
    }
    std::call_once(entry->once, [&] {
      entry->programs = find_reductions(cluster, groups);
      count(key.size() + bytes_of(entry->programs));
    });
    return entry->programs;
  }

 private:
  static constexpr size_t kMostBytes = 64 << 20;
  struct Entry {
    std::once_flag once;
    std::vector<ReductionProgram> programs;
  };

  static size_t bytes_of(const std::vector<ReductionProgram>& programs) {
    size_t members = 0;
    for (const ReductionProgram& program : programs) {
      members += program.devices.size();
      for (const ReductionStep& step : program.steps)
        for (const std::vector<int>& group : step.groups) members += group.size();
    }
    return members * sizeof(int);
  }

  void count(size_t bytes) {
    const std::lock_guard lock(mutex_);
    bytes_ += bytes;
    if (bytes_ <= kMostBytes) return;
    entries_.clear();
    bytes_ = 0;
  }

  std::mutex mutex_;
  std::unordered_map<std::string, std::shared_ptr<Entry>> entries_;
  size_t bytes_ = 0;
};

}  // namespace

std::vector<ReductionProgram> reductions_of(const Cluster& cluster, const net::Groups& groups) {
  if (!backend_of(cluster).messages) return {};  // in steps they go from worker to worker
  if (groups.empty() || groups[0].size() < 3 ||
      groups.size() * groups[0].size() > static_cast<size_t>(kMostDevices))
    return {};
  static Known known;
  return known.of(cluster, groups);
}

ReductionProgram joint_reduction(const Cluster& cluster, const net::Groups& groups, Bytes bytes) {
  std::vector<int> devices;
  bool alike = true;
  for (const std::vector<int>& members : groups) {
    devices.insert(devices.end(), members.begin(), members.end());
    alike = alike && members.size() == groups[0].size();
  }
  std::sort(devices.begin(), devices.end());
  const net::Topology network(cluster);
  // In simulation, of steps among ranks.
  auto simulated = [&](const std::vector<ReductionStep>& steps, Bytes size) {
    const ReductionProgram program{devices, steps, 0, 0, 0};
    std::vector<ReductionStep> of_devices = steps;
    for (ReductionStep& step : of_devices)
      for (std::vector<int>& members : step.groups)
        for (int& member : members) member = devices[member];
    return seconds_of(of_devices, program, network, size);
  };
  std::vector<int> all(devices.size());
  std::iota(all.begin(), all.end(), 0);
  ReductionProgram best{devices, {{Collective::all_reduce, {all}}}, 0, 0, 0};
  const CollectiveModel model(part_of(cluster, devices));
  // Where the plain collective was measured, programs are as much faster as in simulation.
  const Seconds plain_fixed = simulated(best.steps, 0),
                plain_slope = (simulated(best.steps, kLarge) - plain_fixed) / kLarge;
  best.fixed = model.fixed_all_reduce();
  best.least = model.least_all_reduce();
  best.seconds_per_byte = (model.plain_all_reduce(kLarge) - best.fixed) / kLarge;
  const double fixed_scale = plain_fixed > 0 ? best.fixed / plain_fixed : 1,
               least_scale = plain_fixed > 0 ? best.least / plain_fixed : 1,
               slope_scale = plain_slope > 0 ? best.seconds_per_byte / plain_slope : 1;
  auto offer = [&](ReductionProgram program) {
    if (program.seconds(bytes) < kGain * best.seconds(bytes)) best = std::move(program);
  };
  for (ReductionProgram& program : reductions_of(cluster, {devices})) {
    program.from = 0;
    offer(std::move(program));
  }
  if (alike && groups.size() > 1 && groups[0].size() > 1) {
    auto rank_of = [&](int device) {
      return static_cast<int>(std::lower_bound(devices.begin(), devices.end(), device) -
                              devices.begin());
    };
    net::Groups inside(groups.size()), across(groups[0].size());
    for (size_t g = 0; g < groups.size(); ++g)
      for (size_t i = 0; i < groups[g].size(); ++i) {
        inside[g].push_back(rank_of(groups[g][i]));
        across[i].push_back(rank_of(groups[g][i]));
      }
    ReductionProgram program{devices,
                             {{Collective::reduce_scatter, across},
                              {Collective::all_reduce, inside},
                              {Collective::all_gather, across}},
                             0,
                             0,
                             0};
    const Seconds fixed = simulated(program.steps, 0);
    program.fixed = fixed * fixed_scale;
    program.least = fixed * least_scale;
    program.seconds_per_byte = (simulated(program.steps, kLarge) - fixed) / kLarge * slope_scale;
    offer(std::move(program));
  }
  return best;
}

void reprice(const Cluster& before, const Cluster& after, std::vector<ReductionProgram>* programs) {
  const net::Topology old(before), now(after);
  const auto together = [](const ReductionProgram& a, const ReductionProgram& b) {
    return a.fixed == b.fixed && a.seconds_per_byte == b.seconds_per_byte &&
           std::equal(a.steps.begin(), a.steps.end(), b.steps.begin(), b.steps.end(),
                      [](const ReductionStep& x, const ReductionStep& y) {
                        return x.collective == y.collective && x.groups.size() == y.groups.size();
                      }) &&
           std::none_of(a.devices.begin(), a.devices.end(), [&](int d) {
             return std::find(b.devices.begin(), b.devices.end(), d) != b.devices.end();
           });
  };
  std::vector<ReductionProgram> all = *programs;
  for (ReductionProgram& program : all)
    if (program.devices.empty()) {
      program.devices.resize(static_cast<size_t>(before.size()));
      std::iota(program.devices.begin(), program.devices.end(), 0);
    }
  for (size_t p = 0; p < all.size(); ++p) {
    const ReductionProgram& first = all[p];
    std::vector<ReductionStep> steps = first.steps;
    for (size_t s = 0; s < steps.size(); ++s) {
      steps[s].groups.clear();
      for (size_t q = 0; q < all.size(); ++q)
        if (q == p || together(first, all[q]))
          for (std::vector<int> members : all[q].steps[s].groups) {
            for (int& member : members) member = all[q].devices[member];
            steps[s].groups.push_back(std::move(members));
          }
    }
    const auto times = [&](const net::Topology& network) {
      const Seconds fixed = seconds_of(steps, first, network, 0);
      return std::pair(fixed, (seconds_of(steps, first, network, kLarge) - fixed) / kLarge);
    };
    const auto [old_fixed, old_slope] = times(old);
    const auto [fixed, slope] = times(now);
    if (old_fixed > 0) {
      (*programs)[p].fixed *= fixed / old_fixed;
      (*programs)[p].least *= fixed / old_fixed;
    }
    if (old_slope > 0) (*programs)[p].seconds_per_byte *= slope / old_slope;
  }
}

std::vector<int> devices_jointly(const Cluster& cluster, const std::vector<int>& axes,
                                 const std::vector<Reduction>& reductions,
                                 const Deadline& deadline) {
  const std::optional<Hierarchy> hierarchy = hierarchy_of(cluster);
  int64_t ranks = 1;
  for (int axis : axes) ranks *= axis;
  if (!hierarchy || ranks != cluster.size() || ranks > kMostDevices) return {};
  const net::Topology network(cluster);
  try {
    const JointPlacement joint = place_jointly({&network, net::Algorithm::ring, {}}, *hierarchy,
                                               axes, reductions, 3, deadline);
    return devices_by_axis(joint.matrix);
  } catch (const UserError&) {
    return {};  // too many placements
  } catch (const TimeIsUp&) {
    return {};
  }
}

std::vector<ReductionProgram> reductions_of_all(const Cluster& cluster) {
  std::vector<int> all(static_cast<size_t>(cluster.size()));
  std::iota(all.begin(), all.end(), 0);
  std::vector<ReductionProgram> programs = reductions_of(cluster, {all});
  for (ReductionProgram& program : programs) program.devices.clear();
  return programs;
}

}  // namespace motley::reduce
