#include "explain/critical_path.h"

#include <algorithm>
#include <bit>
#include <map>
#include <unordered_map>

#include "cluster/resources.h"

namespace motley::explain {

namespace {

class Walker {
 public:
  Walker(const Plan& plan, const Simulation& simulation) : plan_(plan), sim_(simulation) {
    group_of_.resize(plan.cluster.size());
    for (const DeviceGroup& group : device_groups(plan.cluster))
      for (const int d : group.devices) group_of_[d] = group.name;
    of_device_.resize(plan.cluster.size());
    for (size_t i = 0; i < sim_.spans.size(); ++i) {
      const Span& span = sim_.spans[i];
      of_device_[span.device].push_back(i);
      end_ = std::max(end_, span.end);
      if (span.kind == WalkKind::wait) continue;
      // What computes says more than those that were there earlier.
      const auto [it, fresh] = ended_.try_emplace(std::bit_cast<uint64_t>(span.end), i);
      if (!fresh && sim_.spans[it->second].kind != WalkKind::compute) it->second = i;
    }
    for (auto& list : of_device_)
      std::stable_sort(list.begin(), list.end(), [&](size_t a, size_t b) {
        return sim_.spans[a].begin < sim_.spans[b].begin;
      });
    for (size_t m = 0; m < sim_.messages.size(); ++m)
      arrived_[std::bit_cast<uint64_t>(sim_.messages[m].end)].push_back(m);
    if (plan.pipeline)
      for (int d = 0; d < plan.cluster.size(); ++d) seats_.push_back(plan.pipeline->seats(d));
  }

  Path run() {
    walk();
    waits();
    Path path;
    path.end = end_;
    for (auto& [what, part] : parts_) path.parts.push_back(std::move(part));
    for (auto& [key, wait] : waits_) path.waits.push_back(std::move(wait));
    std::stable_sort(path.parts.begin(), path.parts.end(),
                     [](const PathPart& a, const PathPart& b) { return a.seconds > b.seconds; });
    std::stable_sort(path.waits.begin(), path.waits.end(),
                     [](const Wait& a, const Wait& b) { return a.seconds > b.seconds; });
    return path;
  }

 private:
  // "stage 1 on V100-32GB", or the device's group.
  std::string name_of(int device) const {
    if (!plan_.pipeline || seats_[device].empty()) return group_of_[device];
    std::string stages;
    for (const Seat& seat : seats_[device])
      stages += fmt::format("{}{}", stages.empty() ? "" : "+", seat.stage);
    return fmt::format("stage {} on {}", stages, group_of_[device]);
  }

  void add(const std::string& what, Seconds seconds) {
    if (seconds <= 0) return;
    PathPart& part = parts_[what];
    part.what = what;
    part.seconds += seconds;
    ++part.times;
  }

  std::string message_text(const StageMessage& m) const {
    return fmt::format("message from stage {} to stage {}, {}", m.from, m.to,
                       m.backward ? "backward" : "forward");
  }

  void add(const Span& span) {
    const std::string who = name_of(span.device);
    if (span.kind == WalkKind::comm) {
      add(plan_.pipeline ? fmt::format("{}: {}", who, span.name) : span.name,
          span.end - span.begin);
      return;
    }
    std::string what = span.name;
    if (span.node.valid() && !plan_.pipeline)
      what =
          plan_.running().graph().node(span.node).phase == Phase::backward ? "backward" : "forward";
    if (plan_.pipeline && what.starts_with("forward ")) what = "forward";
    if (plan_.pipeline && what.starts_with("backward ")) what = "backward";
    if (plan_.pipeline && what.starts_with("weights ")) what = "gradients of weights";
    add(who + ": " + what, span.end - span.begin - span.comm);
    add(who + ": collectives inside of " + what + " passes", span.comm);
  }

  // The span of a device that is going on right before t; -1: none.
  int64_t before(int device, Seconds t) const {
    const auto& list = of_device_[device];
    auto it = std::lower_bound(list.begin(), list.end(), t, [&](size_t span, Seconds time) {
      return sim_.spans[span].begin < time;
    });
    return it == list.begin() ? -1 : static_cast<int64_t>(*(it - 1));
  }

  // The message whose arrival at t a device waited for; null: it was none.
  const StageMessage* arrival(int device, Seconds t) const {
    const auto it = arrived_.find(std::bit_cast<uint64_t>(t));
    if (it == arrived_.end()) return nullptr;
    for (const size_t m : it->second)
      for (const Seat& seat : seats_[device])
        if (seat.replica == sim_.messages[m].replica && seat.stage == sim_.messages[m].to)
          return &sim_.messages[m];
    return nullptr;
  }
  // Another device that was done with something at t; -1: none.
  int64_t ender(int device, Seconds t) const {
    const auto it = ended_.find(std::bit_cast<uint64_t>(t));
    return it == ended_.end() || sim_.spans[it->second].device == device
               ? -1
               : static_cast<int64_t>(it->second);
  }

