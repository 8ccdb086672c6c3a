#include "bounds/cutting_planes.h"

#include <cmath>
#include <numeric>

namespace motley::bounds {

using namespace solver;

void raise_bound(const PlaneRules& rules, const std::function<bool()>& go_on,
                 const std::function<PlaneSearch(const MaxMin&)>& search, CuttingPlanes* planes) {
  int limited = 0;
  bool halfway = rules.halfway;
  for (int i = 0; i < rules.searches && go_on(); ++i) {
    if (!planes->lines.empty()) {
      const MaxMin& at = planes->at = max_min(planes->lines, planes->most);
      planes->cheapest.clear();
      for (size_t l = 0; l < planes->lines.size(); ++l)
        if (price(planes->lines[l], at) <= at.price + std::abs(at.price) * rules.gain)
          planes->cheapest.push_back(l);
      // No weights can prove more than the programs that are known cost under them.
      if (at.price - planes->bound <= rules.gain * rules.step()) break;
      if (at.price < rules.reachable * rules.step()) break;
      halfway = halfway && !planes->best.empty();
      for (size_t b = 0; b < planes->best.size() && halfway; ++b)
        planes->at.weights[b] = (at.weights[b] + planes->best[b]) / 2;
    }
    PlaneSearch found = search(planes->at);
    if (found.bound > planes->bound || planes->best.empty()) {
      planes->best = planes->at.weights;
      planes->raised = true;
    }
    planes->bound = std::max(planes->bound, found.bound);
    if (!found.line || std::isinf(planes->bound)) break;
    if (planes->bound >= (1 - rules.gap) * rules.step()) break;
    // Searches where two programs tie are the hardest.
    if (found.limited && ++limited == rules.limited) break;
    // Nothing more to learn at the extreme.
    if (found.known && !halfway) break;
    halfway = rules.halfway && !found.known;
    if (found.known) continue;
    planes->lines.push_back(std::move(*found.line));
    const std::vector<double>& m = planes->at.multipliers;
    if (planes->most < rules.most_multiplier &&
        *std::max_element(m.begin(), m.end()) >= planes->most * (1 - 1e-9))
      planes->most *= 4;
  }
}

}  // namespace motley::bounds
