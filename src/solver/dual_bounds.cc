#include "solver/dual_bounds.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "core/error.h"
#include "core/infinity.h"

namespace motley::solver {
namespace {

constexpr int kMostForms = 9;   // that users of a value may need; beyond it has no lambda
constexpr int kMostUsers = 24;  // likewise

// [option table][slot] the forms that some option has there; of a table without options, nothing.
std::vector<std::vector<uint32_t>> forms_of_slots(const Problem& problem) {
  std::vector<std::vector<uint32_t>> forms(problem.option_tables.size());
  for (size_t t = 0; t < forms.size(); ++t) {
    for (const Option& option : problem.option_tables[t].options) {
      forms[t].resize(option.in.size() + option.out.size());
      for (size_t i = 0; i < option.in.size(); ++i) forms[t][i] |= 1u << option.in[i];
      for (size_t i = 0; i < option.out.size(); ++i) {
        forms[t][option.in.size() + i] |= 1u << option.out[i];
      }
    }
  }
  return forms;
}

}  // namespace

DualBounds::DualBounds(const Problem& problem, const Order& order, std::vector<FormSpace>* spaces,
                       const std::vector<std::vector<double>>& prices, SweepLimits sweeps,
                       std::vector<double>* warm)
    : sweeps_(sweeps), problem_(problem), order_(order), spaces_(*spaces), prices_(prices) {
  find_ports();
  sort_ports();
  freeze_wide();
  link_touches();
  share_lambda();
  if (warm->size() == lambda_.size()) lambda_ = *warm;
  big_ = 4 * most_expensive() + 1e-300;
  improve(chained());
  if (!folded_.empty()) improve(tied());
  *warm = lambda_;
  add_up();
  left_begin_.assign(order.touches.size(), -1);
}

// The ports of all nodes; each has a lambda of its own so far.
void DualBounds::find_ports() {
  node_begin_.assign(problem_.nodes.size() + 1, 0);
  for (size_t n = 0; n < problem_.nodes.size(); ++n) {
    const ProblemNode& node = problem_.nodes[n];
    node_begin_[n + 1] =
        node_begin_[n] + static_cast<int>(node.inputs.size() + node.outputs.size());
  }
  ports_.resize(node_begin_.back());
  const std::vector<std::vector<uint32_t>> forms = forms_of_slots(problem_);
  for (int k = 0; k < static_cast<int>(order_.steps.size()); ++k) {
    const int n = order_.steps[k].node;
    const ProblemNode& node = problem_.nodes[n];
    const int inputs = static_cast<int>(node.inputs.size());
    for (int slot = 0; slot < node_begin_[n + 1] - node_begin_[n]; ++slot) {
      const int port = node_begin_[n] + slot;
      const bool made = slot >= inputs;
      const int value = made ? node.outputs[slot - inputs] : node.inputs[slot];
      const uint32_t mask = forms[node.table].empty() ? 0 : forms[node.table][slot];
      ports_[port] = {n, value, k, slot, made, mask, port, 0};
    }
  }
}

// By value, and then by step.
void DualBounds::sort_ports() {
  value_begin_.assign(problem_.value_table.size() + 1, 0);
  for (const Port& port : ports_) ++value_begin_[port.value + 1];
  std::partial_sum(value_begin_.begin(), value_begin_.end(), value_begin_.begin());
  value_ports_.resize(ports_.size());
  std::vector<int> end(value_begin_.begin(), value_begin_.end() - 1);
  for (const OrderStep& step : order_.steps) {
    for (int port = node_begin_[step.node]; port < node_begin_[step.node + 1]; ++port) {
      value_ports_[end[ports_[port].value]++] = port;
    }
  }
}

// Values of more forms or users than sweeps can handle.
void DualBounds::freeze_wide() {
  const size_t values = problem_.value_table.size();
  frozen_.assign(values, 0);
  wide_.assign(values, 0);
  for (size_t v = 0; v < values; ++v) {
    uint32_t need = 0;
    for (int port : ports_of(v)) need |= ports_[port].made ? 0 : ports_[port].forms;
    if (std::popcount(need) > kMostForms) wide_[v] = 1;
    if (wide_[v] || ports_of(v).size() > kMostUsers) frozen_[v] = 1;
  }
}

void DualBounds::link_touches() {
  touch_before_.assign(order_.touches.size(), -1);
  std::vector<int> latest(problem_.value_table.size(), -1);
  for (size_t t = 0; t < order_.touches.size(); ++t) {
    touch_before_[t] = latest[order_.touches[t].value];
    latest[order_.touches[t].value] = static_cast<int>(t);
  }
}

// Gives the blocks in the middle of repeats the same lambda, and all lambda its rows.
void DualBounds::share_lambda() {
  const int steps = static_cast<int>(order_.steps.size());
  step_like_.resize(steps);
  std::iota(step_like_.begin(), step_like_.end(), 0);
  for (const Repeat& repeat : order_.repeats) fold(repeat);
  for (int k = 0; k < steps; ++k) {
    if (step_like_[k] == k) continue;
    const int n = order_.steps[k].node, like = order_.steps[step_like_[k]].node;
    for (int slot = 0; slot < node_begin_[n + 1] - node_begin_[n]; ++slot) {
      ports_[node_begin_[n] + slot].like = node_begin_[like] + slot;
    }
  }
  int rows = 0;
  for (size_t port = 0; port < ports_.size(); ++port) {
    if (ports_[port].like == static_cast<int>(port)) ports_[port].row = rows++;
  }
  for (Port& port : ports_) port.row = ports_[port.like].row;
  lambda_.assign(static_cast<size_t>(rows) * kMaxForms, 0);
}

// The price of all nodes at their worst, or of the worst conversion if that is more.
double DualBounds::most_expensive() const {
  double sum = 0;
  for (const OrderStep& step : order_.steps) {
    double most = 0;
    for (double price : prices_[problem_.nodes[step.node].table]) {
      if (price < kInfinity) most = std::max(most, price);
    }
    sum += most;
  }
  for (const FormTable& table : problem_.form_tables) {
    for (double cost : table.convert) {
      if (cost < kInfinity) sum = std::max(sum, cost);
    }
  }
  return sum;
}

// The leasts of all nodes and values, and the bound that they make up.
void DualBounds::add_up() {
  node_least_.resize(problem_.nodes.size());
  bound_ = 0;
  for (int k = 0; k < static_cast<int>(order_.steps.size()); ++k) {
    const int n = order_.steps[k].node;
    node_least_[n] =
        step_like_[k] == k ? option_costs(n) : node_least_[order_.steps[step_like_[k]].node];
    bound_ += node_least_[n];
  }
  const size_t values = problem_.value_table.size();
  value_least_.resize(values);
  for (size_t v = 0; v < values; ++v) {
    const size_t other = value_like(v);
    value_least_[v] = other < v ? value_least_[other] : least(static_cast<int>(v), 0, true, 0);
    bound_ += value_least_[v];
  }
}

// An earlier value whose least this one has, as their ports have the same lambda, port by port; the
// value itself if there is none.
size_t DualBounds::value_like(size_t v) const {
  const auto list = ports_of(v);
  if (list.empty()) return v;
  const size_t other = ports_[ports_[list[0]].like].value;
  const auto others = ports_of(other);
  if (other >= v || list.size() != others.size() || frozen_[v] != frozen_[other] ||
      problem_.value_table[v] != problem_.value_table[other]) {
    return v;
  }
  for (size_t i = 0; i < list.size(); ++i) {
    if (ports_[list[i]].like != ports_[others[i]].like) return v;
  }
  return other;
}

void DualBounds::Sweeps::join(const Port& at, int port, int value) {
  auto& list = ports[value];
  list.insert(at.made ? list.begin() : list.end(), port);
  first[value] = std::min(first[value], at.step);
  last[value] = std::max(last[value], at.step);
  value_of[port] = value;
}

const DualBounds::Wants& DualBounds::wants(uint32_t all, size_t users) {
  const size_t most = std::min<size_t>(users, std::popcount(all));
  const auto [it, fresh] = wants_.try_emplace({all, most});
  Wants& wants = it->second;
  if (!fresh) return wants;
  for (uint32_t want = 0;; want = (want - all) & all) {
    if (static_cast<size_t>(std::popcount(want)) <= most) {
      const auto rest = std::lower_bound(wants.set.begin(), wants.set.end(), want & (want - 1));
      wants.rest.push_back(static_cast<int>(rest - wants.set.begin()));
      wants.least.push_back(want == 0 ? 0 : std::countr_zero(want));
      wants.set.push_back(want);
    }
    if (want == all) break;
  }
  return wants;
}

void DualBounds::find_wants(Sweeps* graph) {
  graph->wants.assign(graph->ports.size(), nullptr);
  for (size_t v = 0; v < graph->ports.size(); ++v) {
    const auto& list = graph->ports[v];
    if (list.empty()) continue;
    uint32_t all = 0;
    for (size_t c = 1; c < list.size(); ++c) all |= ports_[list[c]].forms;
    graph->wants[v] = &wants(all, list.size() - 1);
  }
}

// Leaves one block of the middle of a repeat in the graph of the sweeps.
void DualBounds::fold(const Repeat& r) {
  const int middle = r.count - 2 * kEndBlocks;
  if (middle < 3) return;
  folded_.push_back(r);
  const int first = r.begin + kEndBlocks * r.period;  // the middle
  const int last = first + (middle - 1) * r.period;
  const auto block = [&](int step) { return (step - r.begin + r.period) / r.period - 1; };
  for (int k = first + r.period; k < last + r.period; ++k) {
    step_like_[k] = first + (k - first) % r.period;
  }
  for (size_t v = 0; v < frozen_.size(); ++v) {
    const auto list = ports_of(v);
    if (list.empty()) continue;
    const int from = ports_[list.front()].step, to = ports_[list.back()].step;
    const bool touched = std::any_of(list.begin(), list.end(), [&](int port) {
      return ports_[port].step >= first && ports_[port].step < last + r.period;
    });
    if (!touched) continue;
    if (from < r.begin || to >= r.begin + r.count * r.period || block(to) - block(from) > 1) {
      frozen_[v] = 1;
    }
  }
}

// The graph with one block in the middle of every repeat: what is live at the end of the last block
// of the middle is what is live at the end of the one that stays.
DualBounds::Sweeps DualBounds::chained() {
  Sweeps graph(frozen_.size(), ports_.size());
  std::vector<int> merged(frozen_.size());
  std::iota(merged.begin(), merged.end(), 0);
  for (const Repeat& r : folded_) {
    const int first = r.begin + kEndBlocks * r.period;
    const int last = first + (r.count - 2 * kEndBlocks - 1) * r.period;
    for (int k = first; k < first + r.period; ++k) {
      const OrderStep &here = order_.steps[k], &there = order_.steps[k + last - first];
      for (int i = 0; i < here.touch_end - here.touch_begin; ++i) {
        const int a = order_.touches[here.touch_begin + i].value;
        const int b = order_.touches[there.touch_begin + i].value;
        if (ports_[ports_of(b).back()].step >= last + r.period) merged[b] = a;
      }
    }
  }
  for (size_t k = 0; k < order_.steps.size(); ++k) {
    if (step_like_[k] != static_cast<int>(k)) continue;
    const int n = order_.steps[k].node;
    graph.nodes.push_back({n, 1});
    for (int port = node_begin_[n]; port < node_begin_[n + 1]; ++port) {
      const int value = merged[ports_[port].value];
      if (!frozen_[value]) graph.join(ports_[port], port, value);
    }
  }
  for (size_t v = 0; v < frozen_.size(); ++v) {
    if (!graph.ports[v].empty()) graph.values.push_back({static_cast<int>(v), 1});
  }
  find_wants(&graph);
  return graph;
}

// The whole graph; of the blocks in the middle of a repeat, which all have the same lambda, one is
// visited and counts for all.
DualBounds::Sweeps DualBounds::tied() {
  Sweeps graph(frozen_.size(), ports_.size());
  std::vector<double> weight(order_.steps.size(), 1), begun = weight;
  for (const Repeat& r : folded_) {
    const int middle = r.count - 2 * kEndBlocks;
    const int first = r.begin + kEndBlocks * r.period, last = first + (middle - 1) * r.period;
    for (int k = first; k < last + r.period; ++k) {
      const bool visited = k >= first + r.period && k < first + 2 * r.period;
      weight[k] = visited ? middle : 0;
      if (k < last) begun[k] = visited ? middle - 1 : 0;
    }
  }
  for (size_t k = 0; k < order_.steps.size(); ++k) {
    const int n = order_.steps[k].node;
    if (weight[k] > 0) graph.nodes.push_back({n, weight[k]});
  }
  for (size_t v = 0; v < frozen_.size(); ++v) {
    if (frozen_[v]) continue;
    const auto list = ports_of(v);
    const double times = begun[ports_[list.front()].step];
    const bool swept = times > 0 || std::any_of(list.begin(), list.end(), [&](int port) {
                         return weight[ports_[port].step] > 0;
                       });
    if (!swept) continue;
    for (int port : list) graph.join(ports_[port], port, static_cast<int>(v));
    if (times > 0) graph.values.push_back({static_cast<int>(v), times});
  }
  find_wants(&graph);
  return graph;
}

// Sweeps until the bound no longer rises; leaves the best lambda.
void DualBounds::improve(const Sweeps& graph) {
  memos_.assign(graph.ports.size(), {});
  versions_.assign(lambda_.size() / kMaxForms, 1);
  double most = total(graph);
  std::vector<double> best = lambda_;
  for (int i = 0, idle = 0; i < sweeps_.most && idle < sweeps_.idle; ++i, ++idle) {
    sweeps_.deadline.check(static_cast<int64_t>(graph.nodes.size()));
    for (size_t k = 0; k < graph.nodes.size(); ++k) visit(graph, graph.nodes[k].first, true);
    for (size_t k = graph.nodes.size(); k-- > 0;) visit(graph, graph.nodes[k].first, false);
    const double now = total(graph);
    if (now > most + sweeps_.progress * std::abs(now)) idle = -1;
    if (now > most) {
      most = now;
      best = lambda_;
    }
  }
  lambda_ = std::move(best);
  memos_.clear();
}

// What a user gives for each set of forms, as long as its lambda is what it was.
const double* DualBounds::given_by_user(const Sweeps& graph, int value, size_t user) {
  const int port = graph.ports[value][user];
  const Wants& wants = *graph.wants[value];
  Memo& memo = memos_[value];
  double* most = &memo.most[(user - 1) * wants.set.size()];
  if (memo.seen[user] == versions_[ports_[port].row]) return most;
  memo.seen[user] = versions_[ports_[port].row];
  double price[kMaxForms];
  std::fill(price, price + kMaxForms, -kInfinity);
  for (uint32_t w = ports_[port].forms; w != 0; w &= w - 1) {
    price[std::countr_zero(w)] = lambda(port)[std::countr_zero(w)];
  }
  most[0] = -kInfinity;
  for (size_t i = 1; i < wants.set.size(); ++i) {
    most[i] = std::max(most[wants.rest[i]], price[wants.least[i]]);
  }
  return most;
}

// least[f]: over the sets of forms the users may have; `port` is fixed at f.
void DualBounds::marginal(const Sweeps& graph, int value, int port, double* result) {
  const auto& list = graph.ports[value];
  FormSpace& space = spaces_[problem_.value_table[value]];
  std::fill(result, result + kMaxForms, kInfinity);
  const int producer = list[0];
  const int forms = space.forms();
  const Wants& wants = *graph.wants[value];
  const size_t sets = wants.set.size();
  Memo& memo = memos_[value];
  if (memo.seen.empty()) {
    memo.seen.resize(list.size(), 0);
    memo.most.resize((list.size() - 1) * sets);
    memo.cheapest.resize(sets);
    memo.given.resize(forms);
    memo.made.resize(forms);
  }
  if (port == producer) {
    int64_t users = 0;  // versions only grow
    for (size_t c = 1; c < list.size(); ++c) users += versions_[ports_[list[c]].row];
    if (std::exchange(memo.users, users) == users) {
      std::copy(memo.made.begin(), memo.made.end(), result);
      return;
    }
  }
  sums_.assign(sets, 0);  // of what the others give for a set
  for (size_t c = 1; c < list.size(); ++c) {
    if (list[c] == port) continue;
    const double* most = given_by_user(graph, value, c);
    for (size_t i = 0; i < sets; ++i) sums_[i] -= most[i];
  }
  if (port == producer) {
    for (size_t i = 0; i < sets; ++i) {
      const double sum = sums_[i];
      if (!(sum < kInfinity)) continue;
      const double* cost = space.from_each(wants.set[i]);
      for (int f = 0; f < forms; ++f) result[f] = std::min(result[f], sum + cost[f]);
    }
    std::copy(result, result + forms, memo.made.begin());
    return;
  }
  if (memo.seen[0] != versions_[ports_[producer].row]) {
    memo.seen[0] = versions_[ports_[producer].row];
    std::fill(memo.cheapest.begin(), memo.cheapest.end(), std::numeric_limits<double>::quiet_NaN());
    std::fill(memo.given.begin(), memo.given.end(), -kInfinity);
    for (uint32_t m = ports_[producer].forms; m != 0; m &= m - 1) {
      memo.given[std::countr_zero(m)] = lambda(producer)[std::countr_zero(m)];
    }
  }
  for (size_t i = 0; i < sets; ++i) {
    const uint32_t own = wants.set[i] & ports_[port].forms;
    if (own == 0 || !(sums_[i] < kInfinity)) continue;
    double& cheapest = memo.cheapest[i];
    if (std::isnan(cheapest)) {
      const double *cost = space.from_each(wants.set[i]), *given = memo.given.data();
      double even = kInfinity, odd = kInfinity;  // two chains, at the same time
      int form = 0;
      for (; form + 1 < forms; form += 2) {
        even = std::min(even, cost[form] - given[form]);
        odd = std::min(odd, cost[form + 1] - given[form + 1]);
      }
      if (form < forms) even = std::min(even, cost[form] - given[form]);
      cheapest = std::min(even, odd);
    }
    const double all = cheapest + sums_[i];
    for (uint32_t w = own; w != 0; w &= w - 1) {
      const int f = std::countr_zero(w);
      result[f] = std::min(result[f], all);
    }
  }
}

// The least of a value whose ports from the `from`-th on are open: with the producer among them,
// `set` is required already; otherwise it is available.
double DualBounds::least(int value, size_t from, bool open, uint32_t set) {
  if (wide_[value]) return 0;
  FormSpace& space = spaces_[problem_.value_table[value]];
  const auto list = ports_of(value);
  int producer = -1;
  uint32_t all = 0;
  auto& users = users_;
  users.clear();
  for (size_t i = from; i < list.size(); ++i) {
    const Port& port = ports_[list[i]];
    if (port.made) {
      producer = list[i];
      continue;
    }
    const std::pair<uint32_t, const double*> user{port.forms, lambda(list[i])};
    // Without lambda only the forms count.
    if (frozen_[value] && std::any_of(users.begin(), users.end(),
                                      [&](const auto& u) { return u.first == user.first; })) {
      continue;
    }
    users.push_back(user);
    all |= port.forms;
  }
  MOTLEY_CHECK(open == (producer >= 0));
  double result = kInfinity;
  for (const uint32_t want : wants(all, users.size()).set) {
    double sum = 0;
    for (const auto& [forms, price] : users) {
      double best = -kInfinity;
      for (uint32_t w = want & forms; w != 0; w &= w - 1) {
        best = std::max(best, price[std::countr_zero(w)]);
      }
      sum -= best;
    }
    if (!(sum < kInfinity)) continue;
    if (!open) {
      result = std::min(result, sum + space.steiner(set, want));
      continue;
    }
    const double* mu = lambda(producer);
    const double* cost = space.from_each(want | set);
    for (uint32_t m = ports_[producer].forms; m != 0; m &= m - 1) {
      const int f = std::countr_zero(m);
      result = std::min(result, sum + cost[f] - mu[f]);
    }
  }
  return result;
}

double DualBounds::left(int t, uint32_t set) {
  const Touch& touch = order_.touches[t];
  double* memo;
  if (left_begin_[t] >= 0) {
    memo = &left_[left_begin_[t] + set];
  } else if (const int forms = problem_.form_tables[problem_.value_table[touch.value]].forms;
             forms <= kMostForms) {
    left_begin_[t] = static_cast<int>(left_.size());
    left_.resize(left_.size() + (size_t{1} << forms), std::numeric_limits<double>::quiet_NaN());
    memo = &left_[left_begin_[t] + set];
  } else {
    const uint64_t key = static_cast<uint64_t>(t) << 32 | set;
    memo = &left_wide_.try_emplace(key, std::numeric_limits<double>::quiet_NaN()).first->second;
  }
  if (std::isnan(*memo)) {
    const auto step = std::upper_bound(order_.steps.begin(), order_.steps.end(), t,
                                       [](int x, const OrderStep& s) { return x < s.touch_end; });
    const int k = static_cast<int>(step - order_.steps.begin());
    const auto list = ports_of(touch.value);
    const auto open =
        std::find_if(list.begin(), list.end(), [&](int port) { return ports_[port].step > k; });
    *memo = least(touch.value, static_cast<size_t>(open - list.begin()), touch.after == Role::kNeed,
                  set);
  }
  return *memo;
}

// Prices of the node's options with lambda, into scratch_; returns their least.
double DualBounds::option_costs(int n) {
  const ProblemNode& node = problem_.nodes[n];
  const auto& options = problem_.option_tables[node.table].options;
  scratch_ = prices_[node.table];
  const size_t inputs = node.inputs.size();
  double best = kInfinity;
  for (size_t o = 0; o < options.size(); ++o) {
    for (size_t i = 0; i < inputs; ++i) {
      scratch_[o] += lambda(node_begin_[n] + static_cast<int>(i))[options[o].in[i]];
    }
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      scratch_[o] += lambda(node_begin_[n] + static_cast<int>(inputs + i))[options[o].out[i]];
    }
    best = std::min(best, scratch_[o]);
  }
  return best;
}

