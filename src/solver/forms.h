// Sets of forms of one value: closures under free conversions, least costs between sets, and the
// ways a set can grow. All that the folded search asks about conversions, tabulated on demand.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

#include "solver/problem.h"

namespace motley::solver {

struct Grown {
  uint32_t forms;  // available afterwards
  double cost;
};

class FormSpace {
 public:
  explicit FormSpace(const FormTable& table);

  int forms() const { return n_; }

  // The set with all that it yields for nothing.
  uint32_t close(uint32_t set) const;

  // Least cost of making all of `want` available from `have`.
  double steiner(uint32_t have, uint32_t want);

  // The same from every single form: forms() numbers, valid until the next call.
  const double* from_each(uint32_t want) {
    return tree_.empty() ? from_each_anew(want) : &tree_[static_cast<size_t>(want) * n_];
  }

  // The set of available forms without those that help no consumer who may need `need`.
  uint32_t available(uint32_t set, uint32_t need) const;

  // The set of required forms without those that another required form yields for nothing.
  uint32_t required(uint32_t set) const;

  // Ways to make `want` available from `have` when consumers of `need` remain; none dominated.
  const std::vector<Grown>& grow(uint32_t have, uint32_t want, uint32_t need);

 private:
  static constexpr int kDense = 9;  // forms up to which whole rows of costs are tabulated

  const double* from_each_anew(uint32_t want);
  void plant();
  const double* row(uint32_t have);
  double distance(uint32_t set, int to) const;
  bool leads_to(int from, uint32_t need) const;
  void chains(uint32_t set, uint32_t tips, uint32_t want, double cost);
  void prune(std::vector<Grown>* list);

  const FormTable* table_;
  int n_;
  double dist_[kMaxForms][kMaxForms];
  uint32_t free_[kMaxForms];
  std::vector<double> tree_;               // [want * n + root] least arborescences
  std::vector<std::vector<double>> rows_;  // [have][want], empty until asked for
  std::unordered_map<uint32_t, double> sparse_;
  std::array<double, kMaxForms> each_;  // of from_each(), where there are no tables
  std::map<std::array<uint32_t, 3>, std::vector<Grown>> grown_;
  std::vector<Grown> found_;
};

}  // namespace motley::solver
