#include "net/reduction.h"

#include <fmt/format.h>

namespace motley {

std::vector<ReductionProgram> programs_for(const std::vector<ReductionProgram>& programs,
                                           const std::vector<int>& devices, int cluster_size) {
  bool all = static_cast<int>(devices.size()) == cluster_size;
  for (size_t i = 0; i < devices.size() && all; ++i) all = devices[i] == static_cast<int>(i);
  std::vector<ReductionProgram> result;
  for (const ReductionProgram& p : programs)
    if (p.devices == devices || (all && p.devices.empty())) result.push_back(p);
  return result;
}

std::string check(const std::vector<ReductionStep>& steps, int devices) {
  // A device's contributions are a bit for each device.
  if (devices > kMostReduced)
    return fmt::format("reductions in steps are for at most {} devices", kMostReduced);
  net::SparseStates states(devices);
  for (size_t s = 0; s < steps.size(); ++s) {
    std::vector<bool> taken(static_cast<size_t>(devices));
    for (const std::vector<int>& group : steps[s].groups) {
      if (group.size() < 2) return fmt::format("step {} has a group of fewer than two devices", s);
      for (int d : group) {
        if (d < 0 || d >= devices)
          return fmt::format("step {} names device {} of {}", s, d, devices);
        if (taken[d]) return fmt::format("step {} names device {} twice", s, d);
        taken[d] = true;
      }
    }
    if (!states.apply(steps[s].collective, steps[s].groups))
      return fmt::format(
          "step {}, {}, is not allowed where its groups stand: they hold other "
          "chunks than it needs or contributions twice",
          s, to_string(steps[s].collective));
  }
  return states.at_goal() ? "" : "some device ends without the sum of all";
}

}  // namespace motley
