#include "pipeline/schedule.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/error.h"

namespace motley::pipeline {

Seconds least_period(const Pipeline& pipeline) {
  Seconds p = 0;
  for (const StageTime& s : pipeline.stages) p = std::max(p, s.total());
  for (const LinkTime& l : pipeline.links) p = std::max({p, l.forward, l.backward});
  return p;
}

Seconds period(const Pipeline& pipeline, const std::vector<int>& counts) {
  int stages = pipeline.size();
  MOTLEY_CHECK(static_cast<int>(counts.size()) == stages);
  Seconds p = least_period(pipeline);
  for (int i = 0; i < stages; ++i) {
    Seconds round_trip = pipeline.stages[i].total();
    for (int j = i + 1; j < stages; ++j) {
      MOTLEY_CHECK(counts[j - 1] >= counts[j], "launch counts increase at stage {}", j);
      round_trip += pipeline.links[j - 1].total() + pipeline.stages[j].total();
      p = std::max(p, round_trip / (counts[i] - counts[j] + 1));
    }
  }
  return p;
}

Launch launch_last(Seconds total) { return {total, 1}; }

Launch launch_before(const Launch& next, Seconds total, Seconds gap, Seconds target) {
  Seconds y = next.state + total + gap;
  double ratio = target > 0 ? y / target : 1;
  // A cap on the count keeps a target of almost zero from overflowing it.
  int count = static_cast<int>(std::clamp(std::ceil(ratio * (1 - kCountSlack)), 1.0, 1e9));
  return {std::max(y, (count - 1) * target + total), count};
}

std::vector<int> exact_counts(const Pipeline& pipeline, Seconds target) {
  int stages = pipeline.size();
  std::vector<int> counts(stages, 1);
  Launch launch = launch_last(pipeline.stages[stages - 1].total());
  for (int i = stages - 2; i >= 0; --i) {
    launch = launch_before(launch, pipeline.stages[i].total(), pipeline.links[i].total(), target);
    counts[i] = launch.count;
  }
  return counts;
}

ExactCounts exact_counts(const Pipeline& pipeline) {
  auto fits = [&](const std::vector<int>& counts) {
    if (pipeline.in_flight_limit.empty()) return true;
    for (size_t i = 0; i < counts.size(); ++i)
      if (counts[i] > pipeline.in_flight_limit[i]) return false;
    return true;
  };
  Seconds low = least_period(pipeline), high = 0;
  ExactCounts best;
  best.counts = exact_counts(pipeline, low);
  if (!fits(best.counts)) {
    for (const StageTime& s : pipeline.stages) high += s.total();
    for (const LinkTime& l : pipeline.links) high += l.total();
    best.counts = exact_counts(pipeline, high);
    MOTLEY_CHECK(fits(best.counts), "a limit is below 1");
    while (true) {
      Seconds middle = low + (high - low) / 2;
      if (middle <= low || middle >= high) break;
      std::vector<int> counts = exact_counts(pipeline, middle);
      if (fits(counts)) {
        high = middle;
        best.counts = std::move(counts);
      } else {
        low = middle;
      }
    }
  }
  best.period = period(pipeline, best.counts);
  return best;
}

Seconds makespan_lower_bound(const Pipeline& pipeline, int micro_batches) {
  int stages = pipeline.size();
  double b = micro_batches;
  Seconds latency = 0, bound = 0;
  for (const StageTime& s : pipeline.stages) latency += s.total();
  for (const LinkTime& l : pipeline.links) latency += l.total();
  Seconds outside = 0;  // head_j + tail_j
  for (int j = 0; j < stages; ++j) {
    bound = std::max(bound, outside + b * pipeline.stages[j].total());
    if (!pipeline.in_flight_limit.empty())
      bound = std::max(bound, outside + b * (latency - outside) / pipeline.in_flight_limit[j]);
    outside += pipeline.stages[j].total();
    if (j + 1 < stages) {
      const LinkTime& l = pipeline.links[j];
      bound = std::max(bound, latency + (b - 1) * std::max(l.forward, l.backward));
      outside += l.total();
    }
  }
  bound = std::max(bound, latency);
  // The last task of stage 1 is a backward pass, after all others.
  if (!pipeline.epilogue.empty()) bound += pipeline.epilogue[0];
  return bound;
}

Schedule strict_schedule(std::string kind, const std::vector<int>& counts, int micro_batches) {
  Schedule schedule;
  schedule.kind = std::move(kind);
  for (int count : counts) {
    count = std::min(count, micro_batches);
    schedule.counts.push_back(count);
    std::vector<Task> order;
    order.reserve(2 * static_cast<size_t>(micro_batches));
    for (int m = 0; m < count; ++m) order.push_back({m, false});
    for (int m = 0; m < micro_batches; ++m) {
      order.push_back({m, true});
      if (m + count < micro_batches) order.push_back({m + count, false});
    }
    schedule.order.push_back(std::move(order));
  }
  return schedule;
}

std::vector<int> within_limits(const Pipeline& pipeline, std::vector<int> counts,
                               int micro_batches) {
  for (size_t i = 0; i < counts.size(); ++i) {
    counts[i] = std::min(counts[i], micro_batches);
    if (!pipeline.in_flight_limit.empty())
      counts[i] = std::min(counts[i], pipeline.in_flight_limit[i]);
    if (i > 0) counts[i] = std::min(counts[i], counts[i - 1]);
  }
  return counts;
}

void validate(const Pipeline& pipeline, const std::string& name) {
  if (pipeline.stages.empty())
    throw user_error("schedule", "{}: stages is empty; give at least one stage", name);
  if (pipeline.links.size() + 1 != pipeline.stages.size())
    throw user_error("schedule", "{}: links has {} entries; give {}, one fewer than stages", name,
                     pipeline.links.size(), pipeline.stages.size() - 1);
  auto check = [&](Seconds value, const char* list, size_t i, const char* field) {
    constexpr Seconds kMost = 1e9;  // 30 years
    if (!(value >= 0 && value <= kMost))
      throw user_error("schedule", "{}: {}[{}].{} is {}; give seconds, 0 to 1e9", name, list, i,
                       field, value);
  };
  for (size_t i = 0; i < pipeline.stages.size(); ++i) {
    check(pipeline.stages[i].forward, "stages", i, "forward_s");
    check(pipeline.stages[i].backward, "stages", i, "backward_s");
    if (pipeline.stages[i].total() <= 0)
      throw user_error("schedule",
                       "{}: stages[{}].forward_s and backward_s are 0; give a positive "
                       "time",
                       name, i);
  }
  for (size_t i = 0; i < pipeline.links.size(); ++i) {
    check(pipeline.links[i].forward, "links", i, "forward_s");
    check(pipeline.links[i].backward, "links", i, "backward_s");
  }
  if (!pipeline.in_flight_limit.empty() &&
      pipeline.in_flight_limit.size() != pipeline.stages.size())
    throw user_error("schedule", "{}: in_flight_limit has {} entries; give {}, one per stage", name,
                     pipeline.in_flight_limit.size(), pipeline.stages.size());
  for (size_t i = 0; i < pipeline.in_flight_limit.size(); ++i)
    if (pipeline.in_flight_limit[i] < 1)
      throw user_error("schedule", "{}: in_flight_limit[{}] is {}; give at least 1", name, i,
                       pipeline.in_flight_limit[i]);
}

}  // namespace motley::pipeline
