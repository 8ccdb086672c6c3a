#include "measure/calibrate.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>

#include "cluster/part.h"
#include "comm/subgroup.h"
#include "comm/texts.h"
#include "measure/device_clock.h"
#include "measure/parts.h"

namespace motley {

namespace {

constexpr int kGroupTag = 1 << 16;  // of groups of the cluster

// The groups of the tree with at least two devices; of a chain over the same devices the first.
void each_group(
    const Cluster& cluster,
    const std::function<void(const std::vector<int>& path, const Group&, bool again)>& body) {
  std::function<void(size_t, std::vector<int>&, bool)> walk = [&](size_t g, std::vector<int>& path,
                                                                  bool again) {
    const Group& group = cluster.groups[g];
    if (group.device_count < 2) return;
    body(path, group, again);
    for (size_t c = 0; c < group.children.size(); ++c) {
      path.push_back(static_cast<int>(c));
      walk(group.children[c].index, path, group.children.size() == 1);
      path.pop_back();
    }
  };
  std::vector<int> path;
  walk(0, path, false);
}

}  // namespace

Profile calibrate(Communicator& group, const Cluster& cluster, const CalibrateOptions& options) {
  const Seconds start = wall_clock();
  auto say = [&](const std::string& what) {
    if (options.progress) options.progress(what);
  };
  Profile profile;
  profile.cluster = cluster.name;
  say("collectives");
  int number = 0;
  each_group(cluster, [&](const std::vector<int>& path, const Group& g, bool again) {
    ProfiledGroup measured;
    std::vector<int> ranks;
    for (int d = 0; d < g.device_count; ++d) ranks.push_back(g.first_device + d);
    ++number;
    if (again && !profile.groups.empty()) {
      measured = profile.groups.back();
    } else if (g.device_count == group.size()) {
      measured = measure_links(group, cluster, options);
    } else {
      group.barrier();
      if (group.rank() >= g.first_device && group.rank() < g.first_device + g.device_count) {
        const auto members = options.subgroup
                                 ? options.subgroup(ranks, fmt::format("/group{}", number))
                                 : subgroup(group, ranks, kGroupTag + number);
        measured = measure_links(*members, part_of(cluster, ranks), options);
      }
      group.barrier();
    }
    measured.path = path;
    measured.types.clear();
    for (int d : ranks) measured.types.push_back(cluster.type_of(d).name);
    profile.groups.push_back(std::move(measured));
  });
  profile.devices = {measure_device(group, cluster, options, say)};
  say("computation beside communication");
  profile.devices[0].interference = measure_interference(group, options);
  if (!options.stages.empty()) {
    say(fmt::format("{} layers and stages of pipelines", options.stages.size()));
    profile.stages = measure_layers(options, profile.devices[0].type);
    for (ProfiledStage& s : measure_meshes(group, cluster, options))
      profile.stages.push_back(std::move(s));
    group.barrier();
  }

  const std::vector<std::string> all = gather_texts(group, to_json(profile).dump());
  if (group.rank() != 0) return profile;
  profile.devices.clear();
  profile.stages.clear();
  // By type, shape and group.
  std::map<std::tuple<std::string, std::string, int, int>, ProfiledStage> stages;
  for (const DeviceType& type : cluster.types) {
    // The slowest member of a type stands for it.
    std::optional<ProfiledDevice> slowest;
    for (int r = 0; r < group.size(); ++r) {
      if (cluster.type_of(r).name != type.name) continue;
      Profile theirs = parse_profile(all[r], fmt::format("the profile of rank {}", r));
      if (!slowest || theirs.devices[0].flops < slowest->flops) slowest = theirs.devices[0];
      for (const ProfiledStage& s : theirs.stages) {
        auto [it, fresh] = stages.try_emplace({s.type, s.shape, s.devices, s.nodes}, s);
        if (s.forward + s.backward > it->second.forward + it->second.backward) it->second = s;
      }
      for (size_t g = 0; g < theirs.groups.size(); ++g)
        if (profile.groups[g].collectives.empty()) profile.groups[g] = theirs.groups[g];
    }
    if (slowest) profile.devices.push_back(*slowest);
  }
  for (auto& [key, stage] : stages) profile.stages.push_back(std::move(stage));
  profile.seconds = wall_clock() - start;
  return profile;
}

}  // namespace motley
