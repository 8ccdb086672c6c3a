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
// Bounds are a hair lower, so that rounding cannot lift one above what it bounds.
constexpr double kBelow = 1 - 1e-9;

}  // namespace

PlacementCost::PlacementCost(const CostModel& model, Bytes bytes, const Hierarchy& hierarchy,
                             const Matrix& matrix, const std::vector<int>& reduce_axes,
                             Numbering numbering)
    : model_(model),
      bytes_(bytes),
      synthesis_(
          synthesis_hierarchy(hierarchy, matrix, reduce_axes, HierarchyKind::collapsed, numbering)),
      units_(synthesis_.levels.size()) {
  if (model.network->devices() != devices_of(hierarchy))
    throw user_error("reduce",
                     "--hierarchy {} has {} devices but the cluster has {}; make them equal",
                     to_string(hierarchy), devices_of(hierarchy), model.network->devices());
  if (numbering != Numbering::level_major) return;  // blocks of the group are not units then
  int64_t members = size_of(synthesis_.levels);
  for (size_t l = 1; l < synthesis_.levels.size(); ++l) {
    Unit& unit = units_[l];
    members /= synthesis_.levels[l];
    unit.devices = 1;
    for (size_t j = synthesis_.source[l] + 1; j < hierarchy.size(); ++j)
      unit.devices *= hierarchy[j].size;
    unit.copies = unit.devices / static_cast<int>(members);
    unit.slowest = kInfinity, unit.fastest = 0;
    for (int first = 0; first < devices_of(hierarchy); first += unit.devices) {
      BytesPerSecond bandwidth = model.network->bandwidth_into(first, unit.devices);
      unit.slowest = std::min(unit.slowest, bandwidth);
      unit.fastest = std::max(unit.fastest, bandwidth);
    }
  }
}

Bytes PlacementCost::buffer(const Step& step, uint32_t scattered) const {
  Bytes bytes = bytes_;
  Span span = span_of(step.form, synthesis_.levels);
  for (int l = 1; l <= levels(); ++l) {
    bool gathered = step.collective == Collective::all_gather && l >= span.first && l <= span.last;
    if ((scattered >> l & 1) && !gathered) bytes /= synthesis_.levels[l];
  }
  return bytes;
}

