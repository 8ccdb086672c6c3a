#include "pipeline/simulate.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <queue>
#include <tuple>

#include "core/error.h"

namespace motley::pipeline {

namespace {

// In-flight counts and the end of the epilogues follow from the start times alone.
void finish(const Pipeline& pipeline, const Schedule& schedule, Timeline* timeline) {
  int stages = pipeline.size();
  const PassKind last = schedule.weights_behind.empty() ? PassKind::backward : PassKind::weights;
  timeline->busy.assign(stages, 0);
  timeline->in_flight.assign(stages, 0);
  timeline->makespan = 0;
  for (int i = 0; i < stages; ++i) {
    int held = 0;
    Seconds end = 0;
    for (size_t k = 0; k < schedule.order[i].size(); ++k) {
      const PassKind kind = schedule.order[i][k].kind;
      const Seconds time = time_of(pipeline, schedule, i, kind);
      if (kind == PassKind::forward) ++held;
      if (kind == last) --held;
      timeline->in_flight[i] = std::max(timeline->in_flight[i], held);
      timeline->busy[i] += time;
      end = timeline->start[i][k] + time;
    }
    if (!pipeline.epilogue.empty()) end += pipeline.epilogue[i];
    timeline->makespan = std::max(timeline->makespan, end);
  }
}

}  // namespace

Timeline simulate(const Pipeline& pipeline, const Schedule& schedule) {
  int stages = pipeline.size();
  MOTLEY_CHECK(static_cast<int>(schedule.order.size()) == stages);
  constexpr Seconds kUnknown = -1;
  Timeline timeline;
  timeline.start.resize(stages);
  std::vector<size_t> next(stages, 0);
  std::vector<Seconds> free(stages, 0), link_forward(stages, 0), link_backward(stages, 0);
  // [stage][micro-batch] when what a pass reads is there.
  std::vector<std::vector<Seconds>> activation(stages), gradient(stages);
  for (int i = 0; i < stages; ++i) {
    size_t micro_batches = schedule.order[i].size() / (schedule.weights_behind.empty() ? 2 : 3);
    timeline.start[i].reserve(schedule.order[i].size());
    activation[i].assign(micro_batches, i == 0 ? 0 : kUnknown);
    gradient[i].assign(micro_batches, kUnknown);
  }
  std::vector<int> work;
  for (int i = stages - 1; i >= 0; --i) work.push_back(i);
  while (!work.empty()) {
    int i = work.back();
    work.pop_back();
    bool sent_down = false, sent_up = false;
    while (next[i] < schedule.order[i].size()) {
      Task task = schedule.order[i][next[i]];
      const Seconds ready = task.kind == PassKind::forward    ? activation[i][task.micro_batch]
                            : task.kind == PassKind::backward ? gradient[i][task.micro_batch]
                                                              : free[i];
      if (ready == kUnknown) break;
      Seconds start = std::max(free[i], ready);
      timeline.start[i].push_back(start);
      free[i] = start + time_of(pipeline, schedule, i, task.kind);
      ++next[i];
      if (task.kind == PassKind::weights) continue;
      if (task.kind == PassKind::forward && i + 1 < stages) {
        link_forward[i] = std::max(link_forward[i], free[i]) + pipeline.links[i].forward;
        activation[i + 1][task.micro_batch] = link_forward[i];
        sent_down = true;
      } else if (task.kind == PassKind::forward) {
        gradient[i][task.micro_batch] = free[i];
      } else if (i > 0) {
        link_backward[i] = std::max(link_backward[i], free[i]) + pipeline.links[i - 1].backward;
        gradient[i - 1][task.micro_batch] = link_backward[i];
        sent_up = true;
      }
    }
    if (sent_up) work.push_back(i - 1);
    if (sent_down) work.push_back(i + 1);
  }
  for (int i = 0; i < stages; ++i)
    MOTLEY_CHECK(next[i] == schedule.order[i].size(), "{}: stage {} waits for ever", schedule.kind,
                 i);
  finish(pipeline, schedule, &timeline);
  return timeline;
}

Schedule dispatch(std::string kind, const Pipeline& pipeline, const std::vector<int>& limits,
                  int micro_batches, const Choice& choice) {
  int stages = pipeline.size();
  struct Progress {
    int forward = 0, backward = 0;       // started
    int activations = 0, gradients = 0;  // arrived
    int finished = 0;                    // backward passes
    bool busy = false;
    Seconds link_forward = 0, link_backward = 0;
  };
  std::vector<Progress> state(stages);
  state[0].activations = micro_batches;
  Schedule schedule;
  schedule.kind = std::move(kind);
  schedule.order.resize(stages);
  enum Kind { forward_end, backward_end, activation_in, gradient_in };
  using Event = std::tuple<Seconds, int, int>;  // time, stage, kind
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events;
  std::vector<int> touched = {0};
  Seconds now = 0;
  while (true) {
    for (int i : touched) {
      Progress& s = state[i];
      if (s.busy) continue;
      bool can_forward = s.forward < s.activations && s.forward - s.finished < limits[i];
      bool can_backward = s.backward < s.gradients;
      if (!can_forward && !can_backward) continue;
      bool backward = can_backward && (!can_forward || choice(i, s.forward, s.backward));
      s.busy = true;
      schedule.order[i].push_back({backward ? s.backward++ : s.forward++,
                                   backward ? PassKind::backward : PassKind::forward});
      Seconds time = backward ? pipeline.stages[i].backward : pipeline.stages[i].forward;
      events.push({now + time, i, backward ? backward_end : forward_end});
    }
    touched.clear();
    if (events.empty()) break;
    now = std::get<0>(events.top());
    while (!events.empty() && std::get<0>(events.top()) == now) {
      auto [time, i, what] = events.top();
      events.pop();
      touched.push_back(i);
      Progress& s = state[i];
      if (what == activation_in) ++s.activations;
      if (what == gradient_in) ++s.gradients;
      if (what == forward_end) {
        s.busy = false;
        if (i + 1 < stages) {
          s.link_forward = std::max(s.link_forward, now) + pipeline.links[i].forward;
          events.push({s.link_forward, i + 1, activation_in});
        } else {
          ++s.gradients;
        }
      }
      if (what == backward_end) {
        s.busy = false;
        ++s.finished;
        if (i > 0) {
          s.link_backward = std::max(s.link_backward, now) + pipeline.links[i - 1].backward;
          events.push({s.link_backward, i - 1, gradient_in});
        }
      }
    }
    std::sort(touched.begin(), touched.end());
    touched.erase(std::unique(touched.begin(), touched.end()), touched.end());
  }
  for (const auto& order : schedule.order) {
    MOTLEY_CHECK(order.size() == 2 * static_cast<size_t>(micro_batches));
    auto first = std::find_if(order.begin(), order.end(),
                              [](Task t) { return t.kind == PassKind::backward; });
    schedule.counts.push_back(static_cast<int>(first - order.begin()));
  }
  return schedule;
}

std::string draw(const Pipeline& pipeline, const Schedule& schedule, const Timeline& timeline,
                 int width) {
  Seconds end = 0;
  for (int i = 0; i < pipeline.size(); ++i)
    if (!timeline.start[i].empty())
      end = std::max(end, timeline.start[i].back() +
                              time_of(pipeline, schedule, i, schedule.order[i].back().kind));
  std::string text;
  for (int i = 0; i < pipeline.size(); ++i) {
    std::string row(width, '.');
    for (size_t k = 0; k < schedule.order[i].size(); ++k) {
      Task task = schedule.order[i][k];
      Seconds start = timeline.start[i][k];
      const Seconds time = time_of(pipeline, schedule, i, task.kind);
      const int first = task.kind == PassKind::backward ? 'a' : 'A';
      char c = static_cast<char>(task.kind == PassKind::forward ? '0' + (task.micro_batch + 1) % 10
                                                                : first + task.micro_batch % 26);
      // A character belongs to the task that runs at its middle.
      int from = std::max(0, static_cast<int>(start / end * width + 0.5));
      int to = std::min(width, static_cast<int>((start + time) / end * width + 0.5));
      for (int x = from; x < to; ++x) row[x] = c;
    }
    text += fmt::format("{:>4} {}\n", i + 1, row);
  }
  return text;
}

}  // namespace motley::pipeline
