// The order in which the folded search eliminates nodes, and what stays live between them.
//
// The folded search (folded.h) keeps one state per combination of forms of the *live* values: those
// some of whose nodes (producer, consumers) are eliminated and some not. A joint forward and
// backward graph in execution order keeps every saved activation live; folded at the loss, only a
// few tensors are live at each layer boundary, whatever the depth.
//
// Folded positions: a forward node keeps its index; a node without inputs sits at its first
// consumer; a backward node at the least position of its gradients or, if that is less, at the
// greatest forward use at or before it of a value it saved; a node without outputs (an optimizer
// update) with its gradient. From there a randomised greedy over a window of positions minimises
// the sum over steps of 2^(live width), a value counting log2(1 + its forms).
//
// Clusters: a node without inputs (a parameter) is eliminated right with its users when they are
// near, and an update with the maker of its gradient, so that what only they share (a weight, its
// token, its gradient) meets little of the rest of the frontier. The greedy moves whole clusters.
//
// Repeats: layers of a model show as a stretch of steps with equal option tables and equal relative
// wiring (each value named by how many steps ago it was touched, which also covers a mask that all
// layers share). One block is ordered and its order copied to all, so the repeats survive, and the
// search may solve a few blocks and skip the others.
//
// An order depends on tables and wiring, not on costs: it serves every solve of a problem whose
// costs change. Cost: O(restarts * window * steps outside repeats) plus O(all nodes log nodes).
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "solver/problem.h"

namespace motley::solver {

// What the search knows of a value between two steps.
enum class Role : uint8_t {
  kAbsent,  // untouched so far, or all its nodes are eliminated
  kHave,    // producer eliminated: the set of available forms
  kNeed,    // only consumers eliminated: the set of forms they required
};

// One value of one step.
struct Touch {
  int value;
  Role before, after;
  uint32_t need;  // forms that consumers yet to be eliminated may require
  int since;      // steps since the value was last touched; 0: this is the first time
};

// The elimination of a node.
struct OrderStep {
  int node;
  int touch_begin, touch_end;  // into Order::touches; distinct values
  int kind;                    // equal kinds: equal tables, form tables, roles, needs and wiring
};

// Steps [begin, begin + period * count) are `count` equal blocks.
struct Repeat {
  int begin, period, count;
};

struct Order {
  std::vector<OrderStep> steps;
  std::vector<Touch> touches;
  std::vector<Repeat> repeats;  // ascending, disjoint
  std::vector<uint32_t> made;   // [value] forms its producer may make
  int kinds = 0;
};

struct OrderOptions {
  int window = 20;
  int restarts = 400;
  int idle = 100;  // restarts in a row without a better sequence, after which there are no more
  uint64_t seed = 0;
  bool repeats = true;   // look for repeated blocks
  bool clusters = true;  // keep clusters together
};

// What the greedy made of stretches of items, by all that it looks at: blocks of different problems
// are often alike. Threads may share one, if their options are the same.
class StretchMemo {
 public:
  // The known sequence, or that of `improve`.
  std::vector<int> of(std::vector<int> key, const std::function<std::vector<int>()>& improve);
  int64_t reused() const { return reused_; }  // how many sequences were known

 private:
  std::mutex mutex_;
  std::map<std::vector<int>, std::vector<int>> known_;
  std::atomic<int64_t> reused_ = 0;
};

Order make_order(const Problem& problem, const OrderOptions& options = {},
                 StretchMemo* stretches = nullptr);

// Orders by what they depend on: problems with equal tables and wiring share one. Threads may.
class OrderMemo {
 public:
  // The reference stays valid.
  const Order& of(const Problem& problem);

 private:
  struct Entry {
    std::once_flag once;
    Order order;
  };
  std::mutex mutex_;
  std::map<std::vector<int>, Entry> orders_;
  StretchMemo stretches_;
};

}  // namespace motley::solver
