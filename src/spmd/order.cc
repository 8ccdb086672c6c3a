#include "spmd/order.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <map>
#include <unordered_map>

#include "core/error.h"
#include "core/rng.h"

namespace motley::spmd {
namespace {

constexpr int kMinRepeats = 3;
constexpr int kMinPeriod = 8;

struct VectorHash {
  size_t operator()(const std::vector<int>& key) const {
    uint64_t hash = key.size();
    for (int word : key) hash = mix64(hash ^ static_cast<uint32_t>(word));
    return hash;
  }
};

// Numbers distinct keys 0, 1, ... in order of appearance.
class Interner {
 public:
  int operator()(const std::vector<int>& key) {
    return ids_.try_emplace(key, static_cast<int>(ids_.size())).first->second;
  }
  int size() const { return static_cast<int>(ids_.size()); }

 private:
  std::unordered_map<std::vector<int>, int, VectorHash> ids_;
};

// Forms that a table's options make and require, per output and input.
struct TableForms {
  std::vector<uint32_t> in, out;
};

std::vector<TableForms> forms_of_tables(const Problem& problem) {
  std::vector<TableForms> forms(problem.option_tables.size());
  for (size_t t = 0; t < forms.size(); ++t) {
    for (const Option& option : problem.option_tables[t].options) {
      forms[t].in.resize(option.in.size());
      forms[t].out.resize(option.out.size());
      for (size_t k = 0; k < option.in.size(); ++k) forms[t].in[k] |= 1u << option.in[k];
      for (size_t k = 0; k < option.out.size(); ++k) forms[t].out[k] |= 1u << option.out[k];
    }
  }
  return forms;
}

// The distinct values of every node, inputs before outputs, and the weight of every value.
struct Wiring {
  explicit Wiring(const Problem& problem) {
    const auto forms = forms_of_tables(problem);
    const size_t values = problem.value_table.size();
    made.assign(values, 0);
    need.assign(values, 0);
    uses.assign(values, 0);
    weight.assign(values, 0);
    begin.push_back(0);
    for (const Node& node : problem.nodes) {
      const TableForms& table = forms[node.table];
      for (size_t k = 0; k < node.inputs.size(); ++k) {
        add(node.inputs[k]);
        if (k < table.in.size()) need[node.inputs[k]] |= table.in[k];
      }
      for (size_t k = 0; k < node.outputs.size(); ++k) {
        add(node.outputs[k]);
        if (k < table.out.size()) made[node.outputs[k]] |= table.out[k];
      }
      begin.push_back(static_cast<int>(list.size()));
    }
    for (int value : list) ++uses[value];
    for (size_t v = 0; v < values; ++v)
      weight[v] = std::log2(1.0 + std::popcount(made[v] | need[v]));
  }

  void add(int value) {
    if (std::find(list.begin() + begin.back(), list.end(), value) == list.end()) {
      list.push_back(value);
    }
  }

