// The calibration of a set: its parameters, and time scales of layers, fitted to trials.
#pragma once

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "grid/estimate.h"
#include "trials/sets.h"

namespace motley::grid::trials {

using Vector = std::vector<double>;

using TimeScales = std::map<int, std::map<std::pair<int, int>, double>>;  // by width of the model

struct Fitted {
  Vector logs;  // [parameter]
  TimeScales time_scales;
};

// Fits a set's parameters to the trials `rows` and to its profiles, by least squares on
// log(predicted / measured) with a weak prior at their starts; and where the set says so, time
// scales.
Fitted fit(const Set& set, const std::vector<int>& rows);

// What the cost model says with a calibration that was fitted. REQUIRES: `set` outlives it.
class Predictor {
 public:
  Predictor(const Set& set, Fitted fitted) : set_(set), fitted_(std::move(fitted)) {}
  Estimate operator()(const Trial& trial) {
    return estimator(trial.model, trial.cluster).estimate(trial.strategy);
  }
  double operator()(const Profile& profile);  // seconds

 private:
  const Estimator& estimator(int model, int of_cluster);

  const Set& set_;
  Fitted fitted_;
  std::map<std::pair<int, int>, std::unique_ptr<Estimator>> estimators_;
};

// The calibration of the set's first model on its first cluster, without time scales. `logs`: as
// fitted.
Calibration calibrated(const Set& set, const Vector& logs);

// Solves (A + damping * diag(A)) x = b by Gaussian elimination.
Vector solve(std::vector<Vector> a, Vector b, double damping);

}  // namespace motley::grid::trials