  void walk() {
    int device = 0;
    Seconds t = end_;
    for (int d = 0; d < plan_.cluster.size(); ++d)
      if (!of_device_[d].empty() && sim_.spans[of_device_[d].back()].end == end_) device = d;
    for (size_t guard = 0; t > 0 && guard < 4 * sim_.spans.size() + 4; ++guard) {
      const int64_t at = before(device, t);
      if (at < 0) {
        add(name_of(device) + ": before its first pass", t);
        return;
      }
      const Span& span = sim_.spans[at];
      if (span.end < t) {
        if (const int64_t other = ender(device, t); other >= 0) {
          device = sim_.spans[other].device;
          continue;
        }
        add(name_of(device) + ": idle", t - span.end);
        t = span.end;
        continue;
      }
      if (span.kind != WalkKind::wait) {
        add(span);
        t = span.begin;
        continue;
      }
      if (const StageMessage* m = plan_.pipeline ? arrival(device, t) : nullptr) {
        t = follow(*m, &device);
      } else if (const int64_t other = ender(device, t); other >= 0) {
        device = sim_.spans[other].device;
      } else {
        add(name_of(device) + ": waiting", t - span.begin);
        t = span.begin;
      }
    }
  }

  // The way back over a message, and those that it stood behind, to the pass that made the first.
  Seconds follow(const StageMessage& last, int* device) {
    const StageMessage* m = &last;
    for (;;) {
      add(message_text(*m), m->end - m->begin);
      const StagePlan& sender = plan_.pipeline->replicas[m->replica].stages[m->from];
      *device = sender.devices[0];
      const int64_t at = before(*device, m->begin);
      const StageMessage* ahead = nullptr;
      if (at < 0 || sim_.spans[at].end != m->begin)
        if (const auto it = arrived_.find(std::bit_cast<uint64_t>(m->begin)); it != arrived_.end())
          for (const size_t other : it->second) {
            const StageMessage& o = sim_.messages[other];
            if (o.replica == m->replica && o.from == m->from && o.to == m->to &&
                o.backward == m->backward && o.end > o.begin)
              ahead = &o;
          }
      if (!ahead) return m->begin;
      m = ahead;
    }
  }

  void wait(int device, const std::string& whom, const std::string& why, Seconds seconds) {
    if (seconds <= 0) return;
    const std::string who = name_of(device);
    Wait& w = waits_[{who, whom, why}];
    w.who = who, w.whom = whom, w.why = why;
    w.seconds += seconds / named_[who];
  }

  void waits() {
    for (int d = 0; d < plan_.cluster.size(); ++d) named_[name_of(d)] += 1;
    for (int d = 0; d < plan_.cluster.size(); ++d) {
      for (const size_t i : of_device_[d]) {
        const Span& span = sim_.spans[i];
        if (span.kind != WalkKind::wait) continue;
        if (const StageMessage* m = plan_.pipeline ? arrival(d, span.end) : nullptr) {
          const Seconds sent = std::clamp(m->begin, span.begin, span.end);
          const int sender = plan_.pipeline->replicas[m->replica].stages[m->from].devices[0];
          wait(d, name_of(sender), m->backward ? "its backward passes" : "its forward passes",
               sent - span.begin);
          wait(d, "the link", message_text(*m), span.end - sent);
        } else if (const int64_t other = ender(d, span.end); other >= 0) {
          wait(d, name_of(sim_.spans[other].device), "to meet in a collective",
               span.end - span.begin);
        } else {
          wait(d, "others", "", span.end - span.begin);
        }
      }
      if (!of_device_[d].empty())
        wait(d, "the end of the step", "it has nothing left to do",
             end_ - sim_.spans[of_device_[d].back()].end);
    }
  }

  const Plan& plan_;
  const Simulation& sim_;
  std::vector<std::string> group_of_;           // [device]
  std::vector<std::vector<size_t>> of_device_;  // spans by begin
  std::vector<std::vector<Seat>> seats_;        // [device] of pipelines
  std::unordered_map<uint64_t, size_t> ended_;  // a span, no wait, by the bits of its end
  std::unordered_map<uint64_t, std::vector<size_t>> arrived_;  // messages, likewise
  Seconds end_ = 0;
  std::map<std::string, PathPart> parts_;
  std::map<std::tuple<std::string, std::string, std::string>, Wait> waits_;
  std::map<std::string, double> named_;  // devices of a name
};

}  // namespace

Path critical_path(const Plan& plan, const Simulation& simulation) {
  return Walker(plan, simulation).run();
}

}  // namespace motley::explain
