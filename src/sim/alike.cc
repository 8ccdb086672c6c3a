#include "sim/alike.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

namespace motley {

std::vector<int> like_of(const CostModel& model, const Fractions& fractions,
                         const std::set<Cut>& cuts, const std::vector<Seconds>& now, bool each) {
  const int devices = model.cluster().size();
  std::vector<int> like(devices);
  std::iota(like.begin(), like.end(), 0);
  if (each) return like;
  // A device seldom differs from the one before it.
  const auto refine = [&](const auto& value) {
    std::map<std::pair<int, double>, int> first;
    auto last = first.end();
    for (int d = 0; d < devices; ++d) {
      const std::pair<int, double> key(like[d], value(d));
      if (last == first.end() || last->first != key) last = first.try_emplace(key, d).first;
      like[d] = last->second;
    }
  };
  std::fill(like.begin(), like.end(), 0);
  refine([&](int d) { return model.cluster().devices[d].type; });
  refine([&](int d) { return now[d]; });
  for (const Cut& cut : cuts) {
    const std::vector<double>& part = fractions.by_device(cut);
    refine([&](int d) { return part[d]; });
  }
  return like;
}

std::vector<int> first_of(const std::vector<int>& like) {
  std::vector<int> first;
  for (size_t d = 0; d < like.size(); ++d)
    if (like[d] == static_cast<int>(d)) first.push_back(like[d]);
  return first;
}

}  // namespace motley