  std::vector<int> begin, list;  // values of node i: list[begin[i] .. begin[i + 1])
  std::vector<uint32_t> made, need;
  std::vector<int> uses;  // [value] nodes that touch it
  std::vector<double> weight;
};

std::vector<int> folded_positions(const Problem& problem) {
  const int nodes = static_cast<int>(problem.nodes.size());
  constexpr int kNone = std::numeric_limits<int>::max();
  std::vector<int> producer(problem.value_table.size(), -1);
  for (int i = 0; i < nodes; ++i) {
    for (int value : problem.nodes[i].outputs) producer[value] = i;
  }
  std::vector<int> position(nodes, kNone);
  // A node without inputs follows its first consumer with a position, in node order; a backward
  // consumer's position may itself depend on it, and then it does not count as saved.
  for (int i = 0; i < nodes; ++i) {
    const Node& node = problem.nodes[i];
    if (node.inputs.empty()) continue;
    if (!node.backward) {
      position[i] = i;
    } else {
      int gradient = kNone, saved = -1;
      for (int value : node.inputs) {
        const int from = producer[value];
        if (position[from] == kNone) continue;
        if (problem.nodes[from].backward) {
          gradient = std::min(gradient, position[from]);
        } else {
          saved = std::max(saved, position[from]);
        }
      }
      if (node.outputs.empty() && gradient != kNone) saved = -1;
      position[i] = saved < 0 ? (gradient == kNone ? i : gradient) : std::min(gradient, saved);
    }
    for (int value : node.inputs) {
      const int from = producer[value];
      if (problem.nodes[from].inputs.empty()) {
        position[from] = std::min(position[from], position[i]);
      }
    }
  }
  for (int i = 0; i < nodes; ++i) {
    if (position[i] == kNone) position[i] = i;
  }
  return position;
}

std::vector<int> folded_order(const Problem& problem) {
  const std::vector<int> position = folded_positions(problem);
  std::vector<int> nodes(problem.nodes.size());
  for (size_t i = 0; i < nodes.size(); ++i) nodes[i] = static_cast<int>(i);
  const auto rank = [&](int i) {
    const Node& node = problem.nodes[i];
    if (node.inputs.empty()) return 0;
    if (!node.backward) return 1;
    return node.outputs.empty() ? 3 : 2;
  };
  std::sort(nodes.begin(), nodes.end(), [&](int a, int b) {
    if (position[a] != position[b]) return position[a] < position[b];
    if (rank(a) != rank(b)) return rank(a) < rank(b);
    return a < b;
  });
  return nodes;
}

Order steps_of(const Problem& problem, const Wiring& wiring, const std::vector<int>& nodes,
               std::vector<int>* shape) {
  const size_t values = problem.value_table.size();
  Order order;
  order.made = wiring.made;
  order.steps.reserve(nodes.size());
  order.touches.reserve(wiring.list.size());
  const auto forms = forms_of_tables(problem);
  std::vector<int> last(values, -1), left = wiring.uses;
  std::vector<char> produced(values, 0);
  for (size_t k = 0; k < nodes.size(); ++k) {
    const int i = nodes[k];
    Step step{i, static_cast<int>(order.touches.size()), 0, 0};
    for (int at = wiring.begin[i]; at < wiring.begin[i + 1]; ++at) {
      const int value = wiring.list[at];
      Touch touch{value, Role::kAbsent, Role::kAbsent, 0, 0};
      if (last[value] >= 0) {
        touch.before = produced[value] ? Role::kHave : Role::kNeed;
        touch.since = static_cast<int>(k) - last[value];
      }
      last[value] = static_cast<int>(k);
      for (int output : problem.nodes[i].outputs) produced[value] |= output == value;
      if (--left[value] > 0) touch.after = produced[value] ? Role::kHave : Role::kNeed;
      order.touches.push_back(touch);
    }
    step.touch_end = static_cast<int>(order.touches.size());
    order.steps.push_back(step);
  }
  std::vector<uint32_t> need(values, 0);
  for (size_t k = nodes.size(); k-- > 0;) {
    const Step& step = order.steps[k];
    for (int t = step.touch_begin; t < step.touch_end; ++t) {
      order.touches[t].need = need[order.touches[t].value];
    }
    const Node& node = problem.nodes[step.node];
    const TableForms& table = forms[node.table];
    for (size_t in = 0; in < table.in.size(); ++in) need[node.inputs[in]] |= table.in[in];
  }
  Interner kinds, shapes;
  std::vector<int> key;
  shape->clear();
  for (Step& step : order.steps) {
    const Node& node = problem.nodes[step.node];
    key = {node.table};
    for (int t = step.touch_begin; t < step.touch_end; ++t) {
      const Touch& touch = order.touches[t];
      key.push_back(problem.value_table[touch.value]);
      key.push_back(static_cast<int>(touch.before) * 4 + static_cast<int>(touch.after));
      key.push_back(static_cast<int>(touch.need));
      key.push_back(static_cast<int>(wiring.made[touch.value]));
    }
    const auto index_of = [&](int value) {
      int t = step.touch_begin;
      while (order.touches[t].value != value) ++t;
      return t - step.touch_begin;
    };
    for (int value : node.inputs) key.push_back(index_of(value));
    for (int value : node.outputs) key.push_back(index_of(value));
    step.kind = kinds(key);
    for (int t = step.touch_begin; t < step.touch_end; ++t) key.push_back(order.touches[t].since);
    shape->push_back(shapes(key));
  }
  order.kinds = kinds.size();
  return order;
}

// Weighted width of the live values after each step.
std::vector<double> widths(const Order& order, const Wiring& wiring) {
  std::vector<double> width(order.steps.size());
  double now = 0;
  for (size_t k = 0; k < width.size(); ++k) {
    for (int t = order.steps[k].touch_begin; t < order.steps[k].touch_end; ++t) {
      const Touch& touch = order.touches[t];
      if (touch.before != Role::kAbsent) now -= wiring.weight[touch.value];
      if (touch.after != Role::kAbsent) now += wiring.weight[touch.value];
    }
    width[k] = now;
  }
  return width;
}

// Finds stretches of equal blocks in shape[from, to) and appends them, cut where the least is live.
void find_repeats(const std::vector<int>& shape, const std::vector<double>& width, int from, int to,
                  std::vector<Repeat>* repeats) {
  if (to - from < 2 * kMinRepeats) return;
  std::map<int, int> votes;  // distance between consecutive equal shapes -> how often
  std::unordered_map<int, int> last;
  for (int k = from; k < to; ++k) {
    const auto [it, fresh] = last.try_emplace(shape[k], k);
    if (!fresh) {
      ++votes[k - it->second];
      it->second = k;
    }
  }
  std::vector<std::pair<int, int>> ranked;  // (-votes, period)
  for (const auto& [period, count] : votes) {
    if (period >= kMinPeriod) ranked.emplace_back(-count, period);
  }
  std::sort(ranked.begin(), ranked.end());
  if (ranked.size() > 8) ranked.resize(8);
  Repeat best{0, 1, 0};
  for (const auto& [unused, period] : ranked) {
    for (int k = from; k + period < to;) {
      int end = k;
      while (end + period < to && shape[end] == shape[end + period]) ++end;
      // Steps [k, end + period) repeat with the period.
      const int count = (end - k) / period + 1;
      const int gain = (count - 1) * period;
      if (count >= kMinRepeats && gain > (best.count - 1) * best.period) {
        int phase = 0;
        const int slack = (end + period - k) % period;
        const int reach = count > kMinRepeats ? period : slack + 1;
        double least = std::numeric_limits<double>::infinity();
        for (int p = 0; p < reach; ++p) {
          // Widths at the start of the second block: the first may still hold what preceded it.
          const double w = width[k + p + period - 1];
          if (w < least - 1e-9) {
            least = w;
            phase = p;
          }
        }
        best = {k + phase, period, (end + period - k - phase) / period};
      }
      k = end + 1;
    }
  }
  if (best.count < kMinRepeats) return;
  find_repeats(shape, width, from, best.begin, repeats);
  repeats->push_back(best);
  find_repeats(shape, width, best.begin + best.period * best.count, to, repeats);
}

// Improves nodes[from, to) of an elimination order, all before `from` being eliminated. Returns the
// best permutation found, as positions relative to `from`.
class Greedy {
 public:
  Greedy(const Wiring& wiring, const OrderOptions& options)
      : wiring_(wiring), options_(options), left_(wiring.uses) {}

