#include "spmd/folded.h"

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <tuple>
#include <unordered_map>

#include "core/error.h"

namespace motley::spmd {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr int kBeam = 500;      // states kept once time is up
constexpr int kChampions = 12;  // cheapest states that all others are tried against
constexpr int kLookBack = 4;    // block boundaries compared with the newest

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Grown {
  uint32_t forms;  // available afterwards
  double cost;
};

// Sets of forms of one table: closures and least costs between sets, tabulated on demand.
class FormSpace {
 public:
  explicit FormSpace(const FormTable& table) : table_(table), n_(table.forms) {
    for (int a = 0; a < n_; ++a) {
      for (int b = 0; b < n_; ++b) dist_[a][b] = complete_from_set(table, 1u << a, 1u << b);
    }
    for (int a = 0; a < n_; ++a) {
      free_[a] = 0;
      for (int b = 0; b < n_; ++b) free_[a] |= (dist_[a][b] == 0 ? 1u : 0u) << b;
    }
    if (n_ <= kDense) {
      dense_.assign(size_t{1} << (2 * n_), std::numeric_limits<double>::quiet_NaN());
    }
  }

  int forms() const { return n_; }

  uint32_t close(uint32_t set) const {
    uint32_t closed = 0;
    for (; set != 0; set &= set - 1) closed |= free_[std::countr_zero(set)];
    return closed;
  }

  // Least cost of making all of `want` available from `have`.
  double steiner(uint32_t have, uint32_t want) {
    if ((want & ~have) == 0) return 0;
    if (have == 0) return kInf;
    double& memo = n_ <= kDense ? dense_[(have << n_) | want] : sparse_memo((have << 16) | want);
    if (std::isnan(memo)) memo = complete_from_set(table_, have, want);
    return memo;
  }

  // The set of available forms without those that help no consumer who may need `need`.
  uint32_t available(uint32_t set, uint32_t need) const {
    set = close(set);
    for (int f = n_ - 1; f >= 0; --f) {
      if ((set >> f & 1) == 0 || (need >> f & 1) != 0) continue;
      const uint32_t rest = set & ~(1u << f);
      bool useful = false;
      for (int g = 0; g < n_ && !useful; ++g) {
        useful = g != f && leads_to(g, need) && dist_[f][g] < distance(rest, g);
      }
      if (!useful) set = rest;
    }
    return set;
  }

  // The set of required forms without those that another required form yields for nothing.
  uint32_t required(uint32_t set) const {
    for (int f = n_ - 1; f >= 0; --f) {
      if ((set >> f & 1) == 0) continue;
      for (uint32_t rest = set & ~(1u << f); rest != 0; rest &= rest - 1) {
        if (dist_[std::countr_zero(rest)][f] == 0) {
          set &= ~(1u << f);
          break;
        }
      }
    }
    return set;
  }

  // Ways to make `want` available from `have` when consumers of `need` remain; none dominated.
  const std::vector<Grown>& grow(uint32_t have, uint32_t want, uint32_t need) {
    const auto [it, fresh] = grown_.try_emplace(std::array<uint32_t, 3>{have, want, need});
    if (!fresh) return it->second;
    std::vector<Grown>& result = it->second;
    if (need == 0) {
      const double cost = steiner(have, want);
      if (cost < kInf) result.push_back({0, cost});
      return result;
    }
    result.push_back({close(have), 0});
    for (uint32_t left = want; left != 0; left &= left - 1) {
      std::vector<Grown> next;
      for (const Grown& from : result) {
        found_.clear();
        chains(from.forms, from.forms, 1u << std::countr_zero(left), from.cost);
        next.insert(next.end(), found_.begin(), found_.end());
      }
      prune(&next);
      result = std::move(next);
    }
    for (Grown& grown : result) grown.forms = available(grown.forms, need);
    prune(&result);
    return result;
  }

 private:
  static constexpr int kDense = 7;

  double& sparse_memo(uint32_t key) {
    return sparse_.try_emplace(key, std::numeric_limits<double>::quiet_NaN()).first->second;
  }

  double distance(uint32_t set, int to) const {
    double least = kInf;
    for (; set != 0; set &= set - 1) least = std::min(least, dist_[std::countr_zero(set)][to]);
    return least;
  }

