// Predictions of rows that their constants have not seen.
#pragma once

#include "trials/fit.h"
#include "trials/sets.h"

namespace motley::grid::trials {

// Of one set, [trial] each.
struct Judged {
  Vector left_out;          // by constants of which none saw a row of the set: the headline
  Vector ten_fold;          // a tenth of the rows, by all others and the other sets
  Vector unfitted;          // by the catalogue alone
  Constants without, with;  // those of left_out; fitted to all sets
};

// Rows that were measured.
std::vector<int> rows_of(const Set& set);

// `sets`: all there are. Profiles of layers alone are seen in every case but `unfitted`.
// `folds`: 0: no ten-fold.
Judged judge(const Set& set, const std::vector<const Set*>& sets, int folds = 10);

// The same where the rows of one kind (a model, a number of devices) are left out in turn.
Vector leave_out_by(const Set& set, const std::vector<const Set*>& sets,
                    const std::function<int(const Trial&)>& kind);

// Memory with nothing fitted: the mean error of a trial's fullest stage, and what shares of the
// prediction its parts have on average.
double memory_error(const Set& set, MemoryParts* shares);

}  // namespace motley::grid::trials
