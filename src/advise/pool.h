// All plans that were found for a question, each tried on every cluster that has its devices.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "advise/advise.h"

namespace motley::advise {

class Pool {
 public:
  explicit Pool(const Question& question);  // which outlives this

  // A plan that was found for a variant. Of the plans of a variant the first few are kept.
  void add(const Variant& variant, planner::Candidate candidate);
  // None was.
  void failed(const Variant& variant, const std::string& reason);

  // The best of all plans whose devices a variant has, by the objective; where there is a deadline,
  // those that meet it first.
  Answer answer(const Variant& variant);
  // The least spent of those that take no longer; not found: none does.
  Answer cheapest(const Variant& variant, Seconds deadline);
  // That of answer(), on its own devices; null: there is none.
  std::shared_ptr<Plan> plan_of(const Variant& variant);

  double value(const Cost& cost) const;        // by the objective
  double rate(const std::string& type) const;  // of a device: money a second, or 1
  double spent(const Cost& cost) const;        // money; where there are no prices, device-seconds
  bool has_price(const std::string& type) const;
  bool has_watts(const std::string& type) const;
  bool priced() const { return priced_; }
  bool powered() const { return powered_; }

 private:
  struct Known {
    std::shared_ptr<Plan> plan;  // its cluster has the devices that work alone
    std::vector<int64_t> ids;    // of these
    std::string what;
  };
  struct Tried {
    bool fits = false;
    Cost cost;
    std::vector<std::pair<std::string, int>> uses;
  };
  const Tried& tried(const Known& known, size_t number, const Variant& variant);
  const Tariff* tariff(const std::string& type) const;
  template <typename Better>
  Answer best(const Variant& variant, Better&& better, size_t* which);

  const Question& question_;
  bool priced_ = false, powered_ = false;
  std::vector<Known> known_;
  std::map<std::string, int> kept_;             // of a variant, by its devices and cluster
  std::map<std::string, std::string> reasons_;  // by variant
  std::map<std::pair<size_t, std::string>, Tried> tried_;
};

}  // namespace motley::advise
