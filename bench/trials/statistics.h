// How well predictions agree with what was measured.
#pragma once

#include <vector>

namespace motley::grid::trials {

// Rank correlations of two lists of equal length.
double spearman(const std::vector<double>& x, const std::vector<double>& y);
double kendall(const std::vector<double>& x, const std::vector<double>& y);  // tau-b

// The mean of |predicted / measured - 1|.
double mape(const std::vector<double>& predicted, const std::vector<double>& measured);

}  // namespace motley::grid::trials