// Takes the slack of all its values to a node and gives what it finds to those ahead.
void DualBounds::visit(const Sweeps& graph, int n, bool forward) {
  const ProblemNode& node = problem_.nodes[n];
  const auto& options = problem_.option_tables[node.table].options;
  double result[kMaxForms];
  int ahead = 0, behind = 0;
  const auto is_ahead = [&](int port) {
    const int value = graph.value_of[port];
    return forward ? graph.last[value] > ports_[port].step : graph.first[value] < ports_[port].step;
  };
  for (int port = node_begin_[n]; port < node_begin_[n + 1]; ++port) {
    if (frozen_[ports_[port].value]) continue;
    const int value = graph.value_of[port];
    marginal(graph, value, port, result);
    for (uint32_t m = ports_[port].forms; m != 0; m &= m - 1) {
      const int f = std::countr_zero(m);
      lambda(port)[f] = std::clamp(result[f], -big_, big_);
    }
    ++versions_[ports_[port].row];
    ++(is_ahead(port) ? ahead : behind);
  }
  if (ahead == 0) return;
  option_costs(n);
  const double share = 1.0 / std::max(ahead, behind);
  const size_t inputs = node.inputs.size();
  for (int port = node_begin_[n]; port < node_begin_[n + 1]; ++port) {
    if (frozen_[ports_[port].value] || !is_ahead(port)) continue;
    std::fill(result, result + kMaxForms, kInfinity);
    const size_t slot = ports_[port].slot;
    for (size_t o = 0; o < options.size(); ++o) {
      const int f = slot < inputs ? options[o].in[slot] : options[o].out[slot - inputs];
      result[f] = std::min(result[f], scratch_[o]);
    }
    for (uint32_t m = ports_[port].forms; m != 0; m &= m - 1) {
      const int f = std::countr_zero(m);
      double& price = lambda(port)[f];
      price = std::clamp(price - share * std::clamp(result[f], -big_, big_), -big_, big_);
    }
    ++versions_[ports_[port].row];
  }
}

double DualBounds::total(const Sweeps& graph) {
  double sum = 0;
  for (const auto& [node, times] : graph.nodes) sum += times * option_costs(node);
  double result[kMaxForms];
  for (const auto& [value, times] : graph.values) {
    const int producer = graph.ports[value][0];
    marginal(graph, value, producer, result);
    double best = kInfinity;
    for (uint32_t m = ports_[producer].forms; m != 0; m &= m - 1) {
      const int f = std::countr_zero(m);
      best = std::min(best, result[f] - lambda(producer)[f]);
    }
    sum += times * best;
  }
  return sum;
}

}  // namespace motley::solver
