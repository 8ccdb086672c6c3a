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
// Clusters: a node without inputs (a parameter) is eliminated together with its users when they are
// near, and an update with the maker of its gradient. A cluster is one step: what is live inside it
// (a weight, its token, its gradient) never meets the rest of the frontier.
//
// Repeats: layers of a model show as a stretch of steps with equal option tables and equal relative
// wiring (each value named by how many steps ago it was touched, which also covers a mask that all
// layers share). One block is ordered and its order copied to all, so the repeats survive, and the
// search may solve a few blocks and skip the others.
//
// An order depends on tables and wiring, not on costs: it serves every solve of a problem whose
// costs change. Cost: O(restarts * window * steps outside repeats) plus O(all nodes log nodes).
#pragma once

#include <cstdint>
#include <vector>

#include "spmd/problem.h"

namespace motley::spmd {

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

// The elimination of a node, or of a cluster of nodes one by one.
struct Step {
  int node;                    // -1: a cluster
  int inner_begin, inner_end;  // of a cluster: its nodes, into Order::inner
  int touch_begin,
      touch_end;  // into Order::touches; distinct values, inner ones of clusters left out
  int kind;  // equal kinds: equal tables, form tables, roles, needs and wiring, within and without
};

// Steps [begin, begin + period * count) are `count` equal blocks.
struct Repeat {
  int begin, period, count;
};

struct Order {
  std::vector<Step> steps;
  std::vector<Step> inner;  // the nodes of clusters
  std::vector<Touch> touches;
  std::vector<Repeat> repeats;  // ascending, disjoint
  std::vector<uint32_t> made;   // [value] forms its producer may make
  int kinds = 0;                // of steps and inner steps together
};

struct OrderOptions {
  int window = 20;
  int restarts = 400;
  uint64_t seed = 0;
  bool repeats = true;   // look for repeated blocks
  bool clusters = true;  // make steps of clusters
};

Order make_order(const Problem& problem, const OrderOptions& options = {});

}  // namespace motley::spmd
