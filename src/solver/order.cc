#include "solver/order.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <tuple>
#include <unordered_map>

#include "core/error.h"
#include "core/rng.h"
#include "solver/greedy.h"
#include "solver/repeats.h"

namespace motley::solver {
namespace {

constexpr int kClusterNodes = 14;
constexpr int kClusterSpan = 40;  // in folded positions

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

std::vector<int> folded_positions(const Problem& problem) {
  const int nodes = static_cast<int>(problem.nodes.size());
  constexpr int kNone = std::numeric_limits<int>::max();
  std::vector<int> producer(problem.value_table.size(), -1);
  for (int i = 0; i < nodes; ++i) {
    for (int value : problem.nodes[i].outputs) producer[value] = i;
  }
  // Where forward nodes use each value; forward nodes keep their index, so this ascends.
  std::vector<std::vector<int>> uses(problem.value_table.size());
  for (int i = 0; i < nodes; ++i) {
    const ProblemNode& node = problem.nodes[i];
    if (node.backward) continue;
    for (int value : node.inputs) uses[value].push_back(i);
    if (node.inputs.empty()) continue;
    for (int value : node.outputs) uses[value].push_back(i);
  }
  std::vector<int> position(nodes, kNone);
  for (int i = 0; i < nodes; ++i) {
    const ProblemNode& node = problem.nodes[i];
    if (node.inputs.empty()) continue;
    if (!node.backward) {
      position[i] = i;
    } else {
      int gradient = kNone, saved = -1;
      for (int value : node.inputs) {
        if (problem.nodes[producer[value]].backward) {
          gradient = std::min(gradient, position[producer[value]]);
        }
      }
      for (int value : node.inputs) {
        // The forward use that the gradient comes down to: of a value that all layers share, the
        // one in this layer.
        const auto after = std::upper_bound(uses[value].begin(), uses[value].end(), gradient);
        if (after != uses[value].begin()) saved = std::max(saved, *(after - 1));
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

// Joins sources with their users, and nodes without outputs with the makers of their inputs.
std::vector<Item> cluster(const Problem& problem, const std::vector<int>& position) {
  const int nodes = static_cast<int>(problem.nodes.size());
  std::vector<int> leader(nodes), size(nodes, 1), producer(problem.value_table.size());
  std::vector<std::vector<int>> users(problem.value_table.size());
  for (int i = 0; i < nodes; ++i) {
    leader[i] = i;
    for (int value : problem.nodes[i].inputs) users[value].push_back(i);
    for (int value : problem.nodes[i].outputs) producer[value] = i;
  }
  const auto find = [&](int i) {
    while (leader[i] != i) i = leader[i] = leader[leader[i]];
    return i;
  };
  const auto join = [&](std::vector<int> group) {
    for (int& i : group) i = find(i);
    std::sort(group.begin(), group.end());
    group.erase(std::unique(group.begin(), group.end()), group.end());
    int total = 0;
    for (int i : group) total += size[i];
    if (total > kClusterNodes) return;
    for (int i : group) leader[i] = group[0];
    size[group[0]] = total;
  };
  for (int i = 0; i < nodes; ++i) {
    const ProblemNode& node = problem.nodes[i];
    std::vector<int> group{i};
    if (node.inputs.empty()) {
      for (int value : node.outputs) {
        group.insert(group.end(), users[value].begin(), users[value].end());
      }
    } else if (node.outputs.empty()) {
      for (int value : node.inputs) {
        if (users[value].size() == 1) group.push_back(producer[value]);
      }
    }
    const auto [first, last] = std::minmax_element(
        group.begin(), group.end(), [&](int a, int b) { return position[a] < position[b]; });
    if (position[*last] - position[*first] <= kClusterSpan) join(std::move(group));
  }
  std::vector<Item> items;
  std::vector<int> item_of(nodes, -1);
  for (int i = 0; i < nodes; ++i) {
    int& item = item_of[find(i)];
    if (item < 0) {
      item = static_cast<int>(items.size());
      items.emplace_back();
    }
    items[item].push_back(i);
  }
  return items;
}

// All nodes in folded order, by themselves or in clusters.
std::vector<Item> folded_items(const Problem& problem, bool clusters) {
  const std::vector<int> position = folded_positions(problem);
  std::vector<Item> items;
  if (clusters) {
    items = cluster(problem, position);
  } else {
    for (size_t i = 0; i < problem.nodes.size(); ++i) items.push_back({static_cast<int>(i)});
  }
  const auto rank = [&](int i) {
    const ProblemNode& node = problem.nodes[i];
    if (node.inputs.empty()) return 0;
    if (!node.backward) return 1;
    return node.outputs.empty() ? 3 : 2;
  };
  const auto before = [&](int a, int b) {
    return std::tuple(position[a], rank(a), a) < std::tuple(position[b], rank(b), b);
  };
  for (Item& item : items) std::sort(item.begin(), item.end(), before);
  std::sort(items.begin(), items.end(),
            [&](const Item& a, const Item& b) { return before(a[0], b[0]); });
  return items;
}

// Turns single nodes into steps. Fills everything but kinds.
void add_steps(const Problem& problem, const std::vector<int>& nodes, const Wiring& wiring,
               Order* order) {
  const size_t values = problem.value_table.size();
  const auto forms = forms_of_tables(problem);
  std::vector<int> last(values, -1), left = wiring.uses;
  std::vector<char> produced(values, 0);
  for (size_t k = 0; k < nodes.size(); ++k) {
    OrderStep step{};
    step.node = nodes[k];
    step.touch_begin = static_cast<int>(order->touches.size());
    for (int value : problem.nodes[nodes[k]].outputs) produced[value] |= 2;
    for (int at = wiring.begin[k]; at < wiring.begin[k + 1]; ++at) {
      const int value = wiring.list[at];
      Touch touch{value, Role::kAbsent, Role::kAbsent, 0, 0};
      if (last[value] >= 0) {
        touch.before = produced[value] & 1 ? Role::kHave : Role::kNeed;
        touch.since = static_cast<int>(k) - last[value];
      }
      last[value] = static_cast<int>(k);
      if (produced[value] != 0) produced[value] = 1;
      if (--left[value] > 0) touch.after = produced[value] ? Role::kHave : Role::kNeed;
      order->touches.push_back(touch);
    }
    step.touch_end = static_cast<int>(order->touches.size());
    order->steps.push_back(step);
  }
  std::vector<uint32_t> need(values, 0);
  for (size_t k = nodes.size(); k-- > 0;) {
    for (int t = order->steps[k].touch_begin; t < order->steps[k].touch_end; ++t) {
      order->touches[t].need = need[order->touches[t].value];
    }
    const ProblemNode& node = problem.nodes[nodes[k]];
    const TableForms& table = forms[node.table];
    for (size_t in = 0; in < table.in.size(); ++in) need[node.inputs[in]] |= table.in[in];
  }
}

// Numbers the kinds of all steps, and their shapes: kinds with the distances to earlier touches.
std::vector<int> number_kinds(const Problem& problem, Order* order) {
  Interner kinds, shapes;
  std::vector<int> key, shape;
  std::vector<int> local;  // values of the step
  const auto number = [&](int value) {
    const auto it = std::find(local.begin(), local.end(), value);
    if (it != local.end()) return static_cast<int>(it - local.begin());
    local.push_back(value);
    return static_cast<int>(local.size()) - 1;
  };
  for (OrderStep& step : order->steps) {
    local.clear();
    const ProblemNode& node = problem.nodes[step.node];
    key.assign(1, node.table);
    for (int t = step.touch_begin; t < step.touch_end; ++t) {
      const Touch& touch = order->touches[t];
      key.push_back(number(touch.value));
      key.push_back(problem.value_table[touch.value]);
      key.push_back(static_cast<int>(touch.before) * 4 + static_cast<int>(touch.after));
      key.push_back(static_cast<int>(touch.need));
      key.push_back(static_cast<int>(order->made[touch.value]));
    }
    for (int value : node.inputs) key.push_back(number(value));
    for (int value : node.outputs) key.push_back(number(value));
    step.kind = kinds(key);
    for (int t = step.touch_begin; t < step.touch_end; ++t) {
      key.push_back(order->touches[t].since);
    }
    shape.push_back(shapes(key));
  }
  order->kinds = kinds.size();
  return shape;
}

std::vector<Item> singles(const std::vector<int>& nodes) {
  std::vector<Item> items;
  for (int node : nodes) items.push_back({node});
  return items;
}

// The steps of nodes in this order, and the shape of each.
Order steps_of(const Problem& problem, const std::vector<int>& nodes, const Wiring& wiring,
               std::vector<int>* shape) {
  Order order;
  order.made = wiring.made;
  add_steps(problem, nodes, wiring, &order);
  *shape = number_kinds(problem, &order);
  return order;
}

// Numbers items: equal numbers mean equal nodes wired alike, within and to earlier items.
std::vector<int> item_shapes(const std::vector<Item>& items, const Order& order,
                             const std::vector<int>& shape) {
  Interner shapes;
  std::vector<int> result, key;
  size_t k = 0;
  for (const Item& item : items) {
    key.clear();
    for (size_t i = 0; i < item.size(); ++i) key.push_back(shape[k++]);
    result.push_back(shapes(key));
  }
  MOTLEY_CHECK(k == order.steps.size());
  return result;
}

// Weighted width of the live values after each item; items are consecutive steps.
std::vector<double> widths(const Order& order, const Wiring& wiring,
                           const std::vector<Item>& items) {
  std::vector<double> width;
  double now = 0;
  size_t k = 0;
  for (const Item& item : items) {
    for (size_t i = 0; i < item.size(); ++i, ++k) {
      for (int t = order.steps[k].touch_begin; t < order.steps[k].touch_end; ++t) {
        const Touch& touch = order.touches[t];
        if (touch.before != Role::kAbsent) now -= wiring.weight[touch.value];
        if (touch.after != Role::kAbsent) now += wiring.weight[touch.value];
      }
    }
    width.push_back(now);
  }
  return width;
}

// Orders the nodes of each cluster, all that is outside counting as still to come. Clusters of
// equal structure are ordered alike.
void order_clusters(const Problem& problem, const OrderOptions& options, StretchMemo* stretches,
                    std::vector<Item>* items) {
  std::vector<Item> nodes;
  for (size_t i = 0; i < problem.nodes.size(); ++i) nodes.push_back({static_cast<int>(i)});
  const Wiring wiring(problem, nodes);
  std::unordered_map<std::vector<int>, std::vector<int>, VectorHash> known;
  std::vector<int> key, local;
  for (Item& item : *items) {
    if (item.size() == 1) continue;
    key.clear();
    local.clear();
    for (int node : item) {
      key.push_back(problem.nodes[node].table);
      for (int at = wiring.begin[node]; at < wiring.begin[node + 1]; ++at) {
        const int value = wiring.list[at];
        auto it = std::find(local.begin(), local.end(), value);
        key.push_back(static_cast<int>(it - local.begin()));
        if (it == local.end()) local.push_back(value);
        key.push_back(wiring.uses[value]);
        key.push_back(static_cast<int>(wiring.made[value] | wiring.need[value]));
      }
    }
    const auto [it, fresh] = known.try_emplace(key);
    const Item before = item;
    if (fresh) {
      it->second =
          Greedy(wiring, options).improve(before, 0, static_cast<int>(before.size()), stretches);
    }
    for (size_t k = 0; k < before.size(); ++k) item[k] = before[it->second[k]];
  }
}

}  // namespace

Order make_order(const Problem& problem, const OrderOptions& options, StretchMemo* stretches) {
  validate(problem);
  std::vector<Item> items = folded_items(problem, options.clusters);
  order_clusters(problem, options, stretches, &items);
  const auto flat = [&] {
    std::vector<int> nodes;
    for (const Item& item : items) nodes.insert(nodes.end(), item.begin(), item.end());
    return nodes;
  };
  std::vector<int> shape;
  {
    const Wiring wiring(problem, items);
    const int count = static_cast<int>(items.size());
    std::vector<Repeat> repeats;
    if (options.repeats) {
      const std::vector<int> nodes = flat();
      const Wiring single(problem, singles(nodes));
      const Order base = steps_of(problem, nodes, single, &shape);
      find_repeats(item_shapes(items, base, shape), widths(base, single, items), 0, count,
                   &repeats);
    }
    std::vector<int> order(count), result;
    std::iota(order.begin(), order.end(), 0);
    Greedy greedy(wiring, options);
    const auto stretch = [&](int from, int to) {
      for (int k : greedy.improve(order, from, to, stretches)) result.push_back(from + k);
      for (int k = from; k < to; ++k) greedy.eliminate(k);
    };
    int at = 0;
    for (const Repeat& repeat : repeats) {
      stretch(at, repeat.begin);
      at = repeat.begin;
      // The first block may see a different past; the order of the second serves all.
      for (int k = 0; k < repeat.period; ++k) greedy.eliminate(at + k);
      const std::vector<int> block =
          greedy.improve(order, at + repeat.period, at + 2 * repeat.period, stretches);
      for (int r = 0; r < repeat.count; ++r, at += repeat.period) {
        for (int k : block) result.push_back(at + k);
        if (r > 0) {
          for (int k = 0; k < repeat.period; ++k) greedy.eliminate(at + k);
        }
      }
    }
    stretch(at, count);
    std::vector<Item> ordered;
    for (int k : result) ordered.push_back(std::move(items[k]));
    items = std::move(ordered);
  }
  const std::vector<int> nodes = flat();
  const std::vector<Item> single = singles(nodes);
  const Wiring wiring(problem, single);
  Order order = steps_of(problem, nodes, wiring, &shape);
  if (options.repeats) {
    find_repeats(shape, widths(order, wiring, single), 0, static_cast<int>(nodes.size()),
                 &order.repeats);
  }
  return order;
}

const Order& OrderMemo::of(const Problem& problem) {
  std::vector<int> key;
  for (const TableForms& table : forms_of_tables(problem)) {
    key.push_back(static_cast<int>(table.in.size()));
    key.push_back(static_cast<int>(table.out.size()));
    for (uint32_t forms : table.in) key.push_back(static_cast<int>(forms));
    for (uint32_t forms : table.out) key.push_back(static_cast<int>(forms));
  }
  key.push_back(-1);
  key.insert(key.end(), problem.value_table.begin(), problem.value_table.end());
  for (const ProblemNode& node : problem.nodes) {
    key.push_back(-2 - node.backward);
    key.push_back(node.table);
    key.insert(key.end(), node.inputs.begin(), node.inputs.end());
    key.push_back(-1);
    key.insert(key.end(), node.outputs.begin(), node.outputs.end());
  }
  std::unique_lock lock(mutex_);
  Entry& entry = orders_[std::move(key)];
  lock.unlock();
  std::call_once(entry.once, [&] { entry.order = make_order(problem, {}, &stretches_); });
  return entry.order;
}

}  // namespace motley::solver
