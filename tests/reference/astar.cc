#include "reference/astar.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <limits>
#include <map>
#include <queue>

#include "core/error.h"

namespace motley::solver {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Time so far: stages that are over, and compute of the open one.
struct Clock {
  double closed = 0;
  std::vector<double> open;  // [type]

  void synchronise(double comm) {
    closed += comm + *std::max_element(open.begin(), open.end());
    std::fill(open.begin(), open.end(), 0);
  }
  void run(const Option& option) {
    if (option.comm > 0) synchronise(option.comm);
    for (size_t j = 0; j < open.size(); ++j) open[j] += option.compute[j];
  }
  double total() const { return closed + *std::max_element(open.begin(), open.end()); }
};

struct Partial {
  std::vector<uint64_t> done;    // bit per node
  std::vector<uint16_t> forms;   // [value] available, less the redundant ones
  std::vector<uint64_t> talked;  // bit per value communicated; empty unless communicate_once
  Clock clock;                   // additive cost: all in `closed`
  double score = 0;
  int left = 0;  // nodes not executed
  int parent = -1;
  bool dead = false;
  std::vector<Instruction> last;  // what was added to the parent
};

bool has(const std::vector<uint64_t>& bits, int i) { return bits[i / 64] >> (i % 64) & 1; }
void add(std::vector<uint64_t>* bits, int i) { (*bits)[i / 64] |= uint64_t{1} << (i % 64); }

class AStar {
 public:
  AStar(const Problem& problem, const Weights& weights, const AStarOptions& options,
        const Limits& limits)
      : problem_(problem), weights_(weights), options_(options), limits_(limits) {
    const size_t values = problem.value_table.size(), nodes = problem.nodes.size();
    producer_.assign(values, -1);
    users_.resize(values);
    for (size_t i = 0; i < nodes; ++i) {
      for (int v : problem.nodes[i].outputs) producer_[v] = static_cast<int>(i);
      for (int v : problem.nodes[i].inputs) users_[v].push_back(static_cast<int>(i));
      const auto& list = problem.option_tables[problem.nodes[i].table].options;
      double price_least = kInf, mean_least = kInf;
      std::vector<double> compute_least(problem.types, kInf);
      for (const Option& option : list) {
        price_least = std::min(price_least, price(option, weights));
        double mean = option.comm;
        for (int j = 0; j < problem.types; ++j) {
          mean += weights.compute[j] * option.compute[j];
          compute_least[j] = std::min(compute_least[j], option.compute[j]);
        }
        mean_least = std::min(mean_least, mean);
      }
      price_least_.push_back(price_least);
      mean_least_.push_back(mean_least);
      compute_least_.push_back(compute_least);
    }
    source_.assign(nodes, 0);
    for (size_t i = 0; i < nodes && options.fuse_sources; ++i) {
      bool used = false;
      for (int v : problem.nodes[i].outputs) used |= !users_[v].empty();
      source_[i] = problem.nodes[i].inputs.empty() && used;
    }
    for (const FormTable& table : problem.form_tables) {
      reach_.emplace_back();
      for (int a = 0; a < table.forms; ++a) {
        uint32_t mask = 0;
        for (int b = 0; b < table.forms; ++b) {
          mask |= (complete_from_set(table, 1u << a, 1u << b) < kInf ? 1u : 0u) << b;
        }
        reach_.back().push_back(mask);
      }
    }
  }

