// Runs: the maximal repetitions of a sequence.
//
// A run (first, end, period) is a range of at least two periods in which every element equals the
// one a period later, with the smallest such period, that cannot be extended on either side. A
// sequence of n has fewer than n runs, and they contain every tandem repeat. "The most frequent
// sub-sequence" of HAPT section 5.1 is ill-defined on tandem repeats (any rotation of a transformer
// block is as frequent as the block); runs are not.
//
// Found through Lyndon words (Bannai et al., "The runs theorem", 2017): the longest Lyndon word at
// a position, for the order of elements or its reverse, has the period of every run as its length;
// longest common extensions of the two ends then give the run. Suffix arrays by prefix doubling,
// common prefixes by Kasai's algorithm and a sparse table: O(n log^2 n) time, O(n log n) memory.
#pragma once

#include <cstdint>
#include <vector>

namespace motley::pipeline {

struct Repetition {
  int first = 0, end = 0, period = 0;
  friend bool operator==(const Repetition&, const Repetition&) = default;
  friend auto operator<=>(const Repetition&, const Repetition&) = default;
};

std::vector<Repetition> find_runs(const std::vector<int>& sequence);  // sorted

// Longest common extensions of positions of one sequence, O(1) each.
class Extensions {
 public:
  explicit Extensions(const std::vector<int>& sequence);
  int common(int a, int b) const;                         // of the suffixes that start at a and b
  const std::vector<int>& rank() const { return rank_; }  // of suffixes, [position]

 private:
  int n_;
  std::vector<int> rank_;
  std::vector<std::vector<int>> least_;  // [k][i] least of 2^k neighbouring common prefixes
};

}  // namespace motley::pipeline