  void eliminate(int node) {
    for (int at = wiring_.begin[node]; at < wiring_.begin[node + 1]; ++at) {
      const int value = wiring_.list[at];
      if (left_[value] == wiring_.uses[value]) width_ += wiring_.weight[value];
      if (--left_[value] == 0) width_ -= wiring_.weight[value];
    }
  }

  std::vector<int> improve(const std::vector<int>& nodes, int from, int to) {
    const std::vector<int> saved_left = left_;
    const double saved_width = width_;
    const auto restore = [&] {
      for (int k = from; k < to; ++k) {
        for (int at = wiring_.begin[nodes[k]]; at < wiring_.begin[nodes[k] + 1]; ++at) {
          left_[wiring_.list[at]] = saved_left[wiring_.list[at]];
        }
      }
      width_ = saved_width;
    };
    std::vector<int> best(to - from), pending, chosen;
    for (int k = 0; k < to - from; ++k) best[k] = k;
    double best_cost = 0;
    for (int k = from; k < to; ++k) best_cost += step_cost(nodes[k]);
    restore();
    Rng rng(options_.seed);
    for (int restart = 0; restart < options_.restarts; ++restart) {
      const double noise = restart == 0 ? 0 : 0.5 * (1 + restart % 6);
      pending.resize(to - from);
      for (int k = 0; k < to - from; ++k) pending[k] = k;
      chosen.clear();
      double cost = 0;
      while (!pending.empty() && cost < best_cost) {
        const int window = std::min<int>(options_.window, static_cast<int>(pending.size()));
        int pick = 0;
        double least = std::numeric_limits<double>::infinity();
        for (int c = 0; c < window; ++c) {
          const double score =
              delta(nodes[from + pending[c]]) + 0.02 * c + (noise > 0 ? noise * rng.uniform() : 0);
          if (score < least) {
            least = score;
            pick = c;
          }
        }
        cost += step_cost(nodes[from + pending[pick]]);
        chosen.push_back(pending[pick]);
        pending.erase(pending.begin() + pick);
      }
      if (pending.empty() && cost < best_cost) {
        best_cost = cost;
        best = chosen;
      }
      restore();
    }
    return best;
  }

