#include "reduce/best.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <queue>
#include <utility>

#include "core/error.h"

namespace motley::reduce {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

}  // namespace

PlacementCost::PlacementCost(const CostModel& model, Bytes bytes, const Hierarchy& hierarchy,
                             const Matrix& matrix, const std::vector<int>& reduce_axes,
                             Numbering numbering)
    : model_(model),
      bytes_(bytes),
      synthesis_(
          synthesis_hierarchy(hierarchy, matrix, reduce_axes, HierarchyKind::collapsed, numbering)),
      seconds_per_share_(synthesis_.levels.size(), 0.0) {
  if (model.network->devices() != devices_of(hierarchy))
    throw user_error("reduce",
                     "--hierarchy {} has {} devices but the cluster has {}; make them equal",
                     to_string(hierarchy), devices_of(hierarchy), model.network->devices());
  if (numbering != Numbering::level_major) return;  // blocks of the group are not units then
  int64_t members = size_of(synthesis_.levels);     // of a group, in a block of the level
  for (size_t l = 1; l < synthesis_.levels.size(); ++l) {
    members /= synthesis_.levels[l];
    int unit = 1;
    for (size_t j = synthesis_.source[l] + 1; j < hierarchy.size(); ++j) unit *= hierarchy[j].size;
    BytesPerSecond slowest = kInfinity;
    for (int first = 0; first < devices_of(hierarchy); first += unit)
      slowest = std::min(slowest, model.network->bandwidth_into(first, unit));
    if (std::isfinite(slowest))
      seconds_per_share_[l] = bytes / slowest * static_cast<double>(unit / members);
  }
}

Seconds PlacementCost::step(const Step& step, uint32_t scattered) {
  auto key = std::tuple(static_cast<int>(step.form.shape), step.form.slice, step.form.ancestor,
                        static_cast<int>(step.collective), scattered);
  auto it = known_.find(key);
  if (it != known_.end()) return it->second;
  // The buffer of the operation: what all_gather makes, what the others start from.
  Bytes bytes = bytes_;
  Span span = span_of(step.form, synthesis_.levels);
  for (int l = 1; l <= levels(); ++l) {
    bool gathered = step.collective == Collective::all_gather && l >= span.first && l <= span.last;
    if ((scattered >> l & 1) && !gathered) bytes /= synthesis_.levels[l];
  }
  net::Algorithm algorithm = model_.algorithm;
  if (algorithm == net::Algorithm::tree && step.collective != Collective::all_reduce)
    algorithm = net::Algorithm::ring;
  Seconds seconds = net::collective_time(*model_.network, step.collective, algorithm,
                                         lower(step.form, synthesis_), bytes, model_.tuning);
  known_.emplace(key, seconds);
  return seconds;
}

Seconds PlacementCost::program(const Program& program) {
  Seconds total = 0;
  uint32_t scattered = 0;
  for (const Step& s : program) {
    total += step(s, scattered);
    Span span = span_of(s.form, synthesis_.levels);
    for (int l = span.first; l <= span.last; ++l) {
      if (s.collective == Collective::reduce_scatter) scattered |= uint32_t{1} << l;
      if (s.collective == Collective::all_gather) scattered &= ~(uint32_t{1} << l);
    }
  }
  return total;
}

Seconds PlacementCost::all_reduce() {
  return levels() == 0 ? 0 : step({{Shape::inside, 0, 0}, Collective::all_reduce}, 0);
}

Seconds PlacementCost::at_least(const ProgramState& state) const {
  if (state.goal) return 0;
  Seconds most = 0;
  for (size_t l = 1; l < seconds_per_share_.size(); ++l)
    most = std::max(most, state.lack[l] * seconds_per_share_[l]);
  // A hair less, so that rounding cannot make it exceed what it bounds.
  return (most + model_.tuning.launch) * (1 - 1e-9);
}