  AStarResult run() {
    const double start = now_s();
    AStarResult result;
    Partial empty;
    empty.done.assign((problem_.nodes.size() + 63) / 64, 0);
    empty.forms.assign(problem_.value_table.size(), 0);
    if (options_.communicate_once) empty.talked.assign((empty.forms.size() + 63) / 64, 0);
    empty.clock.open.assign(problem_.types, 0);
    empty.left = static_cast<int>(problem_.nodes.size());
    push(std::move(empty));
    StopReason stop = StopReason::kOptimal;
    double bound = kInf;
    while (!queue_.empty()) {
      const auto [score, left, id] = queue_.top();
      if (score >= best_cost_) break;
      if (now_s() - start > limits_.time_limit_s) stop = StopReason::kTimeLimit;
      if (alive_ > limits_.max_states) stop = StopReason::kStateLimit;
      if (stop != StopReason::kOptimal) {
        bound = score;
        break;
      }
      queue_.pop();
      if (partials_[id].dead) continue;
      ++expanded_;
      expand(id);
    }
    Solution& solution = result.solution;
    solution.price = best_cost_;
    solution.lower_bound = std::min(bound, best_cost_);
    solution.states = expanded_;
    if (best_ >= 0) {
      for (int id = best_; id >= 0; id = partials_[id].parent) {
        const auto& last = partials_[id].last;
        result.program.insert(result.program.begin(), last.begin(), last.end());
      }
      solution.option.assign(problem_.nodes.size(), -1);
      for (const Instruction& i : result.program) {
        if (i.node >= 0) solution.option[i.node] = i.option;
        if (i.node < 0) solution.conversions.push_back(i.conversion);
      }
      std::stable_sort(solution.conversions.begin(), solution.conversions.end(),
                       [](const Conversion& a, const Conversion& b) { return a.value < b.value; });
      solution.stop = stop;
    } else {
      solution.stop = stop == StopReason::kOptimal ? StopReason::kInfeasible : stop;
    }
    solution.seconds = now_s() - start;
    return result;
  }

 private:
  const Option& option_of(int node, int option) const {
    return problem_.option_tables[problem_.nodes[node].table].options[option];
  }

  // Forms that nodes not yet executed may need of a value.
  uint32_t need(const Partial& q, int value) const {
    uint32_t mask = 0;
    for (int user : users_[value]) {
      if (has(q.done, user)) continue;
      const ProblemNode& node = problem_.nodes[user];
      for (const Option& option : problem_.option_tables[node.table].options) {
        for (size_t k = 0; k < node.inputs.size(); ++k) {
          if (node.inputs[k] == value) mask |= 1u << option.in[k];
        }
      }
    }
    return mask;
  }

  void append_node(Partial* q, int node, int option) const {
    const Option& o = option_of(node, option);
    add(&q->done, node);
    --q->left;
    for (size_t k = 0; k < o.out.size(); ++k) {
      q->forms[problem_.nodes[node].outputs[k]] = static_cast<uint16_t>(1u << o.out[k]);
    }
    if (options_.stages) {
      q->clock.run(o);
    } else {
      q->clock.closed += price(o, weights_);
    }
    q->last.push_back({node, option, {}});
  }

  void append_conversion(Partial* q, int value, int from, int to) const {
    const FormTable& table = problem_.form_tables[problem_.value_table[value]];
    const double cost = table.convert[from * table.forms + to];
    q->forms[value] = static_cast<uint16_t>(q->forms[value] | 1u << to);
    if (cost > 0 && options_.communicate_once) add(&q->talked, value);
    if (cost > 0 && options_.stages) {
      q->clock.synchronise(cost);
    } else {
      q->clock.closed += cost;
    }
    q->last.push_back({-1, 0, {value, static_cast<uint8_t>(from), static_cast<uint8_t>(to)}});
  }

  Partial child(int id) const {
    Partial q = partials_[id];
    q.parent = id;
    q.last.clear();
    return q;
  }

  void expand(int id) {
    for (int node = 0; node < static_cast<int>(problem_.nodes.size()); ++node) {
      if (has(partials_[id].done, node) || source_[node]) continue;
      const int options =
          static_cast<int>(problem_.option_tables[problem_.nodes[node].table].options.size());
      for (int o = 0; o < options; ++o) execute(child(id), node, o, 0);
    }
    for (int value = 0; value < static_cast<int>(problem_.value_table.size()); ++value) {
      const int from = producer_[value];
      if (has(partials_[id].done, from)) {
        convert(id, value, partials_[id].forms[value], -1);
      } else if (source_[from] && !options_.communicate_once) {
        const auto& list = problem_.option_tables[problem_.nodes[from].table].options;
        for (size_t o = 0; o < list.size(); ++o) {
          const ProblemNode& node = problem_.nodes[from];
          for (size_t k = 0; k < node.outputs.size(); ++k) {
            if (node.outputs[k] == value) {
              convert(id, value, 1u << list[o].out[k], static_cast<int>(o));
            }
          }
        }
      }
    }
  }

