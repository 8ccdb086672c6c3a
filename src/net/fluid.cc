#include "net/fluid.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <queue>
#include <utility>

#include "core/error.h"

namespace motley::net {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Progressive filling over one set of links. Work arrays are kept between calls.
class Filler {
 public:
  explicit Filler(const std::vector<NetworkLink>& links) : links_(links), slot_(links.size(), -1) {}

  void fill(const std::vector<const Transfer*>& active, std::vector<double>* rates) {
    size_t n = active.size();
    rates->assign(n, kInfinity);
    link_.clear();
    for (const Transfer* t : active)
      for (const LinkUse& use : t->uses)
        if (slot_[use.link] < 0) {
          slot_[use.link] = static_cast<int>(link_.size());
          link_.push_back(use.link);
        }
    size_t slots = link_.size();
    room_.resize(slots);
    weight_.assign(slots, 0.0);
    unfrozen_.assign(slots, 0);
    start_.assign(slots + 1, 0);
    for (size_t s = 0; s < slots; ++s) room_[s] = links_[link_[s]].bandwidth;
    for (const Transfer* t : active)
      for (const LinkUse& use : t->uses) {
        int s = slot_[use.link];
        weight_[s] += use.flows;
        ++unfrozen_[s];
        ++start_[s + 1];
      }
    std::partial_sum(start_.begin(), start_.end(), start_.begin());
    on_.resize(start_[slots]);
    std::vector<int>& cursor = cursor_;
    cursor.assign(start_.begin(), start_.end() - 1);
    for (size_t i = 0; i < n; ++i)
      for (const LinkUse& use : active[i]->uses)
        on_[cursor[slot_[use.link]]++] = static_cast<int>(i);

    // Levels at which links fill and caps bind. A link's level only rises as transfers freeze below
    // it, so a stale entry is put back with its present level.
    using Entry = std::pair<double, int>;  // (level, slot), or (cap, slots + transfer)
    std::vector<Entry> entries;
    for (size_t s = 0; s < slots; ++s)
      entries.push_back({room_[s] / weight_[s], static_cast<int>(s)});
    for (size_t i = 0; i < n; ++i)
      if (active[i]->cap < kInfinity)
        entries.push_back({active[i]->cap, static_cast<int>(slots + i)});
    std::priority_queue<Entry, std::vector<Entry>, std::greater<Entry>> queue(std::greater<Entry>(),
                                                                              std::move(entries));
    auto freeze = [&](int i, double level) {
      (*rates)[i] = level;
      for (const LinkUse& use : active[i]->uses) {
        int s = slot_[use.link];
        room_[s] -= level * use.flows;
        weight_[s] -= use.flows;
        --unfrozen_[s];
      }
    };
    while (!queue.empty()) {
      auto [level, key] = queue.top();
      queue.pop();
      if (key >= static_cast<int>(slots)) {
        int i = key - static_cast<int>(slots);
        if ((*rates)[i] == kInfinity) freeze(i, level);
        continue;
      }
      if (unfrozen_[key] == 0) continue;
      double now = std::max(level, room_[key] / weight_[key]);
      if (now > level * (1 + 1e-12)) {
        queue.push({now, key});
        continue;
      }
      for (int k = start_[key]; k < start_[key + 1]; ++k)
        if ((*rates)[on_[k]] == kInfinity) freeze(on_[k], now);
    }
    for (int link : link_) slot_[link] = -1;
  }

 private:
  const std::vector<NetworkLink>& links_;
  std::vector<int> slot_;  // of a link among those in use, -1 otherwise
  std::vector<int> link_, unfrozen_, start_, on_, cursor_;
  std::vector<double> room_, weight_;
};

// Chains that share links, run together.
class Component {
 public:
  Component(const std::vector<Chain>& chains, std::vector<int> members, Filler* filler,
            FluidResult* result)
      : chains_(chains), members_(std::move(members)), filler_(filler), result_(result) {}