Seconds PlacementCost::step(const Step& step, uint32_t scattered) {
  auto key = std::tuple(static_cast<int>(step.form.shape), step.form.slice, step.form.ancestor,
                        static_cast<int>(step.collective), scattered);
  auto it = known_.find(key);
  if (it != known_.end()) return it->second;
  net::Algorithm algorithm = model_.algorithm;
  if (algorithm == net::Algorithm::tree && step.collective != Collective::all_reduce)
    algorithm = net::Algorithm::ring;
  Seconds seconds =
      net::collective_time(*model_.network, step.collective, algorithm,
                           lower(step.form, synthesis_), buffer(step, scattered), model_.tuning);
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

Seconds PlacementCost::at_least(const Step& step, uint32_t scattered) const {
  Span span = span_of(step.form, synthesis_.levels);
  Bytes bytes = buffer(step, scattered);
  double size = 1;  // of a group
  for (int l = span.first; l <= span.last; ++l) size *= synthesis_.levels[l];
  Seconds most = 0;
  double inside = 1;  // members of a group in one unit of level l
  for (int l = levels(); l >= span.first; --l) {
    const Unit& unit = units_[l];
    double groups = step.form.shape == Shape::master ? unit.copies : unit.devices / inside;
    double share = 1;
    if (step.collective == Collective::reduce_scatter) share = inside / size;
    if (step.collective == Collective::all_gather) share = 1 - inside / size;
    bool alike = step.form.shape != Shape::master && step.collective != Collective::reduce &&
                 step.collective != Collective::broadcast;
    most = std::max(most, share * bytes * groups / (alike ? unit.slowest : unit.fastest));
    if (l <= span.last) inside *= synthesis_.levels[l];
  }
  return (most + model_.tuning.launch) * kBelow;
}

Seconds PlacementCost::at_least(const ProgramState& state) const {
  if (state.goal) return 0;
  int least = 0;  // size of the smallest level scattered
  for (int l = 1; l <= levels(); ++l)
    if ((state.scattered >> l & 1) && (least == 0 || synthesis_.levels[l] < least))
      least = synthesis_.levels[l];
  Seconds most = 0;
  for (int l = 1; l <= levels(); ++l) {
    double share = state.lack[l];
    if (share > 0 && share < 1 && least > 0) share = 1 - 1.0 / least;
    most = std::max(most, share * bytes_ * units_[l].copies / units_[l].slowest);
  }
  return (most + model_.tuning.launch) * kBelow;
}

BestProgram best_program(const ProgramSpace& space, PlacementCost* cost, const Deadline& deadline) {
  // A node is a way to a state whose last step may still be priced by its bound only.
  struct Node {
    Seconds bound, spent;  // spent: without the last step while that is not simulated
    int steps, state, parent;
    Step step;
    bool simulated;
  };
  std::vector<Node> nodes = {{cost->at_least(space.states[0]), 0, 0, 0, -1, {}, true}};
  auto later = [&](int a, int b) {
    return std::tuple(nodes[a].bound, nodes[a].steps, a) >
           std::tuple(nodes[b].bound, nodes[b].steps, b);
  };
  std::priority_queue<int, std::vector<int>, decltype(later)> queue(later);
  queue.push(0);
  std::vector<Seconds> cheapest(space.states.size() * (space.size_limit + 1), kInfinity);
  BestProgram best;
  for (;;) {
    MOTLEY_CHECK(!queue.empty());
    deadline.check(1);
    int id = queue.top();
    queue.pop();
    Node& node = nodes[id];
    const ProgramState& state = space.states[node.state];
    Seconds& known = cheapest[node.state * (space.size_limit + 1) + node.steps];
    if (!node.simulated) {
      // What a dominated way would cost need not be known.
      if (node.spent >= known) continue;
      node.spent += cost->step(node.step, space.states[nodes[node.parent].state].scattered);
      node.simulated = true;
      if (node.spent >= known) continue;
      known = node.spent;
      node.bound = std::max(node.bound, node.spent + cost->at_least(state));
      queue.push(id);
      continue;
    }
    if (node.spent > known) continue;
    if (state.goal) {
      best.seconds = node.spent;
      for (int at = id; nodes[at].parent >= 0; at = nodes[at].parent)
        best.program.push_back(nodes[at].step);
      std::reverse(best.program.begin(), best.program.end());
      return best;
    }
    if (node.steps == space.size_limit) continue;
    ++best.states_expanded;
    Node from = node;
    for (const Transition& t : state.next) {
      Seconds bound =
          from.spent + cost->at_least(t.step, state.scattered) + cost->at_least(space.states[t.to]);
      nodes.push_back(
          {std::max(from.bound, bound), from.spent, from.steps + 1, t.to, id, t.step, false});
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
                             int size_limit, const Deadline& deadline) {
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
      deadline.check();
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
    try {
      for (size_t r = 0; r < reductions.size() && spent + left < best.seconds; ++r) {
        PlacementCost cost = costs(all[c.index], r);
        programs.push_back(best_program(spaces.of(cost.levels()), &cost, deadline));
        ++best.searches;
        spent += programs.back().seconds;
        left -= c.bounds[r];
      }
    } catch (const TimeIsUp&) {
      if (best.programs.empty()) throw;
      break;
    }
    if (programs.size() < reductions.size() || spent >= best.seconds) continue;
    best.seconds = spent;
    best.matrix = all[c.index];
    best.programs = std::move(programs);
  }
  return best;
}

}  // namespace motley::reduce