BestProgram best_program(const ProgramSpace& space, PlacementCost* cost) {
  struct Node {
    Seconds bound, spent;
    int steps, state, parent;
    Step step;
  };
  std::vector<Node> nodes = {{cost->at_least(space.states[0]), 0, 0, 0, -1, {}}};
  auto later = [&](int a, int b) {
    return std::tuple(nodes[a].bound, nodes[a].steps, a) >
           std::tuple(nodes[b].bound, nodes[b].steps, b);
  };
  std::priority_queue<int, std::vector<int>, decltype(later)> queue(later);
  queue.push(0);
  std::vector<Seconds> cheapest(space.states.size() * (space.size_limit + 1), kInfinity);
  Seconds incumbent = kInfinity;
  BestProgram best;
  for (;;) {
    MOTLEY_CHECK(!queue.empty());
    int id = queue.top();
    queue.pop();
    Node node = nodes[id];
    const ProgramState& state = space.states[node.state];
    if (state.goal) {
      best.seconds = node.spent;
      for (int at = id; nodes[at].parent >= 0; at = nodes[at].parent)
        best.program.push_back(nodes[at].step);
      std::reverse(best.program.begin(), best.program.end());
      return best;
    }
    if (node.spent > cheapest[node.state * (space.size_limit + 1) + node.steps]) continue;
    if (node.steps == space.size_limit) continue;
    ++best.states_expanded;
    for (const Transition& t : state.next) {
      const ProgramState& to = space.states[t.to];
      Seconds left = cost->at_least(to);
      if (node.spent + left > incumbent) continue;  // before anything is simulated
      Seconds spent = node.spent + cost->step(t.step, state.scattered);
      Seconds& known = cheapest[t.to * (space.size_limit + 1) + node.steps + 1];
      if (spent >= known || spent + left > incumbent) continue;
      known = spent;
      if (to.goal) incumbent = std::min(incumbent, spent);
      nodes.push_back(
          {std::max(node.bound, spent + left), spent, node.steps + 1, t.to, id, t.step});
      queue.push(static_cast<int>(nodes.size()) - 1);
    }
  }
}

const ProgramSpace& ProgramSpaces::of(int levels) {
  auto it = spaces_.find(levels);
  if (it == spaces_.end()) it = spaces_.emplace(levels, program_space(levels, size_limit_)).first;
  return it->second;
}

JointPlacement place_jointly(const CostModel& model, const Hierarchy& hierarchy,
                             const std::vector<int>& axes, const std::vector<Reduction>& reductions,
                             int size_limit) {
  ProgramSpaces spaces(size_limit);
  std::vector<Matrix> all = placements(hierarchy, axes);
  auto costs = [&](const Matrix& m, size_t r) {
    return PlacementCost(model, reductions[r].bytes, hierarchy, m, reductions[r].axes);
  };
  struct Candidate {
    Seconds bound;
    size_t index;
    std::vector<Seconds> bounds;
  };
  std::vector<Candidate> candidates;
  for (size_t i = 0; i < all.size(); ++i) {
    Candidate c{0, i, {}};
    for (size_t r = 0; r < reductions.size(); ++r) {
      PlacementCost cost = costs(all[i], r);
      c.bounds.push_back(cost.at_least(spaces.of(cost.levels()).states[0]));
      c.bound += c.bounds.back();
    }
    candidates.push_back(std::move(c));
  }
  std::sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
    return std::pair(a.bound, a.index) < std::pair(b.bound, b.index);
  });
  JointPlacement best;
  best.seconds = kInfinity;
  best.placements = static_cast<int>(all.size());
  for (const Candidate& c : candidates) {
    if (c.bound >= best.seconds) break;
    Seconds spent = 0, left = c.bound;
    std::vector<BestProgram> programs;
    for (size_t r = 0; r < reductions.size() && spent + left < best.seconds; ++r) {
      PlacementCost cost = costs(all[c.index], r);
      programs.push_back(best_program(spaces.of(cost.levels()), &cost));
      ++best.searches;
      spent += programs.back().seconds;
      left -= c.bounds[r];
    }
    if (programs.size() < reductions.size() || spent >= best.seconds) continue;
    best.seconds = spent;
    best.matrix = all[c.index];
    best.programs = std::move(programs);
  }
  return best;
}

}  // namespace motley::reduce
