// The states of the folded search between two steps.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include "core/deadline.h"
#include "solver/tables.h"

namespace motley::solver {

constexpr int kChampions = 12;  // cheapest states that all others are tried against

template <int W>
struct Key {
  uint64_t word[W] = {};
  friend bool operator==(const Key&, const Key&) = default;
  friend auto operator<=>(const Key&, const Key&) = default;
};

template <int W>
uint64_t hash_of(const Key<W>& key) {
  uint64_t hash = 0;
  for (int w = 0; w < W; ++w) hash = (hash ^ key.word[w]) * 0x9e3779b97f4a7c15ull;
  return hash ^ (hash >> 29);
}

// A hash map from keys to consecutive numbers.
template <int W>
class KeyNumbering {
 public:
  void reset(size_t expected) {
    size_t size = 64;
    while (size < 2 * expected) size *= 2;
    slot_.assign(size, -1);
    keys_.clear();
  }
  // The number of the key; `fresh` if it is new.
  int number(const Key<W>& key, bool* fresh) {
    if (2 * keys_.size() >= slot_.size()) grow();
    size_t at = hash_of(key) & (slot_.size() - 1);
    while (slot_[at] >= 0) {
      if (keys_[slot_[at]] == key) {
        *fresh = false;
        return slot_[at];
      }
      at = (at + 1) & (slot_.size() - 1);
    }
    *fresh = true;
    slot_[at] = static_cast<int>(keys_.size());
    keys_.push_back(key);
    return slot_[at];
  }
  const std::vector<Key<W>>& keys() const { return keys_; }
  std::vector<Key<W>>& keys() { return keys_; }

 private:
  void grow() {
    slot_.assign(slot_.size() * 2, -1);
    for (size_t i = 0; i < keys_.size(); ++i) {
      size_t at = hash_of(keys_[i]) & (slot_.size() - 1);
      while (slot_[at] >= 0) at = (at + 1) & (slot_.size() - 1);
      slot_[at] = static_cast<int>(i);
    }
  }
  std::vector<int> slot_;
  std::vector<Key<W>> keys_;
};

// Where a live value's set sits in a key.
struct KeyPlace {
  int word = 0, shift = 0;
};

// Places for the values of every touch, before and after it (they are the same), and words needed.
class KeyLayout {
 public:
  KeyLayout(const Problem& problem, const Order& order)
      : place(order.touches.size()), problem_(problem), at_(problem.value_table.size()) {
    for (const OrderStep& step : order.steps) lay(order, step);
    words = std::max<int>(1, static_cast<int>(used_.size()));
  }

  std::vector<KeyPlace> place;  // [touch]
  int words;

 private:
  uint64_t bits(int value) const {
    return (uint64_t{1} << problem_.form_tables[problem_.value_table[value]].forms) - 1;
  }

  void lay(const Order& order, const OrderStep& step) {
    for (int t = step.touch_begin; t < step.touch_end; ++t) {
      const Touch& touch = order.touches[t];
      if (touch.before != Role::kAbsent || touch.after == Role::kAbsent) continue;
      const uint64_t mask = bits(touch.value);
      const int width = std::popcount(mask);
      KeyPlace found{-1, 0};
      for (size_t w = 0; w <= used_.size() && found.word < 0; ++w) {
        if (w == used_.size()) used_.push_back(0);
        for (int shift = 0; shift + width <= 64; ++shift) {
          if ((used_[w] & (mask << shift)) == 0) {
            found = {static_cast<int>(w), shift};
            break;
          }
        }
      }
      used_[found.word] |= mask << found.shift;
      at_[touch.value] = found;
    }
    for (int t = step.touch_begin; t < step.touch_end; ++t) {
      const Touch& touch = order.touches[t];
      place[t] = at_[touch.value];
      if (touch.before != Role::kAbsent && touch.after == Role::kAbsent) {
        used_[place[t].word] &= ~(bits(touch.value) << place[t].shift);
      }
    }
  }

  const Problem& problem_;
  std::vector<KeyPlace> at_;    // [value]
  std::vector<uint64_t> used_;  // [word]
};

// A live value.
struct Live {
  int value;
  KeyPlace place;
  Role role;
  uint32_t need;
  Upgrade* upgrade;
  uint64_t mask;
  int touch;  // the latest
};

// Where the states after a step came from, and the option of the step's node.
struct StepRecord {
  std::vector<int> parent, option;
};

// The states between two steps. The cost of a state is what it has paid and the bound of what is
// left, relative to the bound of the whole problem (dual_bounds.h); no step lowers it.
template <int W>
class Frontier {
 public:
  Frontier(Tables* tables, const KeyLayout& layout, const Deadline& deadline)
      : keys(1), costs(1, 0), tables_(*tables), layout_(layout), deadline_(deadline) {}

  std::vector<Key<W>> keys;  // [state]
  std::vector<double> costs;
  std::vector<Live> live;

  size_t size() const { return keys.size(); }

