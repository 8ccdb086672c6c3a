// Mutants of plans: what a slip of an editor, a bug of a search or a stranger may make of a file.
// Every mutant that the checker calls sound is run, and has to equal the model on one device.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/file.h"
#include "core/rng.h"

namespace motley {

// Arguments of `motley plan`, model and cluster included, of small plans of every kind.
const std::vector<std::string>& mutated_plans();

// Changes one to three things of a plan (programs, ratios, stages, schedule, divisions, reductions,
// graph) and returns what they were.
std::string mutate(Json* plan, Rng* rng);

struct MutantReport {
  int mutants = 0;
  int unreadable = 0;              // refused by parse_plan
  int unsound = 0;                 // refused by the checker
  int equal = 0;                   // accepted, run, equal to one device
  int graphs = 0;                  // of all: the graph was changed
  std::vector<std::string> wrong;  // accepted, but other losses or gradients, a crash, or a hang
};

// Makes and judges mutants of the plans that `motley` (its path) makes of these arguments, each in
// a process of its own. `of_each`: how many of each plan. Files are made in `folder`.
MutantReport run_mutants(const std::string& motley, const std::string& folder,
                         const std::vector<std::string>& plans, int of_each, uint64_t seed,
                         bool verbose);

}  // namespace motley