  bool leads_to(int from, uint32_t need) const {
    for (; need != 0; need &= need - 1) {
      if (dist_[from][std::countr_zero(need)] < kInf) return true;
    }
    return false;
  }

  // Chains of conversions from `set`, the first leaving `tips` (the newest forms), to `want`.
  void chains(uint32_t set, uint32_t tips, uint32_t want, double cost) {
    for (const Grown& grown : found_) {
      if (grown.cost + steiner(grown.forms, set) <= cost) return;
    }
    if ((set & want) != 0) {
      found_.push_back({set, cost});
      return;
    }
    const int goal = std::countr_zero(want);
    std::vector<std::pair<double, int>> arcs;  // nearest to the goal first: its chain bounds others
    for (int to = 0; to < n_; ++to) {
      if ((set >> to & 1) != 0) continue;
      double arc = kInf;
      for (uint32_t from = tips; from != 0; from &= from - 1) {
        arc = std::min(arc, table_.convert[std::countr_zero(from) * n_ + to]);
      }
      if (arc + dist_[to][goal] < kInf) arcs.emplace_back(arc, to);
    }
    std::sort(arcs.begin(), arcs.end(), [&](const auto& a, const auto& b) {
      return a.first + dist_[a.second][goal] < b.first + dist_[b.second][goal];
    });
    for (const auto& [arc, to] : arcs) {
      const uint32_t larger = close(set | 1u << to);
      chains(larger, larger & ~set, want, cost + arc);
    }
  }

  void prune(std::vector<Grown>* list) {
    std::sort(list->begin(), list->end(), [](const Grown& a, const Grown& b) {
      return a.cost != b.cost ? a.cost < b.cost : a.forms < b.forms;
    });
    std::vector<Grown> kept;
    for (const Grown& grown : *list) {
      bool dominated = false;
      for (const Grown& other : kept) {
        dominated |= other.cost + steiner(other.forms, grown.forms) <= grown.cost;
      }
      if (!dominated) kept.push_back(grown);
    }
    *list = std::move(kept);
  }

  const FormTable& table_;
  int n_;
  double dist_[kMaxForms][kMaxForms];
  uint32_t free_[kMaxForms];
  std::vector<double> dense_;
  std::unordered_map<uint32_t, double> sparse_;
  std::map<std::array<uint32_t, 3>, std::vector<Grown>> grown_;
  std::vector<Grown> found_;
};

// What a state with set `b` in a slot must pay at most to do as well as one with set `a`.
class Upgrade {
 public:
  Upgrade(FormSpace* space, Role role, uint32_t made) : space_(space), role_(role), made_(made) {
    if (space->forms() <= kDense) {
      dense_.assign(size_t{1} << (2 * space->forms()), std::numeric_limits<double>::quiet_NaN());
    }
  }

  double operator()(uint32_t b, uint32_t a) {
    if (dense_.empty()) return compute(b, a);
    double& memo = dense_[(b << space_->forms()) | a];
    if (std::isnan(memo)) memo = compute(b, a);
    return memo;
  }

 private:
  static constexpr int kDense = 7;

  double compute(uint32_t b, uint32_t a) {
    if (role_ == Role::kHave) return space_->steiner(b, a);
    // Whatever the producer makes, having met a's requirements it can go on to meet b's.
    double most = 0;
    for (uint32_t made = made_; made != 0; made &= made - 1) {
      most = std::max(most, space_->steiner((made & -made) | a, b));
    }
    return most;
  }

  FormSpace* space_;
  Role role_;
  uint32_t made_;
  std::vector<double> dense_;
};

// One way through a node: an option, and the sets of the touched values afterwards.
struct Transition {
  double cost;
  int option;
  std::vector<uint32_t> sets;
};

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
class Numbering {
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
struct Place {
  int word = 0, shift = 0;
};

// Places for the values of every touch, before and after it (they are the same), and words needed.
class Layout {
 public:
  Layout(const Problem& problem, const Order& order)
      : place(order.touches.size()), problem_(problem), at_(problem.value_table.size()) {
    for (const Step& step : order.steps) {
      if (step.node >= 0) {
        lay(order, step);
        continue;
      }
      for (int i = step.inner_begin; i < step.inner_end; ++i) lay(order, order.inner[i]);
      for (int t = step.touch_begin; t < step.touch_end; ++t) {
        place[t] = at_[order.touches[t].value];
      }
    }
    words = std::max<int>(1, static_cast<int>(used_.size()));
  }

