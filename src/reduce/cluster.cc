#include "reduce/cluster.h"

#include <algorithm>
#include <numeric>

#include "net/collectives.h"
#include "reduce/best.h"

namespace motley::reduce {

namespace {

constexpr int kMostDevices = 8192;
constexpr int kMostSteps = 3;
constexpr double kGain = 0.97;
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
  for (size_t d = by_depth.size(); d-- > 1;)
    steps.push_back({net::Collective::reduce, by_depth[d]});
  steps.push_back({net::Collective::all_reduce, by_depth[0]});
  for (size_t d = 1; d < by_depth.size(); ++d)
    steps.push_back({net::Collective::broadcast, by_depth[d]});
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
    if (first.children.empty())
      hierarchy.push_back({"device", first.device_count});
    else
      hierarchy.push_back({name_of(below), static_cast<int>(first.children.size())});
    groups = std::move(below);
  }
  return hierarchy;
}

Seconds seconds_of(const std::vector<ReductionStep>& steps, const net::Topology& network,
                   Bytes bytes) {
  net::SparseStates states(network.devices());
  auto share = [&](int device) {
    double chunks = 0;
    for (const auto& [first, count] : states.held(device)) chunks += count;
    return chunks / network.devices();
  };
  Seconds seconds = 0;
  for (const ReductionStep& step : steps) {
    // What the first group holds, which is what every group holds; all_gather makes it.
    double held = share(step.groups[0][0]);
    if (step.collective == net::Collective::all_gather)
      held *= static_cast<double>(step.groups[0].size());
    seconds += net::collective_time(network, step.collective, net::Algorithm::ring, step.groups,
                                    held * bytes);
    states.apply(step.collective, step.groups);
  }
  return seconds;
}

std::vector<ReductionProgram> reductions_of(const Cluster& cluster) {
  const bool levels =
      std::count_if(cluster.groups.begin(), cluster.groups.end(), [](const Group& g) {
        return std::max<size_t>(g.children.size(), g.children.empty() ? g.device_count : 0) > 1;
      }) > 1;
  if (!levels || cluster.size() > kMostDevices) return {};
  const net::Topology network(cluster);
  const std::optional<Hierarchy> hierarchy = hierarchy_of(cluster);
  ReductionProgram program;
  program.steps = hierarchy ? synthesised(cluster, network, *hierarchy) : through_heads(cluster);
  if (program.steps.size() < 2) return {};

  std::vector<int> all(static_cast<size_t>(cluster.size()));
  std::iota(all.begin(), all.end(), 0);
  const std::vector<ReductionStep> plain = {{net::Collective::all_reduce, {all}}};
  const CollectiveModel model(cluster);
  // Seconds at no bytes and per byte: of the plain collective in the model and in simulation, and
  // of the program in simulation.
  auto line = [](auto&& seconds) {
    const Seconds fixed = seconds(0);
    return std::pair(fixed, (seconds(kLarge) - fixed) / kLarge);
  };
  const auto [model_fixed, model_slope] =
      line([&](Bytes bytes) { return model.plain_all_reduce(bytes); });
  const auto [plain_fixed, plain_slope] =
      line([&](Bytes bytes) { return seconds_of(plain, network, bytes); });
  const auto [fixed, slope] =
      line([&](Bytes bytes) { return seconds_of(program.steps, network, bytes); });
  program.fixed = plain_fixed > 0 ? fixed * (model_fixed / plain_fixed) : fixed;
  program.seconds_per_byte = plain_slope > 0 ? slope * (model_slope / plain_slope) : slope;
  for (Bytes bytes = kSmallest; bytes <= kLarge; bytes *= 2) {
    if (program.fixed + program.seconds_per_byte * bytes >= kGain * model.plain_all_reduce(bytes))
      program.from = 0;
    else if (program.from == 0)
      program.from = bytes;
  }
  if (program.from == 0) return {};
  return {program};
}

}  // namespace motley::reduce