  // Eliminates the node of one step from all states; drops states costlier than `most` and returns
  // the least cost of those. `*lost` is at most that of states that are not looked at (Limits::max_ways).
  double advance(const OrderStep& step, double most, StepRecord* from, double* lost) {
    const int touches = step.touch_end - step.touch_begin;
    Key<W> touched{};
    double least = tables_.dual_bounds->node_least(step.node);
    for (int t = 0; t < touches; ++t) {
      const Touch& touch = tables_.order.touches[step.touch_begin + t];
      if (touch.before == Role::kAbsent) {
        least += tables_.dual_bounds->value_least(touch.value);
        continue;
      }
      const KeyPlace& place = layout_.place[step.touch_begin + t];
      touched.word[place.word] |= tables_.full(touch.value) << place.shift;
    }
    // Transitions of each combination of touched sets, in terms of keys, cheapest first.
    locals_.reset(64);
    moves_.clear();
    move_begin_.assign(1, 0);
    all_.clear();
    next_.reset(keys.size() * 2);
    next_costs_.clear();
    StepRecord& record = *from;
    record.parent.clear();
    record.option.clear();
    double dropped = std::numeric_limits<double>::infinity();
    for (size_t s = 0; s < keys.size(); ++s) {
      Key<W> local = keys[s], rest = keys[s];
      for (int w = 0; w < W; ++w) {
        local.word[w] &= touched.word[w];
        rest.word[w] &= ~touched.word[w];
      }
      bool fresh;
      const int at = locals_.number(local, &fresh);
      if (fresh) add_moves(step, local, least);
      if (!all_[at]) *lost = std::min(*lost, costs[s]);  // no move lowers it
      for (int m = move_begin_[at]; m < move_begin_[at + 1]; ++m) {
        const Move& move = moves_[m];
        const double cost = costs[s] + move.cost;
        if (cost > most) {
          dropped = std::min(dropped, cost);
          break;
        }
        Key<W> key = rest;
        for (int w = 0; w < W; ++w) key.word[w] |= move.add.word[w];
        const int to = next_.number(key, &fresh);
        if (fresh) {
          next_costs_.push_back(cost);
          record.parent.push_back(static_cast<int>(s));
          record.option.push_back(move.option);
        } else if (cost < next_costs_[to]) {
          next_costs_[to] = cost;
          record.parent[to] = static_cast<int>(s);
          record.option[to] = move.option;
        }
      }
    }
    keys.swap(next_.keys());
    costs.swap(next_costs_);
    update_live(step);
    dominate(from);
    return dropped;
  }

  void update_live(const OrderStep& step) {
    touched_live_.clear();
    for (int t = step.touch_begin; t < step.touch_end; ++t) {
      const Touch& touch = tables_.order.touches[t];
      const auto it = std::find_if(live.begin(), live.end(),
                                   [&](const Live& other) { return other.value == touch.value; });
      if (touch.after == Role::kAbsent) {
        if (it != live.end()) live.erase(it);
        continue;
      }
      const Live now{touch.value,
                     layout_.place[t],
                     touch.after,
                     touch.need,
                     tables_.upgrade(touch.value, touch.after),
                     tables_.full(touch.value),
                     t};
      if (it != live.end()) live.erase(it);
      live.push_back(now);
    }
    for (int t = step.touch_begin; t < step.touch_end; ++t) {
      for (size_t i = 0; i < live.size(); ++i) {
        if (live[i].value == tables_.order.touches[t].value)
          touched_live_.push_back(static_cast<int>(i));
      }
    }
  }

  // Drops dominated states: against the cheapest states in all slots, and against states that
  // differ in one slot that the step touched.
  void dominate(StepRecord* record) {
    const size_t n = keys.size();
    if (n < 2) return;
    by_cost_.resize(n);
    std::iota(by_cost_.begin(), by_cost_.end(), 0);
    const auto cheaper = [&](int a, int b) {
      return costs[a] != costs[b] ? costs[a] < costs[b] : keys[a] < keys[b];
    };
    std::sort(by_cost_.begin(), by_cost_.end(), cheaper);
    dead_.assign(n, 0);
    for (size_t i = 0; i < n; ++i) {
      const int a = by_cost_[i];
      const size_t champions = std::min<size_t>(i, kChampions);
      for (size_t c = 0; c < champions && !dead_[a]; ++c) {
        const int b = by_cost_[c];
        dead_[a] = !dead_[b] && covers(b, a);
      }
    }
    for (int at : touched_live_) {
      const Live& slot = live[at];
      groups_.reset(n);
      head_.clear();
      chain_.assign(n, -1);
      // Cheapest first: a later state of a group can only be covered by an earlier one.
      for (int a : by_cost_) {
        if (dead_[a]) continue;
        Key<W> key = keys[a];
        key.word[slot.place.word] &= ~(slot.mask << slot.place.shift);
        bool fresh;
        const int group = groups_.number(key, &fresh);
        if (fresh) {
          head_.push_back(a);
          continue;
        }
        const uint32_t set = set_of(a, slot);
        for (int b = head_[group]; b >= 0; b = chain_[b]) {
          if (costs[b] + upgrade(slot, set_of(b, slot), set) <= costs[a]) {
            dead_[a] = 1;
            break;
          }
        }
        if (!dead_[a]) {
          chain_[a] = head_[group];
          head_[group] = a;
        }
      }
    }
    keep(record, [&](int s) { return !dead_[s]; });
  }