  std::vector<Place> place;  // [touch]
  int words;

 private:
  uint64_t bits(int value) const {
    return (uint64_t{1} << problem_.form_tables[problem_.value_table[value]].forms) - 1;
  }

  void lay(const Order& order, const Step& step) {
    for (int t = step.touch_begin; t < step.touch_end; ++t) {
      const Touch& touch = order.touches[t];
      if (touch.before != Role::kAbsent || touch.after == Role::kAbsent) continue;
      const uint64_t mask = bits(touch.value);
      const int width = std::popcount(mask);
      Place found{-1, 0};
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
  std::vector<Place> at_;       // [value]
  std::vector<uint64_t> used_;  // [word]
};

// Tables of one kind of step.
struct Kind {
  bool ready = false;
  std::vector<int> options;               // of a node: those that no other replaces
  std::vector<std::vector<int>> choices;  // of a cluster: the options of its nodes
  std::map<std::vector<uint32_t>, std::vector<Transition>> transitions;
};

// All that depends on the problem and the weights only.
class Tables {
 public:
  Tables(const Problem& the_problem, const Order& the_order, const Weights& weights)
      : problem(the_problem), order(the_order), kinds(order.kinds) {
    spaces_.reserve(problem.form_tables.size());
    for (const FormTable& table : problem.form_tables) spaces_.emplace_back(table);
    prices.resize(problem.option_tables.size());
    for (size_t t = 0; t < prices.size(); ++t) {
      for (const Option& option : problem.option_tables[t].options) {
        prices[t].push_back(price(option, weights));
      }
    }
  }

  const Problem& problem;
  const Order& order;
  std::vector<std::vector<double>> prices;  // [option table][option]
  std::vector<Kind> kinds;

  FormSpace& space(int value) { return spaces_[problem.value_table[value]]; }

  Upgrade* upgrade(int value, Role role) {
    auto& found =
        upgrades_[{problem.value_table[value], role, role == Role::kNeed ? order.made[value] : 0}];
    if (!found) found = std::make_unique<Upgrade>(&space(value), role, order.made[value]);
    return found.get();
  }

  uint64_t full(int value) const {
    return (uint64_t{1} << problem.form_tables[problem.value_table[value]].forms) - 1;
  }

  // All undominated ways through a node from the given sets of the values it touches.
  const std::vector<Transition>& through_node(const Step& step, const std::vector<uint32_t>& sets) {
    Kind& kind = kinds[step.kind];
    if (!kind.ready) prepare(step, &kind);
    const auto [it, fresh] = kind.transitions.try_emplace(sets);
    if (!fresh) return it->second;
    std::vector<Transition>& list = it->second;
    const int table = problem.nodes[step.node].table;
    std::vector<uint32_t> want;
    std::vector<int> made;
    for (int o : kind.options) {
      demands(step, problem.option_tables[table].options[o], &want, &made);
      std::vector<Transition> partial{{prices[table][o], o, {}}}, next;
      for (size_t t = 0; t < sets.size() && !partial.empty(); ++t) {
        const Touch& touch = order.touches[step.touch_begin + t];
        FormSpace& forms = space(touch.value);
        std::vector<Grown> ways;
        if (touch.before == Role::kHave) {
          ways = forms.grow(sets[t], want[t], touch.need);
        } else if (made[t] >= 0) {
          ways = forms.grow(1u << made[t], sets[t], touch.need);
        } else {
          ways.push_back({forms.required(sets[t] | want[t]), 0});
        }
        next.clear();
        for (const Transition& head : partial) {
          for (const Grown& way : ways) {
            next.push_back(head);
            next.back().cost += way.cost;
            next.back().sets.push_back(touch.after == Role::kAbsent ? 0 : way.forms);
          }
        }
        partial.swap(next);
      }
      list.insert(list.end(), partial.begin(), partial.end());
    }
    prune(step, &list);
    return list;
  }

  // Drops transitions that another replaces.
  void prune(const Step& step, std::vector<Transition>* list) {
    std::stable_sort(list->begin(), list->end(),
                     [](const Transition& a, const Transition& b) { return a.cost < b.cost; });
    std::vector<Transition> kept;
    for (Transition& a : *list) {
      bool dominated = false;
      for (const Transition& b : kept) {
        double cost = b.cost;
        for (size_t t = 0; t < a.sets.size(); ++t) {
          const Touch& touch = order.touches[step.touch_begin + t];
          if (touch.after == Role::kAbsent || a.sets[t] == b.sets[t]) continue;
          cost += (*upgrade(touch.value, touch.after))(b.sets[t], a.sets[t]);
        }
        if (cost <= a.cost) {
          dominated = true;
          break;
        }
      }
      if (!dominated) kept.push_back(std::move(a));
    }
    *list = std::move(kept);
  }

 private:
  // Sets required of the touched values, and made, by one option.
  void demands(const Step& step, const Option& option, std::vector<uint32_t>* want,
               std::vector<int>* made) const {
    const Node& node = problem.nodes[step.node];
    const int touches = step.touch_end - step.touch_begin;
    want->assign(touches, 0);
    made->assign(touches, -1);
    for (int t = 0; t < touches; ++t) {
      const int value = order.touches[step.touch_begin + t].value;
      for (size_t i = 0; i < node.inputs.size(); ++i) {
        if (node.inputs[i] == value) (*want)[t] |= 1u << option.in[i];
      }
      for (size_t o = 0; o < node.outputs.size(); ++o) {
        if (node.outputs[o] == value) (*made)[t] = option.out[o];
      }
    }
  }

  // Options that no other option replaces at no greater cost, conversions included.
  void prepare(const Step& step, Kind* kind) {
    kind->ready = true;
    const int table = problem.nodes[step.node].table;
    const auto& options = problem.option_tables[table].options;
    std::vector<int> by_price;
    for (size_t o = 0; o < options.size(); ++o) {
      if (prices[table][o] < kInf) by_price.push_back(static_cast<int>(o));
    }
    std::stable_sort(by_price.begin(), by_price.end(),
                     [&](int a, int b) { return prices[table][a] < prices[table][b]; });
    std::vector<uint32_t> want_a, want_b;
    std::vector<int> made_a, made_b;
    for (int a : by_price) {
      demands(step, options[a], &want_a, &made_a);
      bool dominated = false;
      for (int b : kind->options) {
        demands(step, options[b], &want_b, &made_b);
        double cost = prices[table][b];
        for (size_t t = 0; t < want_a.size(); ++t) {
          const Touch& touch = order.touches[step.touch_begin + t];
          if (want_b[t] != 0) cost += space(touch.value).steiner(want_a[t], want_b[t]);
          const bool used = touch.before != Role::kAbsent || touch.after != Role::kAbsent;
          if (made_a[t] >= 0 && used) {
            cost += space(touch.value).steiner(1u << made_b[t], 1u << made_a[t]);
          }
        }
        if (cost <= prices[table][a]) {
          dominated = true;
          break;
        }
      }
      if (!dominated) kind->options.push_back(a);
    }
  }

  std::vector<FormSpace> spaces_;  // [form table]
  std::map<std::tuple<int, Role, uint32_t>, std::unique_ptr<Upgrade>> upgrades_;
};

// A live value.
struct Live {
  int value;
  Place place;
  Role role;
  uint32_t need;
  Upgrade* upgrade;
  uint64_t mask;
};

// Where the states after a step came from, and what the step did: an option, or for a cluster the
// number of a choice.
struct Record {
  std::vector<int> parent, option;
};

// The states between two steps.
template <int W>
class Frontier {
 public:
  Frontier(Tables* tables, const Layout& layout) : tables_(*tables), layout_(layout) { clear(); }

  std::vector<Key<W>> keys;  // [state]
  std::vector<double> costs;
  std::vector<Live> live;

  // One state, which knows nothing.
  void clear() {
    keys.assign(1, Key<W>{});
    costs.assign(1, 0);
    live.clear();
  }

  size_t size() const { return keys.size(); }

  // Eliminates the node of one step from all states.
  void advance(const Step& step, Record* from) {
    const int touches = step.touch_end - step.touch_begin;
    Key<W> touched{};
    for (int t = 0; t < touches; ++t) {
      const Touch& touch = tables_.order.touches[step.touch_begin + t];
      if (touch.before == Role::kAbsent) continue;
      const Place& place = layout_.place[step.touch_begin + t];
      touched.word[place.word] |= tables_.full(touch.value) << place.shift;
    }
    // Transitions of each combination of touched sets, in terms of keys.
    locals_.reset(64);
    moves_.clear();
    move_begin_.assign(1, 0);
    next_.reset(keys.size() * 2);
    next_costs_.clear();
    Record& record = *from;
    record.parent.clear();
    record.option.clear();
    for (size_t s = 0; s < keys.size(); ++s) {
      Key<W> local = keys[s], rest = keys[s];
      for (int w = 0; w < W; ++w) {
        local.word[w] &= touched.word[w];
        rest.word[w] &= ~touched.word[w];
      }
      bool fresh;
      const int at = locals_.number(local, &fresh);
      if (fresh) {
        std::vector<uint32_t> sets(touches, 0);
        for (int t = 0; t < touches; ++t) {
          const Touch& touch = tables_.order.touches[step.touch_begin + t];
          if (touch.before == Role::kAbsent) continue;
          const Place& place = layout_.place[step.touch_begin + t];
          sets[t] = static_cast<uint32_t>(local.word[place.word] >> place.shift &
                                          tables_.full(touch.value));
        }
        for (const Transition& transition : transitions(step, sets)) {
          Move move{{}, transition.cost, transition.option};
          for (int t = 0; t < touches; ++t) {
            const Place& place = layout_.place[step.touch_begin + t];
            move.add.word[place.word] |= uint64_t{transition.sets[t]} << place.shift;
          }
          moves_.push_back(move);
        }
        move_begin_.push_back(static_cast<int>(moves_.size()));
      }
      for (int m = move_begin_[at]; m < move_begin_[at + 1]; ++m) {
        const Move& move = moves_[m];
        Key<W> key = rest;
        for (int w = 0; w < W; ++w) key.word[w] |= move.add.word[w];
        const double cost = costs[s] + move.cost;
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
  }

  void update_live(const Step& step) {
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
                     tables_.full(touch.value)};
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
  void dominate(Record* record) {
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
          if (costs[b] + (*slot.upgrade)(set_of(b, slot), set) <= costs[a]) {
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

  bool covers(int b, int a) const {
    double room = costs[a] - costs[b];
    for (const Live& slot : live) {
      const uint32_t set_a = set_of(a, slot), set_b = set_of(b, slot);
      if (set_a == set_b) continue;
      room -= (*slot.upgrade)(set_b, set_a);
      if (room < 0) return false;
    }
    return true;
  }

  // Keeps the `cap` cheapest states; returns the least cost of the others.
  double truncate(size_t cap, Record* record) {
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
  void keep(Record* record, F&& wanted) {
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
  // All undominated ways through a step from the given sets of the touched values.
  const std::vector<Transition>& transitions(const Step& step, const std::vector<uint32_t>& sets) {
    if (step.node >= 0) return tables_.through_node(step, sets);
    const auto [it, fresh] = tables_.kinds[step.kind].transitions.try_emplace(sets);
    if (fresh) it->second = through_cluster(step, sets);
    return it->second;
  }

  // A search of its own over the nodes of the cluster.
  std::vector<Transition> through_cluster(const Step& step, const std::vector<uint32_t>& sets) {
    const auto& touches = tables_.order.touches;
    if (!inside_) inside_ = std::make_unique<Frontier>(&tables_, layout_);
    Frontier& inside = *inside_;
    inside.clear();
    for (int t = step.touch_begin; t < step.touch_end; ++t) {
      const Touch& touch = touches[t];
      if (touch.before == Role::kAbsent) continue;
      const Place& place = layout_.place[t];
      inside.keys[0].word[place.word] |= uint64_t{sets[t - step.touch_begin]} << place.shift;
      inside.live.push_back({touch.value, place, touch.before, 0,
                             tables_.upgrade(touch.value, touch.before),
                             tables_.full(touch.value)});
    }
    const int nodes = step.inner_end - step.inner_begin;
    std::vector<Record> records(nodes);
    for (int i = 0; i < nodes; ++i) {
      inside.advance(tables_.order.inner[step.inner_begin + i], &records[i]);
    }
    std::vector<Transition> list;
    for (size_t s = 0; s < inside.size(); ++s) {
      Transition transition{inside.costs[s], static_cast<int>(s), {}};
      for (int t = step.touch_begin; t < step.touch_end; ++t) {
        const Place& place = layout_.place[t];
        transition.sets.push_back(
            touches[t].after == Role::kAbsent
                ? 0
                : static_cast<uint32_t>(inside.keys[s].word[place.word] >> place.shift &
                                        tables_.full(touches[t].value)));
      }
      list.push_back(std::move(transition));
    }
    tables_.prune(step, &list);
    auto& choices = tables_.kinds[step.kind].choices;
    for (Transition& transition : list) {
      std::vector<int> choice(nodes);
      int state = transition.option;
      for (int i = nodes; i-- > 0;) {
        choice[i] = records[i].option[state];
        state = records[i].parent[state];
      }
      transition.option = static_cast<int>(choices.size());
      choices.push_back(std::move(choice));
    }
    return list;
  }

  struct Move {
    Key<W> add;
    double cost;
    int option;
  };

  Tables& tables_;
  const Layout& layout_;
  std::unique_ptr<Frontier> inside_;
  std::vector<int> touched_live_;

  // Scratch of advance() and dominate().
  Numbering<W> locals_, next_, groups_;
  std::vector<Move> moves_;
  std::vector<int> move_begin_;
  std::vector<double> next_costs_;
  std::vector<int> by_cost_, head_, chain_;
  std::vector<char> dead_;
};

template <int W>
class Search {
 public:
  Search(const Problem& problem, const Order& order, const Layout& layout, const Weights& weights,
         const Limits& limits)
      : problem_(problem),
        order_(order),
        layout_(layout),
        limits_(limits),
        start_(now_s()),
        cap_(std::max<int64_t>(1, limits.max_states)),
        tables_(problem, order, weights),
        frontier_(&tables_, layout),
        history_(order.steps.size()) {
    suffix_.assign(order.steps.size() + 1, 0);
    for (size_t k = order.steps.size(); k-- > 0;) {
      suffix_[k] = suffix_[k + 1];
      for (int i = order.steps[k].inner_begin; i < order.steps[k].inner_end; ++i) {
        const auto& prices = tables_.prices[problem.nodes[order.inner[i].node].table];
        suffix_[k] += prices.empty() ? kInf : *std::min_element(prices.begin(), prices.end());
      }
    }
  }

  Solution run(const Weights& weights) {
    size_t repeat = 0;
    int block = 0;
    std::vector<Boundary> boundaries;
    for (int k = 0; k < static_cast<int>(order_.steps.size());) {
      const bool in_repeat = repeat < order_.repeats.size() && k >= order_.repeats[repeat].begin;
      expanded_ += static_cast<int64_t>(frontier_.size());
      frontier_.advance(order_.steps[k], &history_[k]);
      truncate(k++);
      if (frontier_.size() == 0) return stopped();
      if (!in_repeat) continue;
      const Repeat& r = order_.repeats[repeat];
      if (k != r.begin + (block + 1) * r.period) continue;
      ++block;
      if (lost_ == kInf && block < r.count) k = boundary(r, k, &block, &boundaries);
      if (block == r.count) {
        ++repeat;
        block = 0;
        boundaries.clear();
      }
    }
    MOTLEY_CHECK(frontier_.size() == 1);
    Solution solution = evaluate(problem_, replay(), weights);
    const double cost = offset_ + frontier_.costs[0];
    MOTLEY_CHECK(std::abs(solution.price - cost) <= 1e-9 * std::max(cost, solution.price) + 1e-300,
                 "search says {}, its program costs {}", cost, solution.price);
    solution.lower_bound = std::min(solution.price, lost_);
    if (solution.lower_bound < solution.price) solution.stop = reason_;
    return finish(std::move(solution));
  }

 private:
  struct Skip {
    int at, length, times;  // before step `at + length * times`, `times` copies of the steps before
  };

  // A frontier at the end of a block in terms that do not depend on which block it is.
  struct Boundary {
    std::vector<std::vector<int>> slots;  // sorted descriptions of the live values
    std::vector<std::vector<uint32_t>> sets;
    std::vector<double> costs;
    int step;
    double offset;
  };

  Solution finish(Solution solution) const {
    solution.states = expanded_;
    solution.seconds = now_s() - start_;
    return solution;
  }

  Solution stopped() const {
    Solution solution;
    solution.price = kInf;
    solution.lower_bound = lost_;
    solution.stop = lost_ == kInf ? StopReason::kInfeasible : reason_;
    return finish(std::move(solution));
  }

  void truncate(int k) {
    if (now_s() - start_ > limits_.time_limit_s && cap_ > kBeam) {
      cap_ = kBeam;
      reason_ = StopReason::kTimeLimit;
    }
    if (static_cast<int64_t>(frontier_.size()) <= cap_) return;
    const double dropped = frontier_.truncate(static_cast<size_t>(cap_), &history_[k]);
    lost_ = std::min(lost_, offset_ + dropped + suffix_[k + 1]);
  }

  // The live values after step k - 1 in an order that is the same at every boundary of a repeat:
  // those touched in the last block by where, then the others by value.
  std::vector<std::pair<std::vector<int>, int>> describe(const Repeat& r, int k) const {
    std::vector<std::pair<std::vector<int>, int>> slots;
    std::unordered_map<int, std::pair<int, int>> where;
    for (int s = k - r.period; s < k; ++s) {
      for (int t = order_.steps[s].touch_begin; t < order_.steps[s].touch_end; ++t) {
        where[order_.touches[t].value] = {s - (k - r.period), t - order_.steps[s].touch_begin};
      }
    }
    for (size_t i = 0; i < frontier_.live.size(); ++i) {
      const Live& live = frontier_.live[i];
      const auto it = where.find(live.value);
      std::vector<int> key = it == where.end()
                                 ? std::vector<int>{1, live.value, 0}
                                 : std::vector<int>{0, it->second.first, it->second.second};
      key.push_back(problem_.value_table[live.value]);
      key.push_back(static_cast<int>(live.role));
      key.push_back(static_cast<int>(live.need));
      slots.emplace_back(std::move(key), static_cast<int>(i));
    }
    std::sort(slots.begin(), slots.end());
    return slots;
  }

  // At the end of a block: if the frontier repeats, skips blocks. Returns the step to go on with.
  int boundary(const Repeat& r, int k, int* block, std::vector<Boundary>* boundaries) {
    const auto slots = describe(r, k);
    Boundary b;
    b.step = k;
    for (const auto& [key, at] : slots) b.slots.push_back(key);
    const double least = *std::min_element(frontier_.costs.begin(), frontier_.costs.end());
    offset_ += least;
    b.offset = offset_;
    for (double& cost : frontier_.costs) cost -= least;
    std::vector<std::pair<std::vector<uint32_t>, int>> states;
    for (size_t s = 0; s < frontier_.keys.size(); ++s) {
      std::vector<uint32_t> sets;
      for (const auto& [key, at] : slots)
        sets.push_back(frontier_.set_of(static_cast<int>(s), frontier_.live[at]));
      states.emplace_back(std::move(sets), static_cast<int>(s));
    }
    std::sort(states.begin(), states.end());
    // Number the states in this order, so that equal frontiers have equal numbers.
    Record& record = history_[k - 1];
    Record sorted;
    std::vector<Key<W>> sorted_keys;
    for (auto& [sets, s] : states) {
      b.sets.push_back(std::move(sets));
      b.costs.push_back(frontier_.costs[s]);
      sorted_keys.push_back(frontier_.keys[s]);
      sorted.parent.push_back(record.parent[s]);
      sorted.option.push_back(record.option[s]);
    }
    record = std::move(sorted);
    frontier_.keys = std::move(sorted_keys);
    frontier_.costs = b.costs;

    int go_on = k;
    for (size_t back = 0; back < boundaries->size() && back < kLookBack; ++back) {
      const Boundary& old = (*boundaries)[boundaries->size() - 1 - back];
      if (old.slots != b.slots || old.sets != b.sets) continue;
      const double scale = (b.offset - old.offset) * 1e-9;
      bool equal = true;
      for (size_t s = 0; s < b.costs.size(); ++s) {
        equal &= std::abs(b.costs[s] - old.costs[s]) <= scale;
      }
      if (!equal) continue;
      const int cycle = static_cast<int>(back) + 1;
      const int times = (r.count - *block) / cycle;
      if (times == 0) continue;
      go_on = k + times * cycle * r.period;
      *block += times * cycle;
      offset_ += times * (b.offset - old.offset);
      skips_.push_back({k, cycle * r.period, times});
      move_to(r, slots, b, go_on);
      break;
    }
    boundaries->push_back(std::move(b));
    return go_on;
  }

  // Makes the frontier described by `b` the one after step k - 1.
  void move_to(const Repeat& r, const std::vector<std::pair<std::vector<int>, int>>& slots,
               const Boundary& b, int k) {
    const int shift = k - b.step;
    std::vector<Live> live(frontier_.live.size());
    for (size_t i = 0; i < slots.size(); ++i) {
      const auto& key = slots[i].first;
      live[i] = frontier_.live[slots[i].second];
      if (key[0] == 1) continue;
      const int t = order_.steps[b.step - r.period + key[1] + shift].touch_begin + key[2];
      const Touch& touch = order_.touches[t];
      MOTLEY_CHECK(touch.after == live[i].role && touch.need == live[i].need);
      live[i].value = touch.value;
      live[i].place = layout_.place[t];
    }
    frontier_.live = std::move(live);
    for (size_t s = 0; s < frontier_.keys.size(); ++s) {
      frontier_.keys[s] = Key<W>{};
      for (size_t i = 0; i < frontier_.live.size(); ++i) {
        frontier_.keys[s].word[frontier_.live[i].place.word] |= uint64_t{b.sets[s][i]}
                                                                << frontier_.live[i].place.shift;
      }
    }
  }

  // The option of every node on the way to the only state that is left.
  std::vector<int> replay() const {
    std::vector<int> option(problem_.nodes.size(), -1);
    int state = 0;
    size_t skip = skips_.size();
    const auto back = [&](int k, int shift) {
      const Step& step = order_.steps[k + shift];
      const int made = history_[k].option[state];
      if (step.node >= 0) {
        option[step.node] = made;
      } else {
        const std::vector<int>& choice = tables_.kinds[step.kind].choices[made];
        for (int i = step.inner_begin; i < step.inner_end; ++i) {
          option[order_.inner[i].node] = choice[i - step.inner_begin];
        }
      }
      state = history_[k].parent[state];
    };
    for (int k = static_cast<int>(order_.steps.size()); k > 0;) {
      if (skip > 0 && k == skips_[skip - 1].at + skips_[skip - 1].length * skips_[skip - 1].times) {
        const Skip& s = skips_[--skip];
        for (int times = s.times; times > 0; --times) {
          for (int i = 1; i <= s.length; ++i) back(s.at - i, s.length * times);
        }
        k = s.at;
      } else {
        back(--k, 0);
      }
    }
    return option;
  }

  const Problem& problem_;
  const Order& order_;
  const Layout& layout_;
  const Limits& limits_;
  const double start_;
  int64_t cap_;
  StopReason reason_ = StopReason::kStateLimit;
  double lost_ = kInf;  // least that any state dropped by a limit might have cost in the end
  double offset_ = 0;   // subtracted from all costs
  int64_t expanded_ = 0;

  Tables tables_;
  Frontier<W> frontier_;
  std::vector<double> suffix_;   // [step] least option prices from there on
  std::vector<Record> history_;  // [step]
  std::vector<Skip> skips_;
};

template <int W>
Solution search(const Problem& problem, const Order& order, const Layout& layout,
                const Weights& weights, const Limits& limits) {
  return Search<W>(problem, order, layout, weights, limits).run(weights);
}

}  // namespace

Solution solve_folded(const Problem& problem, const Order& order, const Weights& weights,
                      const Limits& limits) {
  MOTLEY_CHECK(order.inner.size() == problem.nodes.size());
  MOTLEY_CHECK(static_cast<int>(weights.compute.size()) == problem.types);
  const Layout layout(problem, order);
  if (layout.words <= 1) return search<1>(problem, order, layout, weights, limits);
  if (layout.words <= 2) return search<2>(problem, order, layout, weights, limits);
  if (layout.words <= 8) return search<8>(problem, order, layout, weights, limits);
  MOTLEY_CHECK(layout.words <= 64, "{} words of live values", layout.words);
  return search<64>(problem, order, layout, weights, limits);
}

}  // namespace motley::spmd
