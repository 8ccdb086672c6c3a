// Lower bounds for the folded search: a split of the problem into single nodes and single values.
//
// A *port* is one use of a value by a node. For any prices lambda[port][form],
//
//     sum over nodes of   min over options ( price + lambda of its forms )
//   + sum over values of  min over forms made and sets W of forms available in the end
//                         ( conversions - lambda of the producer - sum of users' best lambda in W )
//
// is a lower bound of every solution's price: a solution pays each lambda once and gets it back.
// The same split bounds what is left of a partial solution, value by value (left()).
//
// Sweeps along the elimination order and back move slack from factor to factor (sequential message
// passing). On a chain one sweep is exact; on captured transformers three to ten reach the optimum.
//
// Repeats: lambda is equal in all blocks of a repeat but the first two and the last two; the sweeps
// run on a graph with one such block in the middle. Values that more than two adjacent blocks touch
// have lambda 0. So the bound of a frontier at a block boundary does not depend on which block it
// is, and depth costs nothing.
//
// Cost: O(sweeps * ports * (options + sets of forms a value's users may need)).
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "solver/forms.h"
#include "solver/order.h"
#include "solver/problem.h"

namespace motley::solver {

// Blocks at the end of a repeat, and at its beginning, whose lambda is their own.
constexpr int kEndBlocks = 2;

// Sweeps end after `idle` of them in a row that gain less than `progress` of the bound, and after
// `most`.
struct SweepLimits {
  double progress;
  int idle, most;
  Deadline deadline = {};
};

class DualBounds {
 public:
  DualBounds(const Problem& problem, const Order& order, std::vector<FormSpace>* spaces,
             const std::vector<std::vector<double>>& prices, SweepLimits sweeps,
             std::vector<double>* warm);

  // Least over options of the node's price with lambda.
  double node_least(int node) const { return node_least_[node]; }
  // With the forms of all its ports open.
  double value_least(int value) const { return value_least_[value]; }
  // Least of what a value may still cost after the step of touch `t` left it with `set`.
  double left(int t, uint32_t set);
  // The touch of the same value before this one, -1: none.
  int touch_before(int t) const { return touch_before_[t]; }
  // All leasts together.
  double bound() const { return bound_; }

 private:
  struct Port {
    int node, value, step;
    int slot;  // among the node's inputs and then outputs
    bool made;
    uint32_t forms;  // that some option of the node has here
    int like;        // the port whose lambda it has
    int row;         // of lambda_
  };

  double* lambda(int port) { return &lambda_[static_cast<size_t>(ports_[port].row) * kMaxForms]; }
  std::span<const int> ports_of(size_t value) const {
    return {value_ports_.data() + value_begin_[value],
            static_cast<size_t>(value_begin_[value + 1] - value_begin_[value])};
  }
  const SweepLimits sweeps_;
  // Sets of forms that users of a value may need, smaller numbers first: `rest` is the index of the
  // set without its least form, `least`.
  struct Wants {
    std::vector<uint32_t> set;
    std::vector<int> rest, least;
  };
  // A graph to sweep over, with the number of times that its factors count.
  struct Sweeps {
    Sweeps(size_t value_count, size_t port_count)
        : ports(value_count),
          first(value_count, std::numeric_limits<int>::max()),
          last(value_count, -1),
          value_of(port_count, -1) {}
    void join(const Port& at, int port, int value);
    std::vector<std::pair<int, double>> nodes, values;
    std::vector<std::vector<int>> ports;  // [value] producer first
    std::vector<int> first, last;         // [value] steps of its first and last port
    std::vector<int> value_of;            // [port]
    std::vector<const Wants*> wants;      // [value] see wants()
  };

  void find_ports();
  void sort_ports();
  void freeze_wide();
  void link_touches();
  void share_lambda();
  double most_expensive() const;
  void add_up();
  size_t value_like(size_t value) const;
  // The sets out of `all` that some `users` forms make up; with the empty one.
  const Wants& wants(uint32_t all, size_t users);
  void fold(const Repeat& repeat);
  Sweeps chained();
  Sweeps tied();
  void find_wants(Sweeps* graph);
  void improve(const Sweeps& graph);
  void visit(const Sweeps& graph, int node, bool forward);
  double option_costs(int node);
  double total(const Sweeps& graph);
  const double* given_by_user(const Sweeps& graph, int value, size_t user);
  // Least cost of a value by the form of one of its ports, lambda of that port left out.
  void marginal(const Sweeps& graph, int value, int port, double* least);
  double least(int value, size_t from, bool open, uint32_t set);

  const Problem& problem_;
  const Order& order_;
  std::vector<FormSpace>& spaces_;
  const std::vector<std::vector<double>>& prices_;

  std::vector<Port> ports_;
  std::vector<int> node_begin_;                 // [node] first port
  std::vector<int> value_begin_, value_ports_;  // [value] first of its ports; by step
  std::vector<char> frozen_;                    // [value] lambda is 0
  std::vector<char> wide_;                      // [value] too many forms: its cost is bounded by 0
  std::vector<int> step_like_;                  // [step] that its lambda comes from
  std::vector<int> touch_before_;               // [touch]

  std::vector<Repeat> folded_;  // with one lambda in the middle

  std::vector<double> lambda_;  // [row][form]; ports that are alike share a row
  double big_ = 1;              // in place of infinity
  std::vector<double> node_least_, value_least_, scratch_;
  std::vector<std::pair<uint32_t, const double*>> users_;  // of least()
  std::map<std::pair<uint32_t, size_t>, Wants> wants_;
  std::vector<double> sums_;  // of marginal()
  // Of marginal(), as long as lambda is what it was.
  struct Memo {
    std::vector<int64_t> seen;     // [port of the value] version of its lambda, below
    std::vector<double> most;      // [user][set] what it gives for one of the forms
    std::vector<double> given;     // [form] to the producer
    std::vector<double> cheapest;  // [set] way from the producer to it; NaN: not known yet
    int64_t users = -1;            // sum of their versions, at `made`
    std::vector<double> made;      // [form] the producer's result
  };
  std::vector<Memo> memos_;        // [value], while sweeps go on
  std::vector<int64_t> versions_;  // [row] of lambda
  double bound_ = 0;
  std::vector<int> left_begin_;                     // [touch] into left_, -1: nothing known yet
  std::vector<double> left_;                        // [set] from there; NaN: not known yet
  std::unordered_map<uint64_t, double> left_wide_;  // touch and set, for values of many forms
};

}  // namespace motley::solver