  void run() {
    size_t n = members_.size();
    phase_.assign(n, 0);
    left_.assign(n, 0.0);
    wake_.assign(n, 0.0);
    for (size_t i = 0; i < n; ++i) begin(i, 0);
    Seconds now = 0;
    std::vector<const Transfer*> active;
    std::vector<size_t> who;
    std::vector<double> rates;
    for (;;) {
      Seconds next = kInfinity;
      active.clear(), who.clear();
      for (size_t i = 0; i < n; ++i) {
        if (phase_[i] == chain(i).size()) continue;
        if (wake_[i] > now) {
          next = std::min(next, wake_[i]);
        } else {
          active.push_back(&chain(i)[phase_[i]]);
          who.push_back(i);
        }
      }
      if (active.empty() && next == kInfinity) return;
      ++result_->events;
      filler_->fill(active, &rates);
      for (size_t k = 0; k < who.size(); ++k) next = std::min(next, now + left_[who[k]] / rates[k]);
      Seconds tolerance = next * 1e-12;
      for (size_t k = 0; k < who.size(); ++k) {
        size_t i = who[k];
        bool ends = now + left_[i] / rates[k] <= next + tolerance;
        if (!ends) left_[i] -= rates[k] * (next - now);
        if (ends) ++phase_[i], begin(i, next);
      }
      for (size_t i = 0; i < n; ++i)
        if (wake_[i] > now && wake_[i] <= next + tolerance) wake_[i] = next;
      now = next;
    }
  }

 private:
  const Chain& chain(size_t i) const { return chains_[members_[i]]; }
  // Enters the present phase of a chain; notes its end if there is none.
  void begin(size_t i, Seconds now) {
    if (phase_[i] == chain(i).size()) {
      result_->finish[members_[i]] = now;
      return;
    }
    left_[i] = chain(i)[phase_[i]].bytes;
    wake_[i] = now + chain(i)[phase_[i]].delay;
  }

  const std::vector<Chain>& chains_;
  std::vector<int> members_;
  Filler* filler_;
  FluidResult* result_;
  std::vector<size_t> phase_;
  std::vector<double> left_;
  std::vector<Seconds> wake_;
};

}  // namespace

std::vector<double> max_min_rates(const std::vector<NetworkLink>& links,
                                  const std::vector<const Transfer*>& active) {
  std::vector<double> rates;
  Filler(links).fill(active, &rates);
  return rates;
}

FluidResult simulate(const std::vector<NetworkLink>& links, const std::vector<Chain>& chains) {
  FluidResult result;
  result.finish.assign(chains.size(), 0.0);
  // Union of chains that touch a common link.
  std::vector<int> owner(links.size(), -1), root(chains.size());
  std::iota(root.begin(), root.end(), 0);
  auto find = [&](int x) {
    while (root[x] != x) x = root[x] = root[root[x]];
    return x;
  };
  for (size_t c = 0; c < chains.size(); ++c)
    for (const Transfer& t : chains[c]) {
      MOTLEY_CHECK(t.bytes >= 0 && t.delay >= 0 && t.cap > 0);
      for (const LinkUse& use : t.uses) {
        MOTLEY_CHECK(use.flows > 0);
        int& first = owner[use.link];
        if (first < 0) first = static_cast<int>(c);
        int a = find(first), b = find(static_cast<int>(c));
        root[std::max(a, b)] = std::min(a, b);
      }
    }
  std::vector<std::vector<int>> members(chains.size());
  for (size_t c = 0; c < chains.size(); ++c)
    members[find(static_cast<int>(c))].push_back(static_cast<int>(c));
  Filler filler(links);
  for (std::vector<int>& component : members)
    if (!component.empty()) Component(chains, std::move(component), &filler, &result).run();
  for (Seconds t : result.finish) result.makespan = std::max(result.makespan, t);
  return result;
}

}  // namespace motley::net