  // Executes a node whose inputs from `at` on are yet to be looked at, with sources fused.
  void execute(Partial q, int node, int o, size_t at) {
    const Option& option = option_of(node, o);
    const auto& inputs = problem_.nodes[node].inputs;
    for (; at < inputs.size(); ++at) {
      const int value = inputs[at], from = producer_[value];
      if (q.forms[value] >> option.in[at] & 1) continue;
      if (has(q.done, from) || !source_[from]) return;
      const auto& list = problem_.option_tables[problem_.nodes[from].table].options;
      for (size_t s = 0; s < list.size(); ++s) {
        Partial with = q;
        append_node(&with, from, static_cast<int>(s));
        if (with.forms[value] >> option.in[at] & 1) execute(std::move(with), node, o, at + 1);
      }
      return;
    }
    append_node(&q, node, o);
    push(std::move(q));
  }

  // All conversions of a value available as `forms`, after executing its source with option
  // `source_option` if that is not -1.
  void convert(int id, int value, uint32_t forms, int source_option) {
    const Partial& q = partials_[id];
    const int t = problem_.value_table[value];
    const FormTable& table = problem_.form_tables[t];
    const uint32_t wanted = need(q, value);
    if (forms == 0 || wanted == 0) return;
    const bool barred = options_.communicate_once &&
                        (has(q.talked, value) || problem_.nodes[producer_[value]].inputs.empty());
    for (int to = 0; to < table.forms; ++to) {
      if ((forms >> to & 1) != 0 || (reach_[t][to] & wanted) == 0) continue;
      int best = -1;
      for (uint32_t left = forms; left != 0; left &= left - 1) {
        const int from = std::countr_zero(left);
        const double cost = table.convert[from * table.forms + to];
        if (cost == kInf || (barred && cost > 0)) continue;
        if (best < 0 || cost < table.convert[best * table.forms + to]) best = from;
      }
      if (best < 0) continue;
      Partial next = child(id);
      if (source_option >= 0) append_node(&next, producer_[value], source_option);
      append_conversion(&next, value, best, to);
      push(std::move(next));
    }
  }

  double score(const Partial& q) const {
    double price_left = 0, mean = q.clock.closed;
    std::vector<double> finish(problem_.types);
    for (int j = 0; j < problem_.types; ++j) {
      finish[j] = q.clock.closed + q.clock.open[j];
      mean += weights_.compute[j] * q.clock.open[j];
    }
    for (size_t i = 0; i < problem_.nodes.size(); ++i) {
      if (has(q.done, static_cast<int>(i))) continue;
      price_left += price_least_[i];
      mean += mean_least_[i];
      for (int j = 0; j < problem_.types; ++j) finish[j] += compute_least_[i][j];
    }
    if (!options_.stages) return q.clock.closed + price_left;
    return std::max(mean, *std::max_element(finish.begin(), finish.end()));
  }

  // Whether `a` is at least as good as `b`. REQUIRES: the same nodes are executed.
  bool covers(const Partial& a, const Partial& b) const {
    for (int j = 0; j < problem_.types; ++j) {
      if (a.clock.closed + a.clock.open[j] > b.clock.closed + b.clock.open[j]) return false;
    }
    for (size_t v = 0; v < a.forms.size(); ++v) {
      if ((b.forms[v] & ~a.forms[v]) != 0) return false;
    }
    for (size_t w = 0; w < a.talked.size(); ++w) {
      if ((a.talked[w] & ~b.talked[w]) != 0) return false;
    }
    return true;
  }

