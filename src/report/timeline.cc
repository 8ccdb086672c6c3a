#include "report/timeline.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "report/html.h"

namespace motley::report {

namespace {

Colour colour_of(const Plan& plan, const Span& span) {
  if (span.kind == WalkKind::comm) return Colour::comm;
  if (span.kind == WalkKind::wait) return Colour::wait;
  if (span.name == "optimizer" || span.name == "step") return Colour::optimizer;
  const bool backward = span.node.valid() && !plan.pipeline
                            ? plan.running().graph().node(span.node).phase == Phase::backward
                            : span.name.starts_with("backward");
  return backward ? Colour::backward : Colour::forward;
}

// Neighbours that last at most `threshold` together become one.
std::vector<Bar> merge(const std::vector<Bar>& bars, Seconds threshold) {
  std::vector<Bar> out;
  for (size_t i = 0; i < bars.size();) {
    size_t end = i + 1;
    while (end < bars.size() && bars[end].end - bars[i].begin <= threshold) ++end;
    Bar bar = bars[i];
    Seconds longest = bar.end - bar.begin;
    for (size_t k = i + 1; k < end; ++k) {
      bar.end = std::max(bar.end, bars[k].end);
      bar.merged += bars[k].merged;
      if (const Seconds length = bars[k].end - bars[k].begin; length > longest) {
        longest = length;
        bar.colour = bars[k].colour;
        bar.name = bars[k].name;
      }
    }
    out.push_back(std::move(bar));
    i = end;
  }
  return out;
}

int row_of(const Lane& lane, int devices) { return lane.devices[0] + (lane.beside ? devices : 0); }

bool equal(const Span& a, const Span& b) {
  return a.begin == b.begin && a.end == b.end && a.kind == b.kind && a.name == b.name;
}

}  // namespace

std::vector<Lane> lanes_of(const Plan& plan, const Simulation& simulation, size_t budget) {
  // What travels beside computation has rows of its own, behind those of the devices.
  const int devices = plan.cluster.size(), rows = plan.duplex ? 2 * devices : devices;
  std::vector<std::vector<const Span*>> by_device(rows);
  for (const Span& s : simulation.spans)
    by_device[s.device + (plan.duplex && s.kind == WalkKind::comm ? devices : 0)].push_back(&s);
  // Devices of one hash and equal spans are one lane.
  std::map<size_t, std::vector<int>> heads;  // hash -> lanes
  std::vector<Lane> lanes;
  std::vector<int> lane_of(rows);
  for (int row = 0; row < rows; ++row) {
    const int d = row % devices;
    if (const int like = simulation.like.empty() ? d : simulation.like[d]; like != d) {
      lane_of[row] = lane_of[row - d + like];
      lanes[lane_of[row]].devices.push_back(d);
      continue;
    }
    auto& spans = by_device[row];
    std::stable_sort(spans.begin(), spans.end(),
                     [](const Span* a, const Span* b) { return a->begin < b->begin; });
    size_t hash = spans.size();
    for (const Span* s : spans)
      hash = hash * 1000003 + std::hash<double>()(s->end) + std::hash<std::string>()(s->name);
    int lane = -1;
    for (int candidate : heads[hash]) {
      const auto& other = by_device[row_of(lanes[candidate], devices)];
      if (lanes[candidate].beside == (row >= devices) &&
          std::equal(spans.begin(), spans.end(), other.begin(), other.end(),
                     [](const Span* a, const Span* b) { return equal(*a, *b); }))
        lane = candidate;
    }
    if (lane < 0) {
      lane = static_cast<int>(lanes.size());
      heads[hash].push_back(lane);
      lanes.emplace_back().beside = row >= devices;
    }
    lane_of[row] = lane;
    lanes[lane].devices.push_back(d);
  }
  const size_t most = std::max<size_t>(16, budget / std::max<size_t>(1, lanes.size()));
  for (Lane& lane : lanes) {
    for (const Span* s : by_device[row_of(lane, devices)])
      lane.bars.push_back({s->begin, s->end, colour_of(plan, *s), s->name, 1});
    if (lane.bars.empty()) continue;
    Seconds threshold =
        (lane.bars.back().end - lane.bars[0].begin) / static_cast<double>(64 * most);
    for (; lane.bars.size() > most; threshold *= 2) lane.bars = merge(lane.bars, threshold);
  }
  return lanes;
}

Json to_json(const Plan& plan, const std::vector<Lane>& lanes) {
  Seconds end = 0;
  for (const Lane& lane : lanes)
    for (const Bar& bar : lane.bars) end = std::max(end, bar.end);
  const double tick = end > 0 ? 1e6 / end : 0;
  std::map<std::string, int> number;
  Json names = Json::array(), list = Json::array();
  for (const Lane& lane : lanes) {
    Json bars = Json::array();
    int64_t last = 0;
    for (const Bar& bar : lane.bars) {
      auto [it, fresh] = number.try_emplace(bar.name, static_cast<int>(names.size()));
      if (fresh) names.push_back(bar.name);
      const auto from = static_cast<int64_t>(std::llround(bar.begin * tick)),
                 to = static_cast<int64_t>(std::llround(bar.end * tick));
      for (int64_t x : {from - last, to - from, static_cast<int64_t>(bar.colour),
                        static_cast<int64_t>(it->second), static_cast<int64_t>(bar.merged)})
        bars.push_back(x);
      last = to;
    }
    std::string label = ranges(lane.devices);
    if (label.size() > 24) label = fmt::format("{}, …", label.substr(0, label.find(',', 12)));
    label = fmt::format("{} {}", plan.cluster.type_of(lane.devices[0]).name, label);
    std::vector<int> stages;
    if (plan.pipeline)
      for (const Seat& seat : plan.pipeline->seats(lane.devices[0])) stages.push_back(seat.stage);
    if (lane.beside) label += " · communication";
    if (!stages.empty()) label += fmt::format(" · stage {}", fmt::join(stages, " + "));
    list.push_back({{"label", label}, {"bars", std::move(bars)}});
  }
  return {{"end", end}, {"names", std::move(names)}, {"lanes", std::move(list)}};
}

}  // namespace motley::report
