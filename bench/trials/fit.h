// Constants of devices, links and the framework, fitted to the trials of several sets together.
//
// A parameter has one value wherever it occurs: "A100-80GB flops" of one node is that of many. So what
// one set taught is what another, of which no row was seen, is predicted with.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "grid/estimate.h"
#include "trials/sets.h"

namespace motley::grid::trials {

using Vector = std::vector<double>;
using Constants = std::map<std::string, double>;  // by name of the parameter, logarithms

// The trials of a set that a fit sees.
struct Seen {
  const Set* set = nullptr;
  std::vector<int> rows;
};

// Every parameter that a row or a profile of `seen` depends on, by least squares on
// log(predicted / measured) with a weak prior at its start. Profiles of layers alone are seen of all of
// `profiled`: they are what `motley calibrate` would measure of a device, and no trials.
Constants fit(const std::vector<Seen>& seen, const std::vector<const Set*>& profiled);

// Parts of the cost model that can be broken, to see that predictions need them.
enum class Mechanism {
  none,
  launches,
  products,
  traffic,
  collectives,
  messages,
  recomputation,
  schedule
};
inline constexpr Mechanism kMechanisms[] = {
    Mechanism::none,        Mechanism::launches, Mechanism::products,      Mechanism::traffic,
    Mechanism::collectives, Mechanism::messages, Mechanism::recomputation, Mechanism::schedule};
const char* to_string(Mechanism mechanism);

// What the cost model says with these constants; those that are not there are the catalogue's.
// REQUIRES: `set` outlives it.
class Predictor {
 public:
  Predictor(const Set& set, Constants constants, Mechanism without = Mechanism::none)
      : set_(set), constants_(std::move(constants)), without_(without) {}
  Estimate operator()(const Trial& trial);
  double operator()(const Profile& profile);  // seconds
  const Estimator& estimator(int model, int of_cluster);

 private:
  const Set& set_;
  Constants constants_;
  Mechanism without_;
  std::map<std::pair<int, int>, std::unique_ptr<Estimator>> estimators_;
};

// Solves (A + damping * diag(A)) x = b by Gaussian elimination.
Vector solve(std::vector<Vector> a, Vector b, double damping);

}  // namespace motley::grid::trials