  void push(Partial q) {
    q.score = score(q);
    if (!(q.score < best_cost_)) return;
    if (q.left == 0) {
      best_cost_ = options_.stages ? q.clock.total() : q.clock.closed;
      best_ = static_cast<int>(partials_.size());
      partials_.push_back(std::move(q));
      return;
    }
    if (options_.drop_redundant) {
      for (size_t v = 0; v < q.forms.size(); ++v) {
        if (q.forms[v] == 0) continue;
        const uint32_t wanted = need(q, static_cast<int>(v));
        for (uint32_t left = q.forms[v]; left != 0; left &= left - 1) {
          const int form = std::countr_zero(left);
          if ((reach_[problem_.value_table[v]][form] & wanted) == 0) {
            q.forms[v] = static_cast<uint16_t>(q.forms[v] & ~(1u << form));
          }
        }
      }
    }
    std::vector<Peer>& peers = by_done_[q.done];
    const int id = static_cast<int>(partials_.size());
    const Peer mine{q.clock.closed + q.clock.open[0], digest(q), id};
    for (const Peer& peer : peers) {
      if (peer.cost > mine.cost || (mine.digest & ~peer.digest) != 0) continue;
      if (covers(partials_[peer.id], q)) return;
    }
    size_t kept = 0;
    for (const Peer& peer : peers) {
      if (mine.cost <= peer.cost && (peer.digest & ~mine.digest) == 0 &&
          covers(q, partials_[peer.id])) {
        partials_[peer.id].dead = true;
        --alive_;
      } else {
        peers[kept++] = peer;
      }
    }
    peers.resize(kept);
    peers.push_back(mine);
    queue_.push({q.score, q.left, id});
    partials_.push_back(std::move(q));
    ++alive_;
  }

  // Of a partial program, to reject most pairs without looking at them.
  struct Peer {
    double cost;      // on type 0
    uint64_t digest;  // fewer properties, fewer bits
    int id;
  };

  static uint64_t digest(const Partial& q) {
    uint64_t bits = 0;
    for (size_t v = 0; v < q.forms.size(); ++v) {
      bits |= std::rotl(uint64_t{q.forms[v]}, static_cast<int>(5 * v % 64));
    }
    return bits;
  }

  const Problem& problem_;
  const Weights& weights_;
  const AStarOptions& options_;
  const Limits& limits_;
  std::vector<int> producer_;            // [value]
  std::vector<std::vector<int>> users_;  // [value] nodes
  std::vector<double> price_least_, mean_least_;
  std::vector<std::vector<double>> compute_least_;  // [node][type]
  std::vector<char> source_;                        // [node] executed only with its first user
  std::vector<std::vector<uint32_t>> reach_;        // [form table][form] forms it converts to

  using Entry = std::tuple<double, int, int>;  // score, nodes left, partial program
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> queue_;
  std::vector<Partial> partials_;
  std::map<std::vector<uint64_t>, std::vector<Peer>> by_done_;  // not dead, expanded ones included
  int64_t alive_ = 0, expanded_ = 0;
  double best_cost_ = kInf;
  int best_ = -1;
};

}  // namespace

double stage_seconds(const Problem& problem, const std::vector<Instruction>& program) {
  Clock clock;
  clock.open.assign(problem.types, 0);
  for (const Instruction& i : program) {
    if (i.node >= 0) {
      clock.run(problem.option_tables[problem.nodes[i.node].table].options[i.option]);
      continue;
    }
    const FormTable& table = problem.form_tables[problem.value_table[i.conversion.value]];
    const double cost = table.convert[i.conversion.from * table.forms + i.conversion.to];
    if (cost > 0) clock.synchronise(cost);
  }
  return clock.total();
}

AStarResult solve_astar(const Problem& problem, const Weights& weights, const AStarOptions& options,
                        const Limits& limits) {
  validate(problem);
  MOTLEY_CHECK(static_cast<int>(weights.compute.size()) == problem.types);
  return AStar(problem, weights, options, limits).run();
}

}  // namespace motley::solver
