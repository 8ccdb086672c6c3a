// Searches for the programs of layers and stages: what all have in common, and what they leave to
// one another.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cost/cost.h"
#include "planner/alternation.h"
#include "planner/options.h"
#include "shard/program.h"
#include "solver/folded.h"
#include "solver/order.h"

namespace motley::planner {

// What searches leave to like ones of micro-batches of another size: orders, and for layers where
// to begin, as those on the same group of devices left it, or on any.
struct SearchCache {
  solver::OrderMemo orders;
  std::map<std::tuple<int, bool, int>, solver::WarmStart> on_group;  // window, lean, group
  std::map<std::pair<int, bool>, solver::WarmStart> on_any;
};

// A program, ordered by phases, and the shares of devices.
struct Planned {
  bool feasible = false;
  std::string reason;
  Bytes excess = 0;   // as of Alternation
  bool slow = false;  // likewise
  Program program;
  std::vector<double> ratios;
  bool in_pieces = false;  // parameters are held whole no longer than they are used (hold_pieces)
  int blocks_again = 0;    // of its graph, whose activations the program computes again
  bool all_again = false;  // its forward passes run again as a whole (StagePlan::recompute)
  bool again() const { return blocks_again > 0 || all_again; }
  // Of the program once a micro-batch, nothing divided among replicas; null: nobody asked yet.
  std::shared_ptr<const MemoryCost> memory;
};

class ProgramSearch {
 public:
  // `request` and `cache` outlive this; null: none that others had.
  ProgramSearch(const PlanOptions& request, SearchCache* cache);

  // Those of all searches. `warm`: where it begins, in, and ends, out; may be null.
  AlternationOptions options(int micro_batches, solver::WarmStart* warm);

  // Threads may search at the same time. `memory_price`, unless null: of a like problem, in; of
  // this one, out.
  Planned find(const Theory& theory, const CostModel& model, AlternationOptions options,
               double* memory_price = nullptr);

  SearchCache& cache() { return cache_; }
  int count() const { return count_; }  // of searches

 private:
  const Optimizer optimizer_;
  const PlanOptions& request_;
  SearchCache own_cache_;
  SearchCache& cache_;
  std::atomic<int> count_ = 0;
};

}  // namespace motley::planner
