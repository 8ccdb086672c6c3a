#include "shard/restricted.h"

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace motley {

Program renumbered(const Theory& restricted, const Theory& theory, const Program& program) {
  std::vector<Step> steps = program.steps;
  for (Step& step : steps) {
    if (!step.is_compute()) continue;
    const Triple& mine = restricted.triples(step.node)[step.triple];
    const auto& all = theory.triples(step.node);
    const auto it = std::find_if(all.begin(), all.end(), [&](const Triple& t) {
      return t.in == mine.in && t.out == mine.out && t.kernel == mine.kernel;
    });
    MOTLEY_CHECK(it != all.end());
    step.triple = static_cast<int>(it - all.begin());
  }
  return {std::move(steps), program.sizes};
}

}  // namespace motley
