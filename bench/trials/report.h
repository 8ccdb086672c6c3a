// What is printed of a set's predictions, and the bars they are held to.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "trials/judge.h"
#include "trials/sets.h"

namespace motley::grid::trials {

struct Statistics {
  double mape = 0, spearman = 1, regret = 1;  // percent; of the one predicted fastest
};

// A line of the table.
Statistics print_statistics(const std::string& name, const Vector& predicted,
                            const Vector& measured);

// The same of the trials that are used. `predictions`: [trial], 0: none.
Statistics report(const std::string& name, const Set& set, const Vector& predictions,
                  const std::function<bool(const Trial&)>& use);

// Failures: which trials failed, against those said not to fit or to have a stage without a block;
// and the failed among the ten predicted fastest, which it returns.
int report_failures(const Set& set, const Judged& judged);

void print_fit(const Set& set, const Judged& judged);
void print_rows(const Set& set, const Judged& judged);

// What predictions are held to.
class Bars {
 public:
  // At most this error and regret, at least this correlation.
  void hold(const std::string& name, const Statistics& is, const Statistics& bar);
  // Prints what was missed; whether all was held.
  bool held() const;

 private:
  std::vector<std::string> missed_;
};

}  // namespace motley::grid::trials
