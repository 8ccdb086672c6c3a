// The randomised greedy of order.h: better sequences of items, each one node or a cluster of nodes
// that are eliminated together.
//
// A sequence costs the sum over its items of 2^(width of the values that are live behind the item).
// The greedy takes the item of least change of width among those of a window, with some noise. What
// an item changes is kept, and worked out anew where an item that was taken shares a value with it.
// Cost: O(restarts * items * (window + values of an item)), and what is worked out anew.
#pragma once

#include <cstdint>
#include <vector>

#include "core/rng.h"
#include "solver/order.h"

namespace motley::solver {

// Forms that a table's options make and require, per output and input.
struct TableForms {
  std::vector<uint32_t> in, out;
};
std::vector<TableForms> forms_of_tables(const Problem& problem);

// Nodes that are eliminated in one step.
using Item = std::vector<int>;

// The distinct values of every item, in order of appearance, and the weight of every value. Values
// that live within a cluster are left out.
struct Wiring {
  Wiring(const Problem& problem, const std::vector<Item>& items);

  std::vector<int> begin, list;  // values of item i: list[begin[i] .. begin[i + 1])
  std::vector<uint32_t> made, need;
  std::vector<int> uses;  // [value] items that touch it
  std::vector<double> weight;
};

// Improves sequences of items, of which some have been eliminated already.
class Greedy {
 public:
  // Both outlive this.
  Greedy(const Wiring& wiring, const OrderOptions& options)
      : wiring_(wiring), options_(options), left_(wiring.uses) {}

  void eliminate(int item) {
    for (int at = wiring_.begin[item]; at < wiring_.begin[item + 1]; ++at)
      --left_[wiring_.list[at]];
  }

  // A better sequence for items[from, to), as positions relative to `from`. `memo`, unless null:
  // what is known.
  std::vector<int> improve(const std::vector<int>& items, int from, int to,
                           StretchMemo* memo) const;
  std::vector<int> improve(const std::vector<int>& items, int from, int to) const;

 private:
  std::vector<int> look_of(const std::vector<int>& items, int from, int to) const;

  const Wiring& wiring_;
  const OrderOptions& options_;
  std::vector<int> left_;  // [value] items yet to be eliminated
};

}  // namespace motley::solver