  uint32_t set_of(int state, const Live& slot) const {
    return static_cast<uint32_t>(keys[state].word[slot.place.word] >> slot.place.shift & slot.mask);
  }

  // What a state with set `b` must pay at most to do as well as one with set `a`, beyond what the
  // bounds of what is left say.
  double upgrade(const Live& slot, uint32_t b, uint32_t a) const {
    return (*slot.upgrade)(b, a) + tables_.dual_bounds->left(slot.touch, a) -
           tables_.dual_bounds->left(slot.touch, b);
  }

  bool covers(int b, int a) const {
    double room = costs[a] - costs[b];
    for (const Live& slot : live) {
      const uint32_t set_a = set_of(a, slot), set_b = set_of(b, slot);
      if (set_a == set_b) continue;
      room -= upgrade(slot, set_b, set_a);
      if (room < 0) return false;
    }
    return true;
  }

  // Keeps the `cap` cheapest states; returns the least cost of the others.
  double truncate(size_t cap, StepRecord* record) {
    by_cost_.resize(size());
    std::iota(by_cost_.begin(), by_cost_.end(), 0);
    std::sort(by_cost_.begin(), by_cost_.end(), [&](int a, int b) {
      return costs[a] != costs[b] ? costs[a] < costs[b] : keys[a] < keys[b];
    });
    const double least = costs[by_cost_[cap]];
    dead_.assign(size(), 1);
    for (size_t i = 0; i < cap; ++i) dead_[by_cost_[i]] = 0;
    keep(record, [&](int s) { return !dead_[s]; });
    return least;
  }

  template <typename F>
  void keep(StepRecord* record, F&& wanted) {
    size_t out = 0;
    for (size_t s = 0; s < keys.size(); ++s) {
      if (!wanted(static_cast<int>(s))) continue;
      keys[out] = keys[s];
      costs[out] = costs[s];
      record->parent[out] = record->parent[s];
      record->option[out] = record->option[s];
      ++out;
    }
    keys.resize(out);
    costs.resize(out);
    record->parent.resize(out);
    record->option.resize(out);
  }

 private:
  struct Move {
    Key<W> add;
    double cost;
    int option;
  };

  // Appends the transitions from one combination of touched sets. `least` is what the bound held
  // for the node and for the values that appear.
  void add_moves(const OrderStep& step, const Key<W>& local, double least) {
    const int touches = step.touch_end - step.touch_begin;
    DualBounds& dual_bounds = *tables_.dual_bounds;
    std::vector<uint32_t> sets(touches, 0);
    for (int t = 0; t < touches; ++t) {
      const Touch& touch = tables_.order.touches[step.touch_begin + t];
      if (touch.before == Role::kAbsent) continue;
      const KeyPlace& place = layout_.place[step.touch_begin + t];
      sets[t] =
          static_cast<uint32_t>(local.word[place.word] >> place.shift & tables_.full(touch.value));
      least += dual_bounds.left(dual_bounds.touch_before(step.touch_begin + t), sets[t]);
    }
    const size_t begin = moves_.size();
    deadline_.check();
    const Ways& ways = tables_.through(step, sets);
    all_.push_back(ways.all);
    for (const NodeTransition& transition : ways.list) {
      Move move{{}, transition.cost - least, transition.option};
      for (int t = 0; t < touches; ++t) {
        if (tables_.order.touches[step.touch_begin + t].after == Role::kAbsent) continue;
        const KeyPlace& place = layout_.place[step.touch_begin + t];
        move.add.word[place.word] |= uint64_t{transition.sets[t]} << place.shift;
        move.cost += dual_bounds.left(step.touch_begin + t, transition.sets[t]);
      }
      moves_.push_back(move);
    }
    std::stable_sort(moves_.begin() + begin, moves_.end(),
                     [](const Move& a, const Move& b) { return a.cost < b.cost; });
    move_begin_.push_back(static_cast<int>(moves_.size()));
  }

  Tables& tables_;
  const KeyLayout& layout_;
  const Deadline& deadline_;
  std::vector<int> touched_live_;

  // Scratch of advance() and dominate().
  KeyNumbering<W> locals_, next_, groups_;
  std::vector<Move> moves_;
  std::vector<int> move_begin_;
  std::vector<char> all_;  // [combination] whether its moves are all there are
  std::vector<double> next_costs_;
  std::vector<int> by_cost_, head_, chain_;
  std::vector<char> dead_;
};

}  // namespace motley::solver
