#include "planner/parts.h"

#include <algorithm>
#include <set>

#include "cluster/part.h"
#include "core/error.h"

namespace motley::planner {

std::vector<std::vector<int>> parts_worth_trying(const Cluster& cluster) {
  std::set<std::vector<int>> sets;
  const auto add = [&](auto belongs) {
    std::vector<int> devices;
    for (int d = 0; d < cluster.size(); ++d)
      if (belongs(d)) devices.push_back(d);
    if (!devices.empty()) sets.insert(devices);
  };
  for (const DeviceType& type : cluster.types)
    add([&](int d) { return cluster.type_of(d).flops >= type.flops; });
  for (GroupId child : cluster.groups[0].children) {
    const Group& group = cluster.groups[child.index];
    add([&](int d) {
      return d >= group.first_device && d < group.first_device + group.device_count;
    });
  }
  std::vector<std::vector<int>> list(sets.begin(), sets.end());
  std::set<std::string> looks;
  std::erase_if(list, [&](const std::vector<int>& devices) {
    return !looks.insert(look_of(part_of(cluster, devices))).second;
  });
  std::stable_sort(list.begin(), list.end(),
                   [](const auto& a, const auto& b) { return a.size() > b.size(); });
  return list;
}

std::string types_in_words(const Cluster& cluster, const std::vector<int>& working) {
  if (std::ssize(working) == cluster.size() || cluster.types.size() == 1) return "";
  std::vector<int> counts(cluster.types.size());
  for (const int d : working) ++counts[cluster.devices[d].type];
  std::string text;
  for (size_t t = 0; t < counts.size(); ++t)
    if (counts[t] > 0)
      text +=
          fmt::format("{} {} x {}", text.empty() ? " on" : ",", counts[t], cluster.types[t].name);
  return text;
}

}  // namespace motley::planner
