// Predictions of rows that their calibration has not seen.
#pragma once

#include "trials/fit.h"
#include "trials/sets.h"

namespace motley::grid::trials {

struct Judged {
  // [trial], by a calibration that has not seen it.
  Vector predicted, without_time_scales;
  Vector other_models;  // that has seen no trial of its model; empty: there are no others
  Fitted fitted;        // to all rows
};

// The rows are shuffled once and cut in ten folds, each predicted from the other nine.
Judged judge(const Set& set);

// Memory: the bytes the model does not state are a constant per device and a share of the
// activations, two numbers fitted on all trials but the one predicted. Returns the mean error.
double memory_error(const Set& set);

}  // namespace motley::grid::trials