 private:
  double delta(int node) const {
    double sum = 0;
    for (int at = wiring_.begin[node]; at < wiring_.begin[node + 1]; ++at) {
      const int value = wiring_.list[at];
      if (left_[value] == wiring_.uses[value]) sum += wiring_.weight[value];
      if (left_[value] == 1) sum -= wiring_.weight[value];
    }
    return sum;
  }

  double step_cost(int node) {
    eliminate(node);
    return std::exp2(width_);
  }

  const Wiring& wiring_;
  const OrderOptions& options_;
  std::vector<int> left_;  // [value] nodes yet to be eliminated
  double width_ = 0;
};

}  // namespace

Order order_from_nodes(const Problem& problem, const std::vector<int>& nodes, bool repeats) {
  MOTLEY_CHECK(nodes.size() == problem.nodes.size());
  const Wiring wiring(problem);
  std::vector<int> shape;
  Order order = steps_of(problem, wiring, nodes, &shape);
  if (repeats) {
    find_repeats(shape, widths(order, wiring), 0, static_cast<int>(nodes.size()), &order.repeats);
  }
  return order;
}

Order make_order(const Problem& problem, const OrderOptions& options) {
  validate(problem);
  const Wiring wiring(problem);
  std::vector<int> nodes = folded_order(problem), shape;
  Order base = steps_of(problem, wiring, nodes, &shape);
  if (options.repeats) {
    find_repeats(shape, widths(base, wiring), 0, static_cast<int>(nodes.size()), &base.repeats);
  }
  Greedy greedy(wiring, options);
  std::vector<int> result;
  const auto stretch = [&](int from, int to) {
    for (int k : greedy.improve(nodes, from, to)) result.push_back(nodes[from + k]);
    for (int k = from; k < to; ++k) greedy.eliminate(nodes[k]);
  };
  int at = 0;
  for (const Repeat& repeat : base.repeats) {
    stretch(at, repeat.begin);
    at = repeat.begin;
    // The first block may see a different past; the order of the second serves all.
    for (int k = 0; k < repeat.period; ++k) greedy.eliminate(nodes[at + k]);
    const std::vector<int> block =
        greedy.improve(nodes, at + repeat.period, at + 2 * repeat.period);
    for (int r = 0; r < repeat.count; ++r, at += repeat.period) {
      for (int k : block) result.push_back(nodes[at + k]);
      if (r > 0) {
        for (int k = 0; k < repeat.period; ++k) greedy.eliminate(nodes[at + k]);
      }
    }
  }
  stretch(at, static_cast<int>(nodes.size()));
  return order_from_nodes(problem, result, options.repeats);
}

}  // namespace motley::spmd
