#include "trials/statistics.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace motley::grid::trials {

namespace {

std::vector<double> ranks(const std::vector<double>& x) {
  std::vector<size_t> order(x.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return x[a] < x[b]; });
  std::vector<double> rank(x.size());
  for (size_t i = 0; i < order.size();) {
    size_t j = i;
    while (j < order.size() && x[order[j]] == x[order[i]]) ++j;
    for (size_t k = i; k < j; ++k) rank[order[k]] = (i + j - 1) / 2.0;
    i = j;
  }
  return rank;
}

}  // namespace

double spearman(const std::vector<double>& x, const std::vector<double>& y) {
  const std::vector<double> a = ranks(x), b = ranks(y);
  const double mean = (a.size() - 1) / 2.0;
  double ab = 0, aa = 0, bb = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    ab += (a[i] - mean) * (b[i] - mean);
    aa += (a[i] - mean) * (a[i] - mean);
    bb += (b[i] - mean) * (b[i] - mean);
  }
  return ab / std::sqrt(aa * bb);
}

double kendall(const std::vector<double>& x, const std::vector<double>& y) {
  double agree = 0, tied_x = 0, tied_y = 0, pairs = 0;
  for (size_t i = 0; i < x.size(); ++i)
    for (size_t j = 0; j < i; ++j) {
      const double a = x[i] - x[j], b = y[i] - y[j];
      ++pairs;
      if (a == 0) ++tied_x;
      if (b == 0) ++tied_y;
      if (a * b != 0) agree += a * b > 0 ? 1 : -1;
    }
  return agree / std::sqrt((pairs - tied_x) * (pairs - tied_y));
}

double mape(const std::vector<double>& predicted, const std::vector<double>& measured) {
  double sum = 0;
  for (size_t i = 0; i < predicted.size(); ++i) sum += std::abs(predicted[i] / measured[i] - 1);
  return sum / static_cast<double>(predicted.size());
}

}  // namespace motley::grid::trials
