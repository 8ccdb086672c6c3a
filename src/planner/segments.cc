#include "planner/segments.h"

#include <algorithm>
#include <limits>
#include <set>

#include "core/error.h"
#include "graph/segment.h"
#include "sim/simulate.h"
#include "spmd/segments.h"

namespace motley::planner {

namespace {

// Segments, where they are found automatically.
constexpr int kAlwaysTried = 2, kMostTried = 6;

}  // namespace

ProgramResult plan_segments(ProgramResult one, const Graph& graph, const Cluster& cluster,
                            const ProgramRequest& request, const SegmentRequest& segments,
                            std::vector<Segmented>* tried) {
  if (segments.one()) return one;
  const Cluster devices = one.feasible ? one.plan.cluster : cluster;
  ProgramRequest inner = request;
  inner.baselines = inner.parts = false;
  auto least = std::numeric_limits<double>::infinity();
  if (one.feasible) least = simulate(one.plan).step;
  std::set<std::vector<int>> seen;
  // True if it is the best so far.
  auto attempt = [&](const std::vector<int>& segment_of, std::string what) {
    if (!seen.insert(segment_of).second || request.alternation.limits.deadline.over()) return false;
    Graph cut = with_segments(graph, segment_of);
    Segmented& note = tried->emplace_back();
    note.segments = segments_of(cut).count;
    note.what = std::move(what);
    if (note.segments == 1) return false;
    ProgramResult result = plan_program(std::move(cut), devices, inner);
    note.feasible = result.feasible;
    note.search_s = result.search_s;
    one.search_s += result.search_s;
    one.solves += result.solves;
    one.states += result.states;
    if (!result.feasible) return false;
    note.simulated_s = simulate(result.plan).step;
    if (note.simulated_s >= least) return false;
    least = note.simulated_s;
    result.baselines = std::move(one.baselines);
    if (one.feasible) result.devices = one.devices;
    result.search_s = one.search_s;
    result.solves = one.solves;
    result.states = one.states;
    one = std::move(result);
    return true;
  };
  if (!segments.modules.empty()) {
    attempt(segments_by_module(graph, segments.modules),
            fmt::format("segments {}", fmt::join(segments.modules, ", ")));
    return one;
  }
  const int first = segments.automatic ? 2 : segments.count;
  const int last = segments.automatic ? kMostTried : segments.count;
  for (int count = first; count <= last; ++count) {
    bool better = false;
    for (const auto weight : {spmd::SegmentWeight::bytes, spmd::SegmentWeight::flops})
      better = attempt(spmd::partition_segments(graph, count, weight),
                       fmt::format("{} segments of equal {}", count, spmd::to_string(weight))) ||
               better;
    if (!better && count > kAlwaysTried) break;
  }
  return one;
}

}  // namespace motley::planner
