#include "planner/engines.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace motley::planner {

void rank(EngineResult* result) {
  std::vector<size_t> order(result->plans.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return result->plans[a]->predicted_step_s < result->plans[b]->predicted_step_s;
  });
  std::vector<std::unique_ptr<Plan>> plans;
  std::vector<std::string> notes;
  for (size_t i : order) {
    plans.push_back(std::move(result->plans[i]));
    notes.push_back(std::move(result->notes[i]));
  }
  result->plans = std::move(plans);
  result->notes = std::move(notes);
}

}  // namespace motley::planner
