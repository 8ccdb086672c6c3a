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

Seconds period(const Pipeline& pipeline, const std::vector<int>& counts, bool split) {
  int stages = pipeline.size();
  MOTLEY_CHECK(static_cast<int>(counts.size()) == stages);
  Seconds p = least_period(pipeline);
  for (int i = 0; i < stages; ++i) {
    Seconds round_trip = pipeline.stages[i].total();
    for (int j = i + 1; j < stages; ++j) {
      MOTLEY_CHECK(counts[j - 1] >= counts[j], "launch counts increase at stage {}", j);
      round_trip += pipeline.links[j - 1].total() + pipeline.stages[j].total();
      if (split) round_trip -= pipeline.stages[j].weights;
      p = std::max(p, round_trip / (counts[i] - counts[j] + 1));
    }
  }
  return p;
}

Launch launch_last(Seconds total, Seconds weights) { return {total - weights, 1}; }

Launch launch_before(const Launch& next, Seconds total, Seconds gap, Seconds target,
                     Seconds weights) {
  Seconds y = next.state + total + gap;
  double ratio = target > 0 ? y / target : 1;
  // A cap on the count keeps a target of almost zero from overflowing it.
  int count = static_cast<int>(std::clamp(std::ceil(ratio * (1 - kCountSlack)), 1.0, 1e9));
  return {std::max(y, (count - 1) * target + total) - weights, count};
}

std::vector<int> exact_counts(const Pipeline& pipeline, Seconds target, bool split) {
  int stages = pipeline.size();
  std::vector<int> counts(stages, 1);
  auto weights = [&](int i) { return split ? pipeline.stages[i].weights : 0; };
  Launch launch = launch_last(pipeline.stages[stages - 1].total(), weights(stages - 1));
  for (int i = stages - 2; i >= 0; --i) {
    launch = launch_before(launch, pipeline.stages[i].total(), pipeline.links[i].total(), target,
                           weights(i));
    counts[i] = launch.count;
  }
  return counts;
}

ExactCounts exact_counts(const Pipeline& pipeline, bool split) {
  auto fits = [&](const std::vector<int>& counts) {
    if (pipeline.in_flight_limit.empty()) return true;
    for (size_t i = 0; i < counts.size(); ++i)
      if (counts[i] > pipeline.in_flight_limit[i]) return false;
    return true;
  };
  Seconds low = least_period(pipeline), high = 0;
  ExactCounts best;
  best.counts = exact_counts(pipeline, low, split);
  if (!fits(best.counts)) {
    for (const StageTime& s : pipeline.stages) high += s.total();
    for (const LinkTime& l : pipeline.links) high += l.total();
    best.counts = exact_counts(pipeline, high, split);
    MOTLEY_CHECK(fits(best.counts), "a limit is below 1");
    while (true) {
      Seconds middle = low + (high - low) / 2;
      if (middle <= low || middle >= high) break;
      std::vector<int> counts = exact_counts(pipeline, middle, split);
      if (fits(counts)) {
        high = middle;
        best.counts = std::move(counts);
      } else {
        low = middle;
      }
    }
  }
  best.period = period(pipeline, best.counts, split);
  return best;
}

Seconds makespan_lower_bound(const Pipeline& pipeline, int micro_batches) {
  const int stages = pipeline.size();
  const double b = micro_batches;
  auto epilogue = [&](int j) { return pipeline.epilogue.empty() ? 0 : pipeline.epilogue[j]; };
  // Backward passes as short as they may be: a micro-batch from its first pass to its last in stage
  // 1, gradients of weights included.
  Seconds latency = pipeline.stages[0].weights;
  for (const StageTime& s : pipeline.stages) latency += s.total() - s.weights;
  for (const LinkTime& l : pipeline.links) latency += l.total();
  Seconds bound = latency + epilogue(0), head = 0, tail = pipeline.stages[0].weights;
  for (int j = 0; j < stages; ++j) {
    const StageTime& s = pipeline.stages[j];
    const Seconds on_the_way = s.total() - s.weights, round_trip = latency - head - tail;
    // Of gradients of weights this much may follow the last backward pass.
    const double limit = pipeline.in_flight_limit.empty() ? b : pipeline.in_flight_limit[j],
                 waiting = pipeline.waiting.empty() ? 1 : pipeline.waiting[j];
    const double behind = j == 0        ? 1
                          : waiting > 0 ? std::min(b, 1 + std::floor((limit - 1) / waiting))
                                        : b;
    bound = std::max({bound, head + b * s.total() + epilogue(j),
                      head + b * s.total() - behind * s.weights + tail + epilogue(0),
                      head + b * round_trip / limit + tail + epilogue(0)});
    head += s.forward;
    tail += on_the_way - s.forward;
    if (j + 1 < stages) {
      const LinkTime& l = pipeline.links[j];
      bound = std::max(bound, latency + (b - 1) * std::max(l.forward, l.backward) + epilogue(0));
      head += l.forward;
      tail += l.backward;
    }
  }
  return bound;
}

Schedule strict_schedule(std::string kind, const std::vector<int>& counts, int micro_batches,
                         const std::vector<int>& weights_behind) {
  Schedule schedule;
  schedule.kind = std::move(kind);
  schedule.weights_behind = weights_behind;
  for (size_t i = 0; i < counts.size(); ++i) {
    const int count = std::min(counts[i], micro_batches);
    schedule.counts.push_back(count);
    const bool split = !weights_behind.empty();
    const int behind = split ? std::min(weights_behind[i], micro_batches) : 0;
    std::vector<Task> order;
    order.reserve(3 * static_cast<size_t>(micro_batches));
    for (int m = 0; m < count; ++m) order.push_back({m, PassKind::forward});
    for (int m = 0; m < micro_batches; ++m) {
      order.push_back({m, PassKind::backward});
      if (split && m >= behind) order.push_back({m - behind, PassKind::weights});
      if (m + count < micro_batches) order.push_back({m + count, PassKind::forward});
    }
    for (int m = micro_batches - behind; m < micro_batches && split; ++m)
      order.push_back({m, PassKind::weights});
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

Seconds time_of(const Pipeline& pipeline, const Schedule& schedule, int i, PassKind kind) {
  const StageTime& s = pipeline.stages[i];
  if (kind == PassKind::forward) return s.forward;
  if (kind == PassKind::weights) return s.weights;
  return schedule.weights_behind.empty() ? s.backward : s.backward - s.weights;
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
    if (const Seconds w = pipeline.stages[i].weights; !(w >= 0 && w <= pipeline.stages[i].backward))
      throw user_error("schedule",
                       "{}: stages[{}].weights_s is {}; it is a part of backward_s, give seconds, "
                       "0 to {}",
                       name, i, w, pipeline.stages[i].backward);
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
