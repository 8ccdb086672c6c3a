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

SegmentRequest parse_segments(const std::string& text) {
  SegmentRequest request;
  if (text == "auto") {
    request.automatic = true;
    return request;
  }
  if (!text.empty() && text.find_first_not_of("0123456789") == std::string::npos) {
    request.count = text.size() > 4 ? 0 : std::stoi(text);
    if (request.count < 1 || request.count > kMaxSegments)
      throw user_error("plan", "--segments is {}; give a number from 1 to {}, auto, or modules",
                       text, kMaxSegments);
    return request;
  }
  for (size_t start = 0; start <= text.size();) {
    const size_t end = std::min(text.find(',', start), text.size());
    request.modules.push_back(text.substr(start, end - start));
    if (request.modules.back().empty())
      throw user_error("plan",
                       "--segments is '{}'; give a number, auto, or modules such as "
                       "features,classifier",
                       text);
    start = end + 1;
  }
  if (request.modules.size() >= static_cast<size_t>(kMaxSegments))
    throw user_error("plan", "--segments names {} modules; give at most {}", request.modules.size(),
                     kMaxSegments - 1);
  return request;
}

spmd::PlanResult plan_segments(spmd::PlanResult one, const Graph& graph, const Cluster& cluster,
                               const spmd::PlanRequest& request, const SegmentRequest& segments,
                               std::vector<Segmented>* tried) {
  if (segments.one()) return one;
  const Cluster devices = one.feasible ? one.plan.cluster : cluster;
  spmd::PlanRequest inner = request;
  inner.baselines = inner.parts = false;
  auto least = std::numeric_limits<double>::infinity();
  if (one.feasible) least = simulate(one.plan).step;
  std::set<std::vector<int>> seen;
  // True if it is the best so far.
  auto attempt = [&](const std::vector<int>& segment_of, std::string what) {
    if (!seen.insert(segment_of).second || request.synthesis.limits.deadline.over()) return false;
    Graph cut = with_segments(graph, segment_of);
    Segmented& note = tried->emplace_back();
    note.segments = segments_of(cut).count;
    note.what = std::move(what);
    if (note.segments == 1) return false;
    spmd::PlanResult result = spmd::plan(std::move(cut), devices, inner);
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
