#include "pipeline/runs.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <utility>

namespace motley::pipeline {

Extensions::Extensions(const std::vector<int>& sequence) : n_(static_cast<int>(sequence.size())) {
  std::vector<int> order(n_), next(n_), begin;
  std::iota(order.begin(), order.end(), 0);
  rank_ = sequence;
  // By prefixes twice as long each time: by their second halves, which the last order tells, and
  // then by their first.
  for (int width = 0;; width = width == 0 ? 1 : 2 * width) {
    auto key = [&](int i) {
      return std::pair(rank_[i], width == 0 ? 0 : i + width < n_ ? rank_[i + width] + 1 : 0);
    };
    if (width == 0) {
      std::sort(order.begin(), order.end(), [&](int a, int b) { return rank_[a] < rank_[b]; });
    } else {
      int at = 0;
      for (int i = std::max(0, n_ - width); i < n_; ++i) next[at++] = i;
      for (const int i : order)
        if (i >= width) next[at++] = i - width;
      begin.assign(n_ + 1, 0);
      for (const int rank : rank_) ++begin[rank + 1];
      std::partial_sum(begin.begin(), begin.end(), begin.begin());
      for (const int i : next) order[begin[rank_[i]]++] = i;
    }
    for (int i = 0; i < n_; ++i)
      next[order[i]] =
          i == 0 ? 0 : next[order[i - 1]] + (key(order[i - 1]) < key(order[i]) ? 1 : 0);
    rank_ = next;
    if (n_ == 0 || rank_[order[n_ - 1]] == n_ - 1) break;
  }
  std::vector<int> prefix(std::max(0, n_ - 1));  // of neighbours in suffix order
  for (int i = 0, h = 0; i < n_; ++i) {
    if (rank_[i] == n_ - 1) {
      h = 0;
      continue;
    }
    int j = order[rank_[i] + 1];
    while (i + h < n_ && j + h < n_ && sequence[i + h] == sequence[j + h]) ++h;
    prefix[rank_[i]] = h;
    h = std::max(0, h - 1);
  }
  least_.push_back(std::move(prefix));
  for (size_t k = 1; (size_t{1} << k) <= least_[0].size(); ++k) {
    const auto& half = least_[k - 1];
    std::vector<int> row(half.size() - (size_t{1} << (k - 1)));
    for (size_t i = 0; i < row.size(); ++i)
      row[i] = std::min(half[i], half[i + (size_t{1} << (k - 1))]);
    least_.push_back(std::move(row));
  }
}

int Extensions::common(int a, int b) const {
  if (a == b) return n_ - a;
  if (a >= n_ || b >= n_) return 0;
  int from = rank_[a], to = rank_[b];
  if (from > to) std::swap(from, to);
  int k = std::bit_width(static_cast<unsigned>(to - from)) - 1;
  return std::min(least_[k][from], least_[k][to - (1 << k)]);
}

std::vector<Repetition> find_runs(const std::vector<int>& sequence) {
  int n = static_cast<int>(sequence.size());
  if (n < 2) return {};
  Extensions ahead(sequence);
  Extensions back(std::vector<int>(sequence.rbegin(), sequence.rend()));
  // The same with the order of elements reversed; the end still sorts first.
  std::vector<int> negated(sequence);
  for (int& x : negated) x = -x;
  int low = *std::min_element(negated.begin(), negated.end());
  for (int& x : negated) x -= low;
  Extensions reversed(negated);
  std::vector<Repetition> runs;
  for (const std::vector<int>* rank : {&ahead.rank(), &reversed.rank()}) {
    std::vector<int> stack;
    for (int i = n - 1; i >= 0; --i) {
      while (!stack.empty() && (*rank)[stack.back()] > (*rank)[i]) stack.pop_back();
      int j = stack.empty() ? n : stack.back();  // the next smaller suffix: i..j-1 is Lyndon
      stack.push_back(i);
      int period = j - i;
      int right = j < n ? ahead.common(i, j) : 0;
      int left = i > 0 && j > 0 ? back.common(n - i, n - j) : 0;
      if (right + left >= period) runs.push_back({i - left, j + right, period});
    }
  }
  std::sort(runs.begin(), runs.end());
  runs.erase(std::unique(runs.begin(), runs.end()), runs.end());
  return runs;
}

}  // namespace motley::pipeline
